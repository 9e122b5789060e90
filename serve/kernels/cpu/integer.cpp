// Linear layers over int8 weights: rows are rounded to int16, products and sums are whole numbers.
//
// int8 rows would multiply no faster on AVX2 (vpmaddubsw needs a second multiplication to reach 32
// bits), and they cost 11 % of perplexity where int16 rows cost nothing that can be measured: a few
// features of a row are a hundred times larger than the others and set its scale. One vpmaddwd
// multiplies sixteen pairs, twice what an fma does.
//
// All linear layers of the default model on two Zen 3 cores, against fp32 weights: 2.3 times as fast at
// 1 row, 1.7 at 8, 1.1 to 1.4 at 32 and 1.2 to 1.4 at 256, by the minute; perplexity 15.81 for 15.78.
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

// Segments that are worked on together: a panel's widened weights (64 KiB) and the rows of a pass
// stay in the L2 cache.
constexpr int64_t kSegmentsPerSpan = 4;
constexpr int64_t kPassBytes = 256 << 10;
// Rounding fewer rows than this costs less than waking another thread.
constexpr int64_t kRowsPerRounding = 16;
// How far weights are fetched ahead of their use where they are used once.
constexpr int64_t kAheadBytes = 3072;

constexpr int64_t kCacheLine = 64;

// A panel: fp32 scales[16], then [pairs][16][2] bytes.
constexpr int64_t kScaleBytes = kLanes * sizeof(float);
constexpr int64_t kPairBytes = 2 * kLanes;

struct Shape {
  const int16_t* rows;      // [num_rows, row_stride]
  const float* row_scales;  // [num_rows, num_segments]
  int64_t num_rows, row_stride, num_segments, pairs, out;
  const uint8_t* weights;
  const float* bias;
  float* result;

  const uint8_t* panel(int64_t index) const {
    return weights + index * (kScaleBytes + pairs * kPairBytes);
  }
  const int8_t* panel_weights(int64_t index) const {
    return reinterpret_cast<const int8_t*>(panel(index) + kScaleBytes);
  }
};

// Segments [first, last) of all, and their pairs.
struct Span {
  int64_t first, last, first_pair, num_pairs;
};

int64_t first_pair(int64_t pairs, int64_t num_segments, int64_t segment) {
  return segment * (pairs / num_segments) + std::min(segment, pairs % num_segments);
}

