// Drawing tokens in a few passes over a row of logits, without sorting it.
//
// What may be drawn is everything whose scaled logit, (logit - highest) / temperature, is at least
// some limit: min_p gives one, the top_k-th largest logit another, and top_p raises it for as long
// as the draw falls outside. Equally likely tokens are therefore in or out together. The draw is the
// largest scaled logit plus noise, of equals the lowest id; NaN is never drawn. Scaled logits, noise
// and their sum are fp32 as in worker/sampling/sampler.py. Nothing depends on other rows.
// Sources: rejection in place of sorting, each rejected token becoming the limit: FlashInfer's
// sampling (2025). Ruling out most tokens by a bound of their noise is our own.
#include "sampling.h"

#include "pool.h"
#include "vocabulary.h"

namespace serve {
namespace {

constexpr float kLowest = std::numeric_limits<float>::lowest();
constexpr float kNear = -12.0f;  // scaled; 150,000 tokens below hold less than the best one

struct Controls {
  float temperature, top_k, top_p, min_p;
};

// One row's draw.
class Draw {
 public:
  // scratch: num_floats(vocab) of them.
  Draw(const float* row, int64_t vocab, const Controls& controls, Noise noise, float* scratch)
      : row_(row),
        vocab_(vocab),
        controls_(controls),
        noise_(noise),
        tokens_{row, nullptr, vocab},
        maxima_(scratch),
        logits_(maxima_ + num_maxima(vocab)),
        ordered_(logits_ + vocab),
        ids_(reinterpret_cast<int32_t*>(ordered_ + vocab)) {}

  static size_t num_floats(int64_t vocab) {
    return static_cast<size_t>(num_maxima(vocab) + 3 * vocab + kLanes);
  }

  int64_t run() {
    peak_ = find_peak(row_, vocab_, maxima_);
    if (controls_.temperature == 0.0f || peak_.logit == -kMinusInfinity) return peak_.token;
    // Relative to the row's maximum nothing overflows, however small the temperature; where nothing
    // is allowed, -inf would leave no number.
    scale_ = {std::max(peak_.logit, kLowest), controls_.temperature};
    float limit = std::max(kLowest, std::log(controls_.min_p));
    if (controls_.top_k < static_cast<float>(vocab_)) {
      limit = std::max(limit, keep_top(std::max<int64_t>(1, controls_.top_k)));
    }
    int64_t token = draw(limit);
    if (controls_.top_p >= 1.0f) return token;
    // Most draws are within a part of the mass that few tokens hold; the others need all of it.
    double more_likely = mass_above(token);
    if (more_likely < controls_.top_p * mass(tokens_, scale_, std::max(limit, kNear))) return token;
    const double goal = controls_.top_p * mass(tokens_, scale_, limit);
    while (more_likely > 0.0 && more_likely >= goal) {
      token = draw(above(token));
      more_likely = mass_above(token);
    }
    return token;
  }

 private:
  // The least scaled logit of what is more likely than a token.
  float above(int64_t token) const {
    return std::nextafter(scale_(row_[token]), -kMinusInfinity);
  }
  double mass_above(int64_t token) const { return mass(tokens_, scale_, above(token)); }

  // Leaves in view what may be as likely as the top_k-th token; returns that one's scaled logit.
  float keep_top(int64_t top_k) {
    const float reached = scale_(reached_by(top_k, maxima_, vocab_));
    const Vec least = splat(std::max(kLowest, reached));
    tokens_ = list_tokens(
        tokens_, [&](Vec logits) { return at_least(scale_(logits), least); }, logits_, ids_);
    if (tokens_.count < top_k) return kLowest;  // no more are allowed
    std::copy_n(logits_, tokens_.count, ordered_);
    return scale_(nth_largest(ordered_, tokens_.count, top_k));
  }

  // The draw among tokens in view whose scaled logit is at least `limit`; the most likely one's is.
  int64_t draw(float limit) const {
    int64_t token = peak_.token;
    float best = scale_(peak_.logit) + noise_(static_cast<int32_t>(token));
    tokens_.each([&](Vec logits, Integers ids) {
      const Vec scaled = scale_(logits);
      uint32_t chances = at_least(scaled, splat(std::max(limit, best - Noise::kMost)));
      if (!chances) return;
      chances &= at_least(add(scaled, noise_.bound(ids)), splat(best));
      for_lanes(chances, scaled, ids, [&](float value, int32_t id) {
        const float noisy = value + noise_(id);
        if (noisy > best || (noisy == best && id < token)) {
          best = noisy;
          token = id;
        }
      });
    });
    return token;
  }

  const float* const row_;
  const int64_t vocab_;
  const Controls& controls_;
  const Noise noise_;
  Tokens tokens_;  // in view
  float *const maxima_, *const logits_, *const ordered_;
  int32_t* const ids_;
  Peak peak_{};
  Scale scale_{};
};

}  // namespace
}  // namespace serve

using namespace serve;

void serve_argmax(Pool* pool, const float* logits, int64_t num_rows, int64_t vocab,
                  int64_t* tokens) {
  pool->run(num_rows, [=](int64_t row, int thread) {
    float* maxima = pool->scratch(thread, static_cast<size_t>(num_maxima(vocab)));
    tokens[row] = find_peak(logits + row * vocab, vocab, maxima).token;
  });
}

void serve_draw(Pool* pool, const float* logits, int64_t num_rows, int64_t vocab,
                const float* controls, int64_t controls_stride, const int32_t* keys,
                int64_t* tokens) {
  pool->run(num_rows, [=](int64_t row, int thread) {
    const float* wish = controls + row * controls_stride;
    const Controls own{wish[0], wish[1], wish[2], wish[3]};
    Draw draw(logits + row * vocab, vocab, own, Noise(keys[2 * row], keys[2 * row + 1]),
              pool->scratch(thread, Draw::num_floats(vocab)));
    tokens[row] = draw.run();
  });
}
