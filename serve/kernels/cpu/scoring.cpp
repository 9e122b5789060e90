// Penalties, and what logits say about given tokens.
//
// A token that is not allowed (-inf), or NaN, scores -inf; of equal logits the lower id is better.
#include <numeric>

#include "pool.h"
#include "sampling.h"
#include "vocabulary.h"

namespace serve {
namespace {

// With the roundings of worker/sampling/logit_edits.py. controls: presence, frequency, repetition.
float penalized(float logit, const float* controls, int32_t generated) {
  const float weakened = logit > 0.0f ? logit / controls[2] : logit * controls[2];
  const float often = controls[1] * static_cast<float>(generated);
  return weakened - (often + (generated > 0 ? controls[0] : 0.0f));
}

// Most tokens have not occurred and are passed over sixteen at a time.
void penalize_row(float* logits, int64_t vocab, const float* controls, const int32_t* generated,
                  const uint8_t* in_prompt) {
  for (int64_t start = 0; start < vocab; start += kLanes) {
    const int64_t last = std::min(vocab, start + kLanes);
    if (last - start == kLanes) {
      const __m256i counts =
          _mm256_or_si256(load_256(generated + start), load_256(generated + start + kLanes / 2));
      const __m128i flags = load_128(in_prompt + start);
      if (_mm256_testz_si256(counts, counts) && _mm_testz_si128(flags, flags)) continue;
    }
    for (int64_t token = start; token < last; ++token) {
      if (generated[token] > 0 || in_prompt[token]) {
        logits[token] = penalized(logits[token], controls, generated[token]);
      }
    }
  }
}

// One row's scores.
class Scoring {
 public:
  // scratch: num_floats(vocab) of them.
  Scoring(const float* row, int64_t vocab, float* scratch)
      : row_{row, nullptr, vocab},
        maxima_(scratch),
        logits_(maxima_ + num_maxima(vocab)),
        ids_(reinterpret_cast<int32_t*>(logits_ + vocab)),
        order_(ids_ + vocab + kLanes) {
    const float peak = find_peak(row, vocab, maxima_).logit;
    log_total_ = peak + std::log(mass(row_, {peak, 1.0f}, kLeastExponent));
  }

  static size_t num_floats(int64_t vocab) {
    return static_cast<size_t>(num_maxima(vocab) + 3 * vocab + kLanes);
  }

  float logprob(float logit) const {
    return logit > kMinusInfinity ? static_cast<float>(logit - log_total_) : kMinusInfinity;
  }

  // 1 for the most likely; equal logits share the better rank.
  int64_t rank(float logit) const {
    int64_t rank = 1;
    const Vec own = splat(logit);
    row_.each([&](Vec logits, Integers) {
      rank += std::popcount(at_least(logits, own) & ~at_least(own, logits));
    });
    return rank;
  }

  void list_best(int64_t num_top, int64_t* ids, float* logprobs) const {
    const Vec least = splat(reached_by(num_top, maxima_, row_.count));
    const Tokens listed = list_tokens(
        row_, [&](Vec logits) { return at_least(logits, least); }, logits_, ids_);
    const int64_t found = std::min(num_top, listed.count);
    std::iota(order_, order_ + listed.count, 0);
    std::partial_sort(order_, order_ + found, order_ + listed.count, [&](int32_t a, int32_t b) {
      return logits_[a] != logits_[b] ? logits_[a] > logits_[b] : a < b;
    });
    for (int64_t i = 0; i < found; ++i) {
      ids[i] = ids_[order_[i]];
      logprobs[i] = logprob(logits_[order_[i]]);
    }
    std::fill(ids + found, ids + num_top, 0);  // only NaN is left
    std::fill(logprobs + found, logprobs + num_top, kMinusInfinity);
  }

 private:
  static constexpr float kLeastExponent = -88.0f;  // of e; less gives 0

  const Tokens row_;
  float *const maxima_, *const logits_;
  int32_t *const ids_, *const order_;
  double log_total_;
};

}  // namespace
}  // namespace serve

using namespace serve;

void serve_penalize(Pool* pool, float* logits, int64_t num_rows, int64_t vocab,
                    const float* controls, const int32_t* generated, const uint8_t* in_prompt) {
  pool->run(num_rows, [=](int64_t row, int) {
    const int64_t start = row * vocab;
    penalize_row(logits + start, vocab, controls + 3 * row, generated + start, in_prompt + start);
  });
}

void serve_score(Pool* pool, const float* logits, int64_t num_rows, int64_t vocab,
                 const int64_t* tokens, int64_t num_top, const ServeScores* scores) {
  pool->run(num_rows, [=](int64_t row, int thread) {
    const float* own = logits + row * vocab;
    const Scoring scoring(own, vocab, pool->scratch(thread, Scoring::num_floats(vocab)));
    scores->logprobs[row] = scoring.logprob(own[tokens[row]]);
    scores->ranks[row] = scoring.rank(own[tokens[row]]);
    if (num_top > 0) {
      scoring.list_best(num_top, scores->top_ids + row * num_top,
                        scores->top_logprobs + row * num_top);
    }
  });
}