Span span_of(const Shape& s, int64_t first, int64_t last) {
  const int64_t begin = first_pair(s.pairs, s.num_segments, first);
  return {first, last, begin, first_pair(s.pairs, s.num_segments, last) - begin};
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

// sums[r] = R rows times num_pairs pairs of a panel; `load_weights(i)` gives pair i.
//
// Not inlined, for the same reason as multiply_tile in tile.h.
template <int R, class Load>
__attribute__((noinline)) void sum_pairs(const int16_t* rows, int64_t row_stride,
                                         int64_t num_pairs, Sums* sums, Load load_weights) {
  Sums acc[R];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) acc[r] = no_sums();
  for (int64_t i = 0; i < num_pairs; ++i) {
    const Pairs weights = load_weights(i);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      acc[r] = multiply_add(splat_pair(rows + r * row_stride + 2 * i), weights, acc[r]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) sums[r] = acc[r];
}

// R rows from `row` times a span of one panel, added to what the result holds of earlier spans.
// `load_weights(i)` gives pair i of the span.
template <int R, class Load>
void multiply_tile(const Shape& s, const Span& span, int64_t row, int64_t panel,
                   Load load_weights) {
  const int64_t column = panel * kLanes;
  const int columns = static_cast<int>(std::min<int64_t>(kLanes, s.out - column));
  float* out = s.result + row * s.out + column;
  // Rows of the result are far apart: without this, the stores at the end wait for memory one by one,
  // for a third of the time.
  for (int r = 0; r < R; ++r) _mm_prefetch(out + r * s.out, _MM_HINT_T0);
  Vec totals[R];
  for (int r = 0; r < R; ++r) {
    totals[r] = span.first > 0 ? load_first(out + r * s.out, columns) : splat(0.0f);
  }
  for (int64_t segment = span.first; segment < span.last; ++segment) {
    const Span part = span_of(s, segment, segment + 1);
    const int64_t offset = part.first_pair - span.first_pair;
    Sums sums[R];
    sum_pairs<R>(s.rows + row * s.row_stride + 2 * part.first_pair, s.row_stride, part.num_pairs,
                 sums, [=](int64_t i) { return load_weights(offset + i); });
    for (int r = 0; r < R; ++r) {
      const Vec scale = splat(s.row_scales[(row + r) * s.num_segments + segment]);
      totals[r] = fma(to_float(sums[r]), scale, totals[r]);
    }
  }
  if (span.last == s.num_segments) {
    const Vec scales = load(reinterpret_cast<const float*>(s.panel(panel)));
    const Vec bias = s.bias ? load_first(s.bias + column, columns) : splat(0.0f);
    for (int r = 0; r < R; ++r) totals[r] = fma(totals[r], scales, bias);
  }
  for (int r = 0; r < R; ++r) store_first(out + r * s.out, totals[r], columns);
}

// A single tile of rows: weights are widened in registers and read once, panel after panel.
void few_rows(const Shape& s, int64_t first_panel, int64_t last_panel) {
  const Span all = span_of(s, 0, s.num_segments);
  with_rows(s.num_rows, [&]<int R>() {
    for (int64_t panel = first_panel; panel < last_panel; ++panel) {
      const int8_t* weights = s.panel_weights(panel);
      multiply_tile<R>(s, all, 0, panel, [=](int64_t i) {
        _mm_prefetch(weights + i * kPairBytes + kAheadBytes, _MM_HINT_T0);
        return widen_pairs(weights + i * kPairBytes);
      });
    }
  });
}

// A pass of rows times a span of one panel. The first tile widens the weights on its way and keeps
// them for the others; every tile fetches its share of what is needed next, so that memory is busy
// all the time.
void multiply_span(const Shape& s, const Span& span, int64_t panel, const int8_t* next,
                   int64_t first_row, int64_t num_rows, int16_t* wide) {
  const int8_t* weights = s.panel_weights(panel) + span.first_pair * kPairBytes;
  const int64_t tiles = (num_rows + kMaxTileRows - 1) / kMaxTileRows;
  const int64_t share = (span.num_pairs * kPairBytes + tiles - 1) / tiles;
  const int8_t* ahead = next;
  balanced(num_rows, kMaxTileRows, [&](int64_t offset, int64_t size) {
    const int64_t row = first_row + offset;
    with_rows(size, [&]<int R>() {
      if (offset == 0) {
        multiply_tile<R>(s, span, row, panel, [=](int64_t i) {
          const Pairs pairs = widen_pairs(weights + i * kPairBytes);
          store(wide + i * 2 * kLanes, pairs);
          return pairs;
        });
      } else {
        multiply_tile<R>(s, span, row, panel,
                         [=](int64_t i) { return load_pairs(wide + i * 2 * kLanes); });
      }
    });
    for (const int8_t* end = ahead + share; ahead < end; ahead += kCacheLine) {
      _mm_prefetch(ahead, _MM_HINT_T1);
    }
  });
}

void many_rows(const Shape& s, int64_t first_panel, int64_t last_panel, int16_t* wide) {
  const int64_t depth = std::min(s.pairs, kSegmentsPerSpan * kPairsPerSegment);
  const int64_t rows_per_pass = kPassBytes / (depth * 2 * sizeof(int16_t));
  balanced(s.num_rows, rows_per_pass, [&](int64_t first_row, int64_t num_rows) {
    balanced(s.num_segments, kSegmentsPerSpan, [&](int64_t segment, int64_t count) {
      const Span span = span_of(s, segment, segment + count);
      for (int64_t panel = first_panel; panel < last_panel; ++panel) {
        const bool turns = panel + 1 == last_panel;  // next: the first panel, deeper
        const int8_t* next = turns ? s.panel_weights(first_panel) + span.num_pairs * kPairBytes
                                   : s.panel_weights(panel + 1);
        multiply_span(s, span, panel, next + span.first_pair * kPairBytes, first_row, num_rows,
                      wide);
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
  const Shape s{rounded, row_scales, num_rows, row_stride, num_segments, pairs, out,
                static_cast<const uint8_t*>(weights), bias, result};
  pool.run((num_rows + kRowsPerRounding - 1) / kRowsPerRounding, [&](int64_t chunk, int) {
    const int64_t first = chunk * kRowsPerRounding;
    for (int64_t row = first; row < std::min(first + kRowsPerRounding, num_rows); ++row) {
      for (int64_t segment = 0; segment < num_segments; ++segment) {
        const Span part = span_of(s, segment, segment + 1);
        const int64_t k = 2 * part.first_pair;
        round_segment(rows + row * in + k, std::min(2 * part.num_pairs, in - k),
                      rounded + row * row_stride + k, row_scales + row * num_segments + segment);
      }
    }
  });

  const int64_t num_panels = (out + kLanes - 1) / kLanes;
  const int64_t num_bytes = num_panels * pairs * kPairBytes;
  pool.run_ranges(num_panels, pool.chunks_worth(num_rows, num_bytes),
                  [&](int64_t first, int64_t last, int thread) {
    if (num_rows <= kMaxTileRows) return few_rows(s, first, last);
    float* wide = pool.scratch(thread, kSegmentsPerSpan * kPairsPerSegment * kLanes);
    many_rows(s, first, last, reinterpret_cast<int16_t*>(wide));
  });
}

}  // namespace serve
