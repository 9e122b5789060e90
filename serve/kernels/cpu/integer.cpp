// Linear layers over int8 weights: rows are rounded to int16, products and sums are whole numbers.
//
// int8 rows would multiply no faster on AVX2 (vpmaddubsw needs a second multiplication to reach 32
// bits), and they cost 11 % of perplexity where int16 rows cost nothing that can be measured: a few
// features of a row are a hundred times larger than the others and set its scale. One vpmaddwd
// multiplies sixteen pairs, twice what an fma does.
//
// Sums along `in` are cut into segments short enough that int32 holds every one of them exactly;
// each segment of a row has a scale of its own. Only the segments' few sums are added as fp32, in
// order, so a row's result depends on nothing but the row and the weights.
#include "integer.h"

#include <algorithm>
#include <limits>

#include "pairs.h"
#include "tile.h"

namespace serve {
namespace {

constexpr float kLargest = 32767.0f;
constexpr int64_t kPairsPerSegment = 256;
static_assert(2 * kPairsPerSegment * 127 * 32768 <= std::numeric_limits<int32_t>::max());

// Rows whose segment stays in the L2 cache (256 * 512 * 2 B = 256 KiB) while all panels pass by.
constexpr int64_t kRowsPerPass = 256;
// Rounding fewer rows than this costs less than waking another thread.
constexpr int64_t kRowsPerRounding = 16;

// A panel: fp32 scales[16], then [pairs][16][2] bytes.
constexpr int64_t kScaleBytes = kLanes * sizeof(float);
constexpr int64_t kPairBytes = 2 * kLanes;

struct Shape {
  const int16_t* rows;  // [num_rows, row_stride]
  const float* row_scales;  // [num_rows, num_segments]
  int64_t num_rows, row_stride, num_segments, pairs, out;
  const uint8_t* weights;
  const float* bias;
  float* result;

  const uint8_t* panel(int64_t index) const {
    return weights + index * (kScaleBytes + pairs * kPairBytes);
  }
};

struct Segment {
  int64_t index, first_pair, num_pairs;
};

// Calls part(segment) for the segments of `pairs`, in order.
template <class Part>
void each_segment(int64_t pairs, Part part) {
  int64_t index = 0;
  balanced(pairs, kPairsPerSegment,
           [&](int64_t first, int64_t size) { part(Segment{index++, first, size}); });
}

// Rounds n values so that the largest becomes 32767; those of a row that is not finite give NaN.
// Writes up to fifteen words more.
void round_segment(const float* x, int64_t n, int16_t* rounded, float* scale) {
  Vec most = splat(0.0f), poison = splat(0.0f);
  for (int64_t k = 0; k < n; k += kLanes) {
    Vec values = load_first(x + k, static_cast<int>(n - k));
    most = max(most, max(values, sub(splat(0.0f), values)));
    poison = fma(values, splat(0.0f), poison);
  }
  const float largest = maximum(most);
  *scale = largest / kLargest + sum(poison);
  // Below, the inverse is infinite; such a segment counts as zero.
  const Vec inverse = splat(largest > 1e-33f ? kLargest / largest : 0.0f);
  for (int64_t k = 0; k < n; k += kLanes) {
    store_rounded(rounded + k, mul(load_first(x + k, static_cast<int>(n - k)), inverse));
  }
}

// What becomes of a tile's sums.
struct Finish {
  const Shape& shape;
  const Segment& segment;
  int64_t row, panel;

  // sums + those of the segments before, times the weights' scale after the last.
  void operator()(int r, int p, Sums sums) const {
    const int64_t column = (panel + p) * kLanes;
    const int columns = static_cast<int>(std::min<int64_t>(kLanes, shape.out - column));
    float* out = shape.result + (row + r) * shape.out + column;
    Vec scale = splat(shape.row_scales[(row + r) * shape.num_segments + segment.index]);
    Vec total = mul(to_float(sums), scale);
    if (segment.index > 0) total = add(load_first(out, columns), total);
    if (segment.index + 1 == shape.num_segments) {
      Vec weight_scale = load(reinterpret_cast<const float*>(shape.panel(panel + p)));
      total = mul(total, weight_scale);
      if (shape.bias) total = add(total, load_first(shape.bias + column, columns));
    }
    store_first(out, total, columns);
  }
};

// R rows times a segment of P panels. `load_weights(i, p)` gives pair i of panel p.
template <int R, int P, class Load>
__attribute__((noinline)) void multiply_tile(const int16_t* rows, int64_t row_stride,
                                             int64_t num_pairs, const Finish& finish,
                                             Load load_weights) {
  Sums sums[R][P];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) sums[r][p] = no_sums();
  }
  for (int64_t i = 0; i < num_pairs; ++i) {
    Pairs weights[P];
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) weights[p] = load_weights(i, p);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      Pairs x = splat_pair(rows + r * row_stride + 2 * i);
#pragma GCC unroll 8
      for (int p = 0; p < P; ++p) sums[r][p] = multiply_add(x, weights[p], sums[r][p]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) finish(r, p, sums[r][p]);
  }
}

// All of P panels for R rows. Several panels abreast keep memory busier than one.
template <int R, int P>
void multiply_panels(const Shape& s, int64_t panel) {
  each_segment(s.pairs, [&](const Segment& segment) {
    auto weights = reinterpret_cast<const int8_t*>(s.panel(panel) + kScaleBytes) +
                   segment.first_pair * kPairBytes;
    const int64_t apart = s.panel(1) - s.panel(0);
    multiply_tile<R, P>(s.rows + 2 * segment.first_pair, s.row_stride, segment.num_pairs,
                        Finish{s, segment, 0, panel}, [=](int64_t i, int p) {
                          return widen_pairs(weights + p * apart + i * kPairBytes);
                        });
  });
}

