// Sixteen fp32 lanes, as two AVX2 registers or one AVX-512 register.
//
// Everything else in this folder is written in these lanes, so both variants do the same roundings
// in the same order and give the same bits. The build turns contraction off: a multiply and an add
// are fused only where `fma` is written.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace serve {

constexpr int kLanes = 16;

inline __m256i load_256(const void* p) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}
inline __m128i load_128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }

#if defined(__AVX512F__)

constexpr int kMaxTileRows = 12;  // 12 rows x 2 panels = 24 of 32 registers

struct Vec {
  __m512 v;
};

// One of the registers that hold sixteen lanes.
constexpr int kRegisters = 1;
using Register = __m512;
template <int I>
inline Register register_of(Vec a) {
  return a.v;
}
inline Register splat_register(float x) { return _mm512_set1_ps(x); }
inline Register fma(Register a, Register b, Register c) { return _mm512_fmadd_ps(a, b, c); }
inline void store(float* p, Register a) { _mm512_storeu_ps(p, a); }

inline Vec splat(float x) { return {_mm512_set1_ps(x)}; }
inline Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, Vec a) { _mm512_storeu_ps(p, a.v); }
inline Vec add(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec sub(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec mul(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec div(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// Like the machine's max and min, these return b when either side is NaN.
inline Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Vec round_even(Vec a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// 2^n for lanes that hold small integers.
inline Vec exp2_int(Vec n) {
  __m512i e = _mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(e, 23))};
}
// Lanes of a where x < bound become zero.
inline Vec zero_below(Vec a, Vec x, Vec bound) {
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, bound.v, _CMP_NLT_UQ), a.v)};
}
// a in lanes first <= lane < last, b elsewhere.
inline Vec select_range(Vec a, Vec b, int first, int last) {
  auto mask = static_cast<__mmask16>(((1u << last) - 1u) & ~((1u << first) - 1u));
  return {_mm512_mask_blend_ps(mask, b.v, a.v)};
}
inline __m256 low_half(Vec a) { return _mm512_castps512_ps256(a.v); }
inline __m256 high_half(Vec a) {
  return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a.v), 1));
}
inline Vec widen_halves(const void* p) { return {_mm512_cvtph_ps(load_256(p))}; }
inline Vec widen_bfloats(const uint16_t* p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_256(p)), 16))};
}
// Nibble J of sixteen words: q * 16^J, or q for the topmost.
template <int J>
inline Vec nibble(const void* words) {
  __m512i w = _mm512_loadu_si512(words);
  __m512i q = J == 7 ? _mm512_srli_epi32(w, 28)
                     : _mm512_and_si512(w, _mm512_set1_epi32(static_cast<int>(15u << (4 * J))));
  return {_mm512_cvtepi32_ps(q)};
}
inline Vec widen_signed_bytes(const uint8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_128(p)))};
}

#else

constexpr int kMaxTileRows = 6;  // 6 rows x 1 panel = 12 of 16 registers

struct Vec {
  __m256 lo, hi;
};

// One of the registers that hold sixteen lanes.
constexpr int kRegisters = 2;
using Register = __m256;
template <int I>
inline Register register_of(Vec a) {
  return I == 0 ? a.lo : a.hi;
}
inline Register splat_register(float x) { return _mm256_set1_ps(x); }
inline Register fma(Register a, Register b, Register c) { return _mm256_fmadd_ps(a, b, c); }
inline void store(float* p, Register a) { _mm256_storeu_ps(p, a); }

