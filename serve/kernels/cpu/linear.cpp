// Linear layers over weights packed in panels of sixteen outputs: [panels, in, 16].
//
// Weights stay in the type they were stored in and are widened to fp32 in registers; every product
// and sum is fp32. See tile.h for why a row's result does not depend on the other rows.
#include <algorithm>

#include "api.h"
#include "pool.h"
#include "tile.h"

namespace serve {
namespace {

// Rows and depth of the activations that one pass keeps in the L2 cache (192 * 384 * 4 B = 288 KiB)
// while panels of 384 * 16 * 4 B = 24 KiB go by in the L1 cache. How panels are then widened once
// per pass instead of once per tile is the reason for the second path at all.
constexpr int64_t kRowsPerPass = 192;
constexpr int64_t kDepthPerPass = 384;

struct Float32 {
  using Weight = float;
  static Vec widen(const float* p) { return load(p); }
};
struct Float16 {
  using Weight = uint16_t;
  static Vec widen(const uint16_t* p) { return widen_half(load_256(p)); }
};
struct BFloat16 {
  using Weight = uint16_t;
  static Vec widen(const uint16_t* p) { return widen_bfloat(load_256(p)); }
};

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

void add_bias(const Shape& s, int64_t first_row, int64_t num_rows, int64_t first, int64_t last) {
  for (int64_t row = first_row; row < first_row + num_rows; ++row) {
    float* out = s.result + row * s.out;
    for (int64_t column = first; column < last; ++column) out[column] += s.bias[column];
  }
}

void copy_columns(const Target& from, const Shape& s, int64_t first_row, int64_t num_rows,
                  int64_t first, int64_t last) {
  for (int64_t row = 0; row < num_rows; ++row) {
    std::copy_n(from.at + row * from.stride, last - first,
                s.result + (first_row + row) * s.out + first);
  }
}

// A few rows: weights are read once, straight from memory, several panels abreast.
template <class Storage>
void few_rows(const Shape& s, const typename Storage::Weight* packed, int64_t first_panel,
              int64_t last_panel) {
  using Weight = typename Storage::Weight;
  const int64_t panel_size = s.in * kLanes;
  with_rows(s.num_rows, [&]<int R>() {
    constexpr int P = tile_panels(R);
    int64_t panel = first_panel;
    for (; panel + P <= last_panel && (panel + P) * kLanes <= s.out; panel += P) {
      const Weight* panels[P];
      for (int p = 0; p < P; ++p) panels[p] = packed + (panel + p) * panel_size;
      multiply_tile<R, P>(s.rows, s.in, panels, kLanes, s.in, s.result + panel * kLanes, s.out,
                          false, Storage::widen);
    }
    for (; panel < last_panel; ++panel) {
      const Weight* at = packed + panel * panel_size;
      const int64_t first = panel * kLanes, last = std::min(first + kLanes, s.out);
      float columns[R * kLanes];
      multiply_tile<R, 1>(s.rows, s.in, &at, kLanes, s.in, columns, kLanes, false, Storage::widen);
      copy_columns({columns, kLanes}, s, 0, R, first, last);
    }
  });
}

template <class Storage>
const float* widened(const typename Storage::Weight* panel, int64_t depth, float* buffer) {
  if constexpr (std::is_same_v<typename Storage::Weight, float>) {
    return panel;
  } else {
    for (int64_t i = 0; i < depth; ++i) {
      store(buffer + i * kLanes, Storage::widen(panel + i * kLanes));
    }
    return buffer;
  }
}

template <class Storage>
void many_rows(const Shape& s, const typename Storage::Weight* packed, int64_t first_panel,
               int64_t last_panel, float* scratch) {
  float* wide_panel = scratch;
  float* last_columns = scratch + kDepthPerPass * kLanes;
  balanced(s.num_rows, kRowsPerPass, [&](int64_t first_row, int64_t num_rows) {
    for (int64_t depth = 0; depth < s.in; depth += kDepthPerPass) {
      const int64_t k = std::min(kDepthPerPass, s.in - depth);
      for (int64_t panel = first_panel; panel < last_panel; ++panel) {
        const float* weights =
            widened<Storage>(packed + (panel * s.in + depth) * kLanes, k, wide_panel);
        Target target{s.result + first_row * s.out + panel * kLanes, s.out};
        if ((panel + 1) * kLanes > s.out) target = {last_columns, kLanes};
        balanced(num_rows, kMaxTileRows, [&](int64_t row, int64_t rows) {
          with_rows(rows, [&]<int R>() {
            multiply_tile<R, 1>(s.rows + (first_row + row) * s.in + depth, s.in, &weights, kLanes,
                                k, target.at + row * target.stride, target.stride, depth > 0,
                                Float32::widen);
          });
        });
      }
    }
    if (last_panel * kLanes > s.out) {
      copy_columns({last_columns, kLanes}, s, first_row, num_rows, (last_panel - 1) * kLanes,
                   s.out);
    }
  });
}

template <class Storage>
void multiply(Pool& pool, const Shape& s, const void* weights) {
  auto* packed = static_cast<const typename Storage::Weight*>(weights);
  const int64_t num_panels = (s.out + kLanes - 1) / kLanes;
  // Chunks of at least 16 KiB of weights, several per thread so that a disturbed thread can be
  // helped out, and a multiple of the panels a tile takes abreast.
  const int64_t per_thread = num_panels / (pool.num_threads() * 4);
  const int64_t worth_it = (1 << 14) / (s.in * kLanes * int64_t{sizeof(*packed)});
  const int64_t size = (std::max(per_thread, worth_it) + 4) / 4 * 4;
  pool.run((num_panels + size - 1) / size, [&](int64_t chunk, int thread) {
    const int64_t first = chunk * size, last = std::min(first + size, num_panels);
    if (s.num_rows <= kMaxTileRows) {
      few_rows<Storage>(s, packed, first, last);
    } else {
      float* scratch = pool.scratch(thread, (kDepthPerPass + kRowsPerPass) * kLanes);
      many_rows<Storage>(s, packed, first, last, scratch);
    }
    if (s.bias) {
      add_bias(s, 0, s.num_rows, first * kLanes, std::min(last * kLanes, s.out));
    }
  });
}

}  // namespace
}  // namespace serve

using namespace serve;

void serve_linear(Pool* pool, int32_t storage, const float* rows, int64_t num_rows, int64_t in,
                  int64_t out, const void* weights, const float* bias, float* result) {
  if (num_rows == 0) return;
  const Shape shape{rows, num_rows, in, out, bias, result};
  switch (storage) {
    case 0:
      return multiply<Float32>(*pool, shape, weights);
    case 1:
      return multiply<Float16>(*pool, shape, weights);
    case 2:
      return multiply<BFloat16>(*pool, shape, weights);
  }
}
