// The one inner loop: a tile of rows times 16-column panels, fp32.
//
// Every output element is one lane of one accumulator and takes its products in the order of k,
// starting from zero (or from what the tile already holds). How many rows or panels share a tile,
// and where k is cut, therefore never shows in a result: this is what makes the whole backend
// independent of batch size, position in the batch, chunking and thread count.
#pragma once

#include "simd.h"

namespace serve {

// rows: [R, k], `row_stride` apart. panels[p]: [k, 16], `panel_stride` elements between ks.
// out: [R, P * 16], `out_stride` apart. `load_panel(pointer, i, p)` widens the sixteen weights of
// panel p at k = i; it may also prefetch or keep what it widened.
//
// Not inlined: among a caller's live variables, the compiler spills the row pointers and loses up
// to half of the speed.
template <int R, int P, class Load, class Weight>
__attribute__((noinline)) void multiply_tile(const float* rows, int64_t row_stride,
                                             const Weight* const* panels, int64_t panel_stride,
                                             int64_t k, float* out, int64_t out_stride,
                                             bool accumulate, Load load_panel) {
  Vec acc[R][P];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) {
      acc[r][p] = accumulate ? load(out + r * out_stride + p * kLanes) : splat(0.0f);
    }
  }
  for (int64_t i = 0; i < k; ++i) {
    Vec weights[P];
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) weights[p] = load_panel(panels[p] + i * panel_stride, i, p);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      Vec x = splat(rows[r * row_stride + i]);
#pragma GCC unroll 8
      for (int p = 0; p < P; ++p) acc[r][p] = fma(x, weights[p], acc[r][p]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) store(out + r * out_stride + p * kLanes, acc[r][p]);
  }
}

// Cuts n into the fewest parts of at most `most`, sizes differing by at most one, and calls
// part(start, size) for each: eight rows become 4 + 4, not 6 + 2.
template <class Part>
inline void balanced(int64_t n, int64_t most, Part part) {
  int64_t parts = (n + most - 1) / most;
  for (int64_t i = 0, start = 0; i < parts; ++i) {
    int64_t size = n / parts + (i < n % parts ? 1 : 0);
    part(start, size);
    start += size;
  }
}

// Calls body.template operator()<R>() with R equal to rows (1 … Most).
template <int R = 1, int Most = kMaxTileRows, class Body>
inline void with_rows(int64_t rows, Body&& body) {
  if constexpr (R < Most) {
    if (rows != R) return with_rows<R + 1, Most>(rows, body);
  }
  body.template operator()<R>();
}

}  // namespace serve