inline Vec splat(float x) {
  __m256 v = _mm256_set1_ps(x);
  return {v, v};
}
inline Vec load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, Vec a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
inline Vec add(Vec a, Vec b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline Vec sub(Vec a, Vec b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline Vec mul(Vec a, Vec b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline Vec div(Vec a, Vec b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline Vec fma(Vec a, Vec b, Vec c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
// Like the machine's max and min, these return b when either side is NaN.
inline Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline Vec round_even(Vec a) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.lo, mode), _mm256_round_ps(a.hi, mode)};
}
inline __m256 exp2_int(__m256 n) {
  __m256i e = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_castsi256_ps(_mm256_slli_epi32(e, 23));
}
// 2^n for lanes that hold small integers.
inline Vec exp2_int(Vec n) { return {exp2_int(n.lo), exp2_int(n.hi)}; }
// Lanes of a where x < bound become zero.
inline Vec zero_below(Vec a, Vec x, Vec bound) {
  return {_mm256_and_ps(_mm256_cmp_ps(x.lo, bound.lo, _CMP_NLT_UQ), a.lo),
          _mm256_and_ps(_mm256_cmp_ps(x.hi, bound.hi, _CMP_NLT_UQ), a.hi)};
}
// a in lanes first <= lane < last, b elsewhere.
inline Vec select_range(Vec a, Vec b, int first, int last) {
  __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  auto blend = [&](__m256 x, __m256 y, int from, int to) {
    __m256i inside = _mm256_andnot_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(from), lane),
                                         _mm256_cmpgt_epi32(_mm256_set1_epi32(to), lane));
    return _mm256_blendv_ps(y, x, _mm256_castsi256_ps(inside));
  };
  return {blend(a.lo, b.lo, first, last), blend(a.hi, b.hi, first - 8, last - 8)};
}
inline __m256 low_half(Vec a) { return a.lo; }
inline __m256 high_half(Vec a) { return a.hi; }
// Each half is widened straight from memory: taking it out of a whole register first costs a tile of
// six rows 9.8 instead of 6.9 cycles per k (Zen 3).
inline Vec widen_halves(const void* p) {
  auto halves = static_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(load_128(halves)), _mm256_cvtph_ps(load_128(halves + 1))};
}
inline __m256 widen_eight_bfloats(const uint16_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_128(p)), 16));
}
inline Vec widen_bfloats(const uint16_t* p) {
  return {widen_eight_bfloats(p), widen_eight_bfloats(p + 8)};
}
template <int J>
inline __m256 nibble(__m256i words) {
  __m256i q = J == 7
                  ? _mm256_srli_epi32(words, 28)
                  : _mm256_and_si256(words, _mm256_set1_epi32(static_cast<int>(15u << (4 * J))));
  return _mm256_cvtepi32_ps(q);
}
// Nibble J of sixteen words: q * 16^J, or q for the topmost.
template <int J>
inline Vec nibble(const void* words) {
  auto halves = static_cast<const __m256i*>(words);
  return {nibble<J>(_mm256_loadu_si256(halves)), nibble<J>(_mm256_loadu_si256(halves + 1))};
}
inline __m256 widen_eight_signed_bytes(const uint8_t* p) {
  __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
}
inline Vec widen_signed_bytes(const uint8_t* p) {
  return {widen_eight_signed_bytes(p), widen_eight_signed_bytes(p + 8)};
}

#endif

// Horizontal sum and maximum, folding halves: one order for both variants.
inline float sum(Vec a) {
  __m256 eight = _mm256_add_ps(low_half(a), high_half(a));
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float maximum(Vec a) {
  __m256 eight = _mm256_max_ps(low_half(a), high_half(a));
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

// e^x to about one unit in the last place; exactly 1 at 0, exactly 0 below -87, NaN stays NaN.
// Range reduction and polynomial: Cephes expf.
inline Vec exp(Vec x) {
  const Vec lowest = splat(-87.0f);
  Vec c = min(splat(88.0f), max(lowest, x));
  Vec n = round_even(mul(c, splat(1.44269504088896341f)));
  Vec r = fma(n, splat(-0.693359375f), c);
  r = fma(n, splat(2.12194440e-4f), r);
  Vec y = splat(1.9875691500e-4f);
  y = fma(y, r, splat(1.3981999507e-3f));
  y = fma(y, r, splat(8.3334519073e-3f));
  y = fma(y, r, splat(4.1665795894e-2f));
  y = fma(y, r, splat(1.6666665459e-1f));
  y = fma(y, r, splat(5.0000001201e-1f));
  y = add(fma(y, mul(r, r), r), splat(1.0f));
  return zero_below(mul(y, exp2_int(n)), x, lowest);
}
inline float exp(float x) { return sum(select_range(exp(splat(x)), splat(0.0f), 0, 1)); }

// 1 / (1 + e^-x)
inline Vec sigmoid(Vec x) {
  return div(splat(1.0f), add(splat(1.0f), exp(sub(splat(0.0f), x))));
}
inline Vec tanh(Vec x) { return fma(splat(2.0f), sigmoid(add(x, x)), splat(-1.0f)); }

// step(i, lanes) for every vector of a row of n, of which the last may be partial.
template <class Step>
inline void for_vectors(int64_t n, Step step) {
  for (int64_t i = 0; i < n; i += kLanes) {
    step(i, static_cast<int>(std::min<int64_t>(kLanes, n - i)));
  }
}

// The last, partial vector of a row: lanes past n read as `fill`, and are not written.
inline Vec load_first(const float* p, int n, float fill = 0.0f) {
  if (n >= kLanes) return load(p);
  float lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = i < n ? p[i] : fill;
  return load(lanes);
}
inline void store_first(float* p, Vec a, int n) {
  if (n >= kLanes) return store(p, a);
  float lanes[kLanes];
  store(lanes, a);
  std::memcpy(p, lanes, static_cast<size_t>(n) * sizeof(float));
}

}  // namespace serve