template <int R>
void few_rows(const Shape& s, int64_t first_panel, int64_t last_panel) {
  constexpr int P = 4 / R;
  int64_t panel = first_panel;
  for (; panel + P <= last_panel; panel += P) multiply_panels<R, P>(s, panel);
  for (; panel < last_panel; ++panel) multiply_panels<R, 1>(s, panel);
}

// A pass of rows times a segment of one panel. The first tile widens the weights on its way and
// keeps them for the others; every tile fetches its share of what is needed next.
void multiply_segment(const Shape& s, const Segment& segment, int64_t panel, const uint8_t* next,
                      int64_t first_row, int64_t num_rows, int16_t* wide) {
  auto weights = reinterpret_cast<const int8_t*>(s.panel(panel) + kScaleBytes) +
                 segment.first_pair * kPairBytes;
  const int64_t tiles = (num_rows + kMaxTileRows - 1) / kMaxTileRows;
  const int64_t step = kPairBytes / tiles;
  const uint8_t* ahead = next;
  balanced(num_rows, kMaxTileRows, [&](int64_t offset, int64_t size) {
    const int64_t row = first_row + offset;
    const int16_t* rows = s.rows + row * s.row_stride + 2 * segment.first_pair;
    const Finish finish{s, segment, row, panel};
    with_rows(size, [&]<int R>() {
      if (offset == 0) {
        multiply_tile<R, 1>(rows, s.row_stride, segment.num_pairs, finish, [=](int64_t i, int) {
          _mm_prefetch(ahead + i * step, _MM_HINT_T0);
          Pairs pairs = widen_pairs(weights + i * kPairBytes);
          store(wide + i * 2 * kLanes, pairs);
          return pairs;
        });
      } else {
        multiply_tile<R, 1>(rows, s.row_stride, segment.num_pairs, finish, [=](int64_t i, int) {
          _mm_prefetch(ahead + i * step, _MM_HINT_T0);
          return load_pairs(wide + i * 2 * kLanes);
        });
      }
    });
    ahead += step * segment.num_pairs;
  });
}

void many_rows(const Shape& s, int64_t first_panel, int64_t last_panel, int16_t* wide) {
  balanced(s.num_rows, kRowsPerPass, [&](int64_t first_row, int64_t num_rows) {
    each_segment(s.pairs, [&](const Segment& segment) {
      for (int64_t panel = first_panel; panel < last_panel; ++panel) {
        const bool turns = panel + 1 == last_panel;  // next: the first panel, deeper
        const uint8_t* next = turns ? s.panel(first_panel) + segment.num_pairs * kPairBytes
                                    : s.panel(panel + 1);
        next += kScaleBytes + segment.first_pair * kPairBytes;
        multiply_segment(s, segment, panel, next, first_row, num_rows, wide);
      }
    });
  });
}

}  // namespace

void multiply_integers(Pool& pool, const float* rows, int64_t num_rows, int64_t in, int64_t out,
                       const void* weights, const float* bias, float* result) {
  const int64_t pairs = (in + 1) / 2;
  const int64_t row_stride = 2 * pairs + kLanes;  // room for what round_segment writes too much
  const int64_t num_segments = (pairs + kPairsPerSegment - 1) / kPairsPerSegment;
  const int64_t num_scales = num_rows * num_segments;
  float* row_scales = pool.scratch(pool.num_threads() + 1, num_scales + num_rows * row_stride / 2);
  auto rounded = reinterpret_cast<int16_t*>(row_scales + num_scales);
  pool.run((num_rows + kRowsPerRounding - 1) / kRowsPerRounding, [&](int64_t chunk, int) {
    const int64_t first = chunk * kRowsPerRounding;
    for (int64_t row = first; row < std::min(first + kRowsPerRounding, num_rows); ++row) {
      each_segment(pairs, [&](const Segment& segment) {
        const int64_t k = 2 * segment.first_pair;
        round_segment(rows + row * in + k, std::min(2 * segment.num_pairs, in - k),
                      rounded + row * row_stride + k,
                      row_scales + row * num_segments + segment.index);
      });
    }
  });

  const Shape s{rounded, row_scales, num_rows, row_stride, num_segments, pairs, out,
                static_cast<const uint8_t*>(weights), bias, result};
  const int64_t num_panels = (out + kLanes - 1) / kLanes;
  // Chunks of at least 16 KiB of weights, several per thread so that a disturbed thread can be
  // helped out, and a multiple of the panels that are read abreast.
  const int64_t per_thread = num_panels / (pool.num_threads() * 4);
  const int64_t size = (std::max(per_thread, (1 << 14) / (pairs * kPairBytes)) + 4) / 4 * 4;
  pool.run((num_panels + size - 1) / size, [&](int64_t chunk, int thread) {
    const int64_t first = chunk * size, last = std::min(first + size, num_panels);
    if (num_rows == 1) return few_rows<1>(s, first, last);
    if (num_rows == 2) return few_rows<2>(s, first, last);
    float* wide = pool.scratch(thread, kPairsPerSegment * kLanes);
    many_rows(s, first, last, reinterpret_cast<int16_t*>(wide));
  });
}

}  // namespace serve
