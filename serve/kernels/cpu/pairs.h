// Sixteen outputs' whole-number arithmetic: pairs of int16 multiplied and summed to int32, exactly.
#pragma once

#include "simd.h"

namespace serve {

#if defined(__AVX512F__)

// Two neighbours along k for each of sixteen outputs, int16.
struct Pairs {
  __m512i v;
};
// Sixteen int32.
struct Sums {
  __m512i v;
};

inline Pairs widen_pairs(const int8_t* p) { return {_mm512_cvtepi8_epi16(load_256(p))}; }
inline Pairs load_pairs(const int16_t* p) { return {_mm512_loadu_si512(p)}; }
inline void store(int16_t* p, Pairs a) { _mm512_storeu_si512(p, a.v); }
inline Pairs splat_pair(const int16_t* p) {
  int32_t pair;
  std::memcpy(&pair, p, sizeof pair);
  return {_mm512_set1_epi32(pair)};
}
inline Sums no_sums() { return {_mm512_setzero_si512()}; }
inline Sums multiply_add(Pairs a, Pairs b, Sums c) {
  return {_mm512_add_epi32(c.v, _mm512_madd_epi16(a.v, b.v))};
}
inline Vec to_float(Sums a) { return {_mm512_cvtepi32_ps(a.v)}; }
// Sixteen whole numbers nearest to a.
inline void store_rounded(int16_t* p, Vec a) {
  auto words = _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(a.v));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), words);
}

#else

struct Pairs {
  __m256i lo, hi;
};
struct Sums {
  __m256i lo, hi;
};

inline Pairs widen_pairs(const int8_t* p) {
  return {_mm256_cvtepi8_epi16(load_128(p)), _mm256_cvtepi8_epi16(load_128(p + 16))};
}
inline Pairs load_pairs(const int16_t* p) { return {load_256(p), load_256(p + 16)}; }
inline void store(int16_t* p, Pairs a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a.lo);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 16), a.hi);
}
inline Pairs splat_pair(const int16_t* p) {
  int32_t pair;
  std::memcpy(&pair, p, sizeof pair);
  __m256i v = _mm256_set1_epi32(pair);
  return {v, v};
}
inline Sums no_sums() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline __m256i multiply_add(__m256i a, __m256i b, __m256i c) {
  // c += a * b, with the addition fixed in its place: left to itself, gcc forms the products of
  // several rows before it adds any, has no registers for them, and spills half of the sums.
  asm volatile("vpaddd %1, %0, %0" : "+x"(c) : "x"(_mm256_madd_epi16(a, b)));
  return c;
}
inline Sums multiply_add(Pairs a, Pairs b, Sums c) {
  return {multiply_add(a.lo, b.lo, c.lo), multiply_add(a.hi, b.hi, c.hi)};
}
inline Vec to_float(Sums a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
inline void store_rounded(int16_t* p, Vec a) {
  __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi));
  words = _mm256_permute4x64_epi64(words, 0b11011000);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), words);
}

#endif

}  // namespace serve
