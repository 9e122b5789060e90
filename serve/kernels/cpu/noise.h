// Gumbel noise of (seed, position, token): the twin of worker/sampling/noise.py.
#pragma once

#include <cmath>
#include <limits>

#include "simd.h"

namespace serve {

#if defined(__AVX512F__)

// Sixteen 32-bit integers, unsigned where it matters.
struct Integers {
  __m512i v;
};

inline Integers splat_integer(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline Integers load(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
inline void store(int32_t* p, Integers a) { _mm512_storeu_si512(p, a.v); }
inline Integers add(Integers a, Integers b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline Integers mul(Integers a, Integers b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
inline Integers exclusive_or(Integers a, Integers b) { return {_mm512_xor_si512(a.v, b.v)}; }
inline Integers both(Integers a, Integers b) { return {_mm512_and_si512(a.v, b.v)}; }
template <int N>
inline Integers shift_right(Integers a) {
  return {_mm512_srli_epi32(a.v, N)};
}
inline Vec to_float(Integers a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline Integers bits_of(Vec a) { return {_mm512_castps_si512(a.v)}; }
// One bit per lane: a >= b, and neither is NaN.
inline uint32_t at_least(Vec a, Vec b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ); }

#else

// Sixteen 32-bit integers, unsigned where it matters.
struct Integers {
  __m256i lo, hi;
};

inline Integers splat_integer(int32_t x) {
  __m256i v = _mm256_set1_epi32(x);
  return {v, v};
}
inline Integers load(const int32_t* p) { return {load_256(p), load_256(p + 8)}; }
inline void store(int32_t* p, Integers a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a.lo);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), a.hi);
}
inline Integers add(Integers a, Integers b) {
  return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)};
}
inline Integers mul(Integers a, Integers b) {
  return {_mm256_mullo_epi32(a.lo, b.lo), _mm256_mullo_epi32(a.hi, b.hi)};
}
inline Integers exclusive_or(Integers a, Integers b) {
  return {_mm256_xor_si256(a.lo, b.lo), _mm256_xor_si256(a.hi, b.hi)};
}
inline Integers both(Integers a, Integers b) {
  return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)};
}
template <int N>
inline Integers shift_right(Integers a) {
  return {_mm256_srli_epi32(a.lo, N), _mm256_srli_epi32(a.hi, N)};
}
inline Vec to_float(Integers a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
inline Integers bits_of(Vec a) { return {_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)}; }
// One bit per lane: a >= b, and neither is NaN.
inline uint32_t at_least(Vec a, Vec b) {
  auto lo = _mm256_movemask_ps(_mm256_cmp_ps(a.lo, b.lo, _CMP_GE_OQ));
  auto hi = _mm256_movemask_ps(_mm256_cmp_ps(a.hi, b.hi, _CMP_GE_OQ));
  return static_cast<uint32_t>(lo) | static_cast<uint32_t>(hi) << 8;
}

#endif

class Noise {
 public:
  // Of one row; the keys are those of noise_keys().
  Noise(int32_t first_key, int32_t second_key) : first_(first_key), second_(second_key | 1) {}

  // More noise than this no token has: the least uniform number is 2^-32.
  static constexpr float kMost = 22.25f;

  float operator()(int32_t token) const {
    uint32_t bits = mixed(static_cast<uint32_t>(token) * kScatter) ^ static_cast<uint32_t>(first_);
    bits = mixed(bits * static_cast<uint32_t>(second_)) & 0x7FFFFFFFu;
    const float uniform = (static_cast<float>(static_cast<int32_t>(bits)) + 0.5f) * kToUnit;
    // Each logarithm rounded once, as good as fp32 can be.
    const auto exponential = static_cast<float>(-std::log1p(-static_cast<double>(uniform)));
    return static_cast<float>(-std::log(static_cast<double>(exponential)));
  }

  // At least the noise of each of these tokens, and seldom 0.1 more, without a logarithm: with
  // u the uniform number, -log(-log1p(-u)) <= -log(u), and a number's bits, read as an integer,
  // are its binary logarithm with the curve between powers of two replaced by the chord below it.
  Vec bound(Integers tokens) const {
    const auto scatter = splat_integer(static_cast<int32_t>(kScatter));
    Integers bits = exclusive_or(mixed(mul(tokens, scatter)), splat_integer(first_));
    bits = both(mixed(mul(bits, splat_integer(second_))), splat_integer(0x7FFFFFFF));
    const Vec uniform = mul(add(to_float(bits), splat(0.5f)), splat(kToUnit));
    return fma(to_float(bits_of(uniform)), splat(-kLn2 / (1 << 23)), splat(127 * kLn2 + kSlack));
  }

 private:
  static constexpr uint32_t kScatter = 2654435769u;  // 2^32 / golden ratio
  static constexpr uint32_t kMixFirst = 0x85EBCA6Bu, kMixSecond = 0xC2B2AE35u;
  static constexpr float kToUnit = 0x1p-31f * (1.0f - 0x1p-23f);
  static constexpr float kLn2 = 0.693147180559945309f;
  static constexpr float kSlack = 1e-3f;  // far more than all roundings here and in the sum

  static uint32_t mixed(uint32_t x) {
    x = (x ^ (x >> 16)) * kMixFirst;
    x = (x ^ (x >> 13)) * kMixSecond;
    return x ^ (x >> 16);
  }
  static Integers mixed(Integers x) {
    x = mul(exclusive_or(x, shift_right<16>(x)), splat_integer(static_cast<int32_t>(kMixFirst)));
    x = mul(exclusive_or(x, shift_right<13>(x)), splat_integer(static_cast<int32_t>(kMixSecond)));
    return exclusive_or(x, shift_right<16>(x));
  }

  int32_t first_, second_;
};

}  // namespace serve
