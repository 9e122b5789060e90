// Rows times a range of weight panels on one thread.
//
// Weights stay in the type they were stored in and are widened to fp32 in registers; every product
// and sum is fp32. See tile.h for why a row's result does not depend on the other rows.
#pragma once

#include <algorithm>

#include "storage.h"

namespace serve {

// Rows and depth of the activations that one pass keeps in the L2 cache (192 * 384 * 4 B = 288 KiB),
// while a panel of that depth (384 * 16 * 4 B = 24 KiB) stays in the L1 cache for all of them.
constexpr int64_t kRowsPerPass = 192;
constexpr int64_t kDepthPerPass = 384;

struct Shape {
  const float* rows;
  int64_t num_rows, in, out;
  const float* bias;
  float* result;
};

// Where a panel's columns are accumulated: the result itself, or, for a last panel that is only
// partly real, a buffer from which the real columns are copied.
struct Target {
  float* at;
  int64_t stride;
};

inline void add_bias(const Shape& s, int64_t first, int64_t last) {
  for (int64_t row = 0; row < s.num_rows; ++row) {
    float* out = s.result + row * s.out;
    for (int64_t column = first; column < last; ++column) out[column] += s.bias[column];
  }
}

inline void copy_columns(const Target& from, const Shape& s, int64_t first_row, int64_t num_rows,
                         int64_t first, int64_t last) {
  for (int64_t row = 0; row < num_rows; ++row) {
    std::copy_n(from.at + row * from.stride, last - first,
                s.result + (first_row + row) * s.out + first);
  }
}

// Rows whose accumulators for a whole panel, and what unpacks it, fit into the registers.
constexpr int kWholePanelRows = kRegisters == 1 ? 8 : 4;

// Where the weights of a panel begin at depth k.
template <class Storage>
const uint8_t* place(const uint8_t* packed, int64_t in, int64_t panel, int64_t k) {
  return packed + (panel * in + k) / Storage::kDepth * Storage::kBytes;
}

// P panels for R rows, straight from memory.
template <int R, int P, class Storage>
void multiply_panels(const Shape& s, const uint8_t* packed, int64_t panel, const Target& out) {
  const int64_t panel_bytes = s.in / Storage::kDepth * Storage::kBytes;
  const uint8_t* at = place<Storage>(packed, s.in, panel, 0);
  if constexpr (Storage::kDepth == kPlain) {
    using Weight = typename Storage::Weight;
    const Weight* panels[P];
    for (int p = 0; p < P; ++p) {
      panels[p] = reinterpret_cast<const Weight*>(at + p * panel_bytes);
    }
    multiply_tile<R, P>(s.rows, s.in, panels, kLanes, s.in, out.at, out.stride, false, Storage{});
  } else {
    if constexpr (R <= kWholePanelRows) {
      multiply_blocks<R, P, Storage>(s.rows, s.in, at, panel_bytes, s.in, out.at, out.stride);
    } else {
      multiply_register<R, 0, Storage>(s.rows, s.in, at, s.in, out.at, out.stride);
      if constexpr (kRegisters == 2) {
        multiply_register<R, 1, Storage>(s.rows, s.in, at, s.in, out.at, out.stride);
      }
    }
  }
}

// Panels that are read abreast, where one's few accumulators would wait for fma.
template <class Storage>
constexpr int panels_abreast(int64_t rows) {
  if (Storage::kDepth == kPlain) return rows >= 4 ? 1 : static_cast<int>(4 / rows);
  return rows == 1 ? 2 : 1;
}

// So few rows that memory, or the unpacking of blocks, is the limit: weights are read in registers
// only.
template <int R, class Storage>
void few_rows(const Shape& s, const uint8_t* packed, int64_t first_panel, int64_t last_panel) {
  constexpr int P = panels_abreast<Storage>(R);
  int64_t panel = first_panel;
  for (; panel + P <= last_panel && (panel + P) * kLanes <= s.out; panel += P) {
    multiply_panels<R, P, Storage>(s, packed, panel, {s.result + panel * kLanes, s.out});
  }
  for (; panel < last_panel; ++panel) {
    const int64_t first = panel * kLanes, last = std::min(first + kLanes, s.out);
    float columns[R * kLanes];
    multiply_panels<R, 1, Storage>(s, packed, panel, {columns, kLanes});
    copy_columns({columns, kLanes}, s, 0, R, first, last);
  }
}

// A part of one panel, and the one that will be needed after it.
struct Segment {
  const uint8_t* weights;
  const uint8_t* next;
  int64_t depth;
};

// Rows at `at`, in the tile's strides.
struct Rows {
  const float* at;
  int64_t stride, count;
};

// A pass of rows times one segment. Weights are widened once and kept for all tiles of rows in
// `wide`: plain ones by the first tile on its way. Every tile fetches its share of the next segment,
// so that memory is busy all the time and not only while a segment is first read.
template <class Storage>
void multiply_segment(const Segment& segment, const Rows& rows, const Target& out, bool accumulate,
                      float* wide) {
  const int64_t tiles = (rows.count + kMaxTileRows - 1) / kMaxTileRows;
  const int64_t step = Storage::kBytes / Storage::kDepth / tiles;  // bytes per k
  const uint8_t* ahead = segment.next;
  auto stored_wide = reinterpret_cast<const float*>(segment.weights);
  if constexpr (Storage::kDepth != kPlain) unpack<Storage>(segment.weights, segment.depth, wide);
  if constexpr (!std::is_same_v<Storage, Float32>) stored_wide = wide;
  balanced(rows.count, kMaxTileRows, [&](int64_t row, int64_t size) {
    with_rows(size, [&]<int R>() {
      auto multiply = [&](auto panel, auto load_panel) {
        multiply_tile<R, 1>(rows.at + row * rows.stride, rows.stride, &panel, kLanes,
                            segment.depth, out.at + row * out.stride, out.stride, accumulate,
                            load_panel);
      };
      if constexpr (Storage::kDepth == kPlain && !std::is_same_v<Storage, Float32>) {
        using Weight = typename Storage::Weight;
        auto weights_at = reinterpret_cast<const Weight*>(segment.weights);
        if (tiles == 1) {  // nobody else needs them wide
          return multiply(weights_at, [=](const Weight* p, int64_t i, int) {
            _mm_prefetch(ahead + i * step, _MM_HINT_T0);
            return Storage{}(p, i, 0);
          });
        }
        if (row == 0) {
          return multiply(weights_at, [=](const Weight* p, int64_t i, int) {
            _mm_prefetch(ahead + i * step, _MM_HINT_T0);
            Vec weights = Storage{}(p, i, 0);
            store(wide + i * kLanes, weights);
            return weights;
          });
        }
      }
      multiply(stored_wide, [=](const float* p, int64_t i, int) {
        _mm_prefetch(ahead + i * step, _MM_HINT_T0);
        return load(p);
      });
    });
    ahead += step * segment.depth;
  });
}

template <class Storage>
void many_rows(const Shape& s, const uint8_t* packed, int64_t first_panel, int64_t last_panel,
               float* scratch) {
  constexpr int64_t D = Storage::kDepth;
  float* wide = scratch;
  float* last_columns = scratch + kDepthPerPass * kLanes;
  balanced(s.num_rows, kRowsPerPass, [&](int64_t first_row, int64_t num_rows) {
    balanced(s.in / D, kDepthPerPass / D, [&](int64_t first_block, int64_t num_blocks) {
      const int64_t k = first_block * D, depth = num_blocks * D;
      for (int64_t panel = first_panel; panel < last_panel; ++panel) {
        const bool turns = panel + 1 == last_panel;  // next: the first panel, deeper
        const Segment segment{place<Storage>(packed, s.in, panel, k),
                              turns ? place<Storage>(packed, s.in, first_panel, k + depth)
                                    : place<Storage>(packed, s.in, panel + 1, k),
                              depth};
        Target target{s.result + first_row * s.out + panel * kLanes, s.out};
        if ((panel + 1) * kLanes > s.out) target = {last_columns, kLanes};
        const Rows rows{s.rows + first_row * s.in + k, s.in, num_rows};
        multiply_segment<Storage>(segment, rows, target, k > 0, wide);
      }
    });
    if (last_panel * kLanes > s.out) {
      copy_columns({last_columns, kLanes}, s, first_row, num_rows, (last_panel - 1) * kLanes,
                   s.out);
    }
  });
}

// Up to eight rows of blocks, unpacking them in registers beats keeping them unpacked (by a fifth
// at eight rows, measured); beyond, it does not.
template <class Storage>
constexpr int kFewRows = Storage::kDepth == kPlain ? 2 : 8;

// Floats of scratch that multiply_range needs.
constexpr int64_t kRangeScratch = (kDepthPerPass + kRowsPerPass) * kLanes;

// All rows times panels [first, last) of `packed`, which begin at column 16 * first of the result.
template <class Storage>
void multiply_range(const Shape& s, const uint8_t* packed, int64_t first, int64_t last,
                    float* scratch) {
  if (s.num_rows <= kFewRows<Storage>) {
    with_rows<1, kFewRows<Storage>>(s.num_rows, [&]<int R>() {
      few_rows<R, Storage>(s, packed, first, last);
    });
  } else {
    many_rows<Storage>(s, packed, first, last, scratch);
  }
  if (s.bias) add_bias(s, first * kLanes, std::min(last * kLanes, s.out));
}

}  // namespace serve
