// Passes over one row of logits, by sixteen tokens.
//
// Probability masses are summed in fp64 over sums of 1024 terms in fp32. NaN counts as not allowed.
#pragma once

#include <algorithm>
#include <bit>
#include <functional>

#include "noise.h"

namespace serve {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Tokens behind each vector of maxima: a lane of it stands for kMaximaBlock / kLanes of them.
constexpr int64_t kMaximaBlock = 512;

inline int64_t num_maxima(int64_t vocab) {
  return (vocab + kMaximaBlock - 1) / kMaximaBlock * kLanes;
}

// Tokens in view: all, by id, or those listed in ascending order.
struct Tokens {
  const float* logits;
  const int32_t* ids;  // or null; readable to the next multiple of kLanes
  int64_t count;

  // Calls use(sixteen logits, their ids); past the end the logits are NaN and the ids any.
  template <class Use>
  void each(Use use) const {
    alignas(64) constexpr int32_t kFirstIds[kLanes] = {0, 1, 2,  3,  4,  5,  6,  7,
                                                       8, 9, 10, 11, 12, 13, 14, 15};
    Integers counted = load(kFirstIds);
    for (int64_t i = 0; i < count; i += kLanes, counted = add(counted, splat_integer(kLanes))) {
      const auto lanes = static_cast<int>(std::min<int64_t>(kLanes, count - i));
      use(load_first(logits + i, lanes, kNan), ids ? load(ids + i) : counted);
    }
  }
};

// Calls use(value, id) for every lane whose bit is set.
template <class Use>
inline void for_lanes(uint32_t mask, Vec values, Integers ids, Use use) {
  if (!mask) return;
  float some_values[kLanes];
  int32_t some_ids[kLanes];
  store(some_values, values);
  store(some_ids, ids);
  for (; mask; mask &= mask - 1) {
    const int lane = std::countr_zero(mask);
    use(some_values[lane], some_ids[lane]);
  }
}

// (logit - highest) / temperature, rounded twice.
struct Scale {
  float highest, temperature;

  float operator()(float logit) const { return (logit - highest) / temperature; }
  Vec operator()(Vec logits) const {
    const Vec scaled = div(sub(logits, splat(highest)), splat(temperature));
    return max(scaled, splat(kMinusInfinity));
  }
};

struct Peak {
  float logit;
  int64_t token;
};

// The largest of a row's logits and the first token that has it; fills maxima[num_maxima].
inline Peak find_peak(const float* logits, int64_t vocab, float* maxima) {
  constexpr int kAbreast = 4;  // hides the latency of a comparison
  const Vec nothing = splat(kMinusInfinity);
  Vec highest = nothing;
  for (int64_t start = 0; start < vocab; start += kMaximaBlock) {
    const int64_t last = std::min(vocab, start + kMaximaBlock);
    Vec most[kAbreast] = {nothing, nothing, nothing, nothing};
    int64_t i = start;
    for (; i + kAbreast * kLanes <= last; i += kAbreast * kLanes) {
      for (int j = 0; j < kAbreast; ++j) most[j] = max(load(logits + i + j * kLanes), most[j]);
    }
    for (; i < last; i += kLanes) {
      const auto lanes = static_cast<int>(std::min<int64_t>(kLanes, last - i));
      most[0] = max(load_first(logits + i, lanes, kMinusInfinity), most[0]);
    }
    const Vec all = max(max(most[0], most[1]), max(most[2], most[3]));
    store(maxima + start / kMaximaBlock * kLanes, all);
    highest = max(highest, all);
  }
  const float peak = maximum(highest);
  for (int64_t start = 0; start < vocab; start += kMaximaBlock) {
    if (!at_least(load(maxima + start / kMaximaBlock * kLanes), splat(peak))) continue;
    const float* end = logits + std::min(vocab, start + kMaximaBlock);
    const float* found = std::find(logits + start, end, peak);
    if (found != end) return {peak, found - logits};
  }
  return {kMinusInfinity, 0};  // all NaN
}

// Reorders `values`.
inline float nth_largest(float* values, int64_t count, int64_t n) {
  std::nth_element(values, values + n - 1, values + count, std::greater<>());
  return values[n - 1];
}

// A logit that n tokens or more reach, and, as long as n is small, not many more. Reorders maxima.
inline float reached_by(int64_t n, float* maxima, int64_t vocab) {
  return n <= num_maxima(vocab) ? nth_largest(maxima, num_maxima(vocab), n) : kMinusInfinity;
}

// Those tokens whose bits reached(logits) sets, written out to `logits` and `ids`.
template <class Reached>
inline Tokens list_tokens(const Tokens& from, Reached reached, float* logits, int32_t* ids) {
  int64_t count = 0;
  from.each([&](Vec some_logits, Integers some_ids) {
    for_lanes(reached(some_logits), some_logits, some_ids, [&](float logit, int32_t id) {
      logits[count] = logit;
      ids[count++] = id;
    });
  });
  return {logits, ids, count};
}

// The sum of e^scaled over the tokens whose scaled logit is at least `limit`.
inline double mass(const Tokens& tokens, const Scale& scale, float limit) {
  constexpr int kVectors = 1024 / kLanes;
  const Vec least = splat(limit);
  double total = 0.0;
  Vec part = splat(0.0f);
  int vectors = 0;
  tokens.each([&](Vec logits, Integers) {
    const Vec scaled = scale(logits);
    if (at_least(scaled, least)) part = add(part, zero_below(exp(scaled), scaled, least));
    if (++vectors % kVectors == 0) {
      total += sum(part);
      part = splat(0.0f);
    }
  });
  return total + sum(part);
}

}  // namespace serve
