// Linear layers over weights packed in panels of sixteen outputs: [panels, in, 16].
//
// Weights stay in the type they were stored in and are widened to fp32 in registers; every product
// and sum is fp32. See tile.h for why a row's result does not depend on the other rows.
#include <sys/mman.h>

#include <algorithm>

#include "api.h"
#include "pool.h"
#include "tile.h"

namespace serve {
namespace {

// Rows and depth of the activations that one pass keeps in the L2 cache (192 * 384 * 4 B = 288 KiB),
// while a panel of that depth (384 * 16 * 4 B = 24 KiB) stays in the L1 cache for all of them.
constexpr int64_t kRowsPerPass = 192;
constexpr int64_t kDepthPerPass = 384;

// How weights are stored: called with the place of sixteen of them, gives them as fp32.
struct Float32 {
  using Weight = float;
  Vec operator()(const float* p, int64_t) const { return load(p); }
};
struct Float16 {
  using Weight = uint16_t;
  Vec operator()(const uint16_t* p, int64_t) const { return widen_half(load_256(p)); }
};
struct BFloat16 {
  using Weight = uint16_t;
  Vec operator()(const uint16_t* p, int64_t) const { return widen_bfloat(load_256(p)); }
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

// One or two rows: weights are read once, straight from memory, several panels abreast, which keeps
// memory busier than fetching the next panel ahead.
template <int R, class Storage>
void few_rows(const Shape& s, const typename Storage::Weight* packed, int64_t first_panel,
              int64_t last_panel) {
  constexpr int P = 4 / R;  // eight accumulators cover the latency of fma
  int64_t panel = first_panel;
  for (; panel + P <= last_panel && (panel + P) * kLanes <= s.out; panel += P) {
    const typename Storage::Weight* panels[P];
    for (int p = 0; p < P; ++p) panels[p] = packed + (panel + p) * s.in * kLanes;
    multiply_tile<R, P>(s.rows, s.in, panels, kLanes, s.in, s.result + panel * kLanes, s.out,
                        false, Storage{});
  }
  for (; panel < last_panel; ++panel) {
    const auto* at = packed + panel * s.in * kLanes;
    const int64_t first = panel * kLanes, last = std::min(first + kLanes, s.out);
    float columns[R * kLanes];
    multiply_tile<R, 1>(s.rows, s.in, &at, kLanes, s.in, columns, kLanes, false, Storage{});
    copy_columns({columns, kLanes}, s, 0, R, first, last);
  }
}

// A part of one panel, [depth, 16], and the one that will be needed after it.
template <class Weight>
struct Segment {
  const Weight* weights;
  const Weight* next;
  int64_t depth;
};

// A pass of rows times one segment. The first tile of rows widens the weights and keeps them for
// the others in `wide`. Every tile fetches its share of the next segment, so that memory is busy
// all the time and not only while a segment is first read.
template <class Storage>
void multiply_segment(const Segment<typename Storage::Weight>& segment, const float* rows,
                      int64_t row_stride, int64_t num_rows, float* out, int64_t out_stride,
                      bool accumulate, float* wide) {
  using Weight = typename Storage::Weight;
  const int64_t tiles = (num_rows + kMaxTileRows - 1) / kMaxTileRows;
  const int64_t step = kLanes * int64_t{sizeof(Weight)} / tiles;  // bytes per k
  auto ahead = reinterpret_cast<const char*>(segment.next);
  balanced(num_rows, kMaxTileRows, [&](int64_t row, int64_t size) {
    with_rows(size, [&]<int R>() {
      auto multiply = [&](auto panel, auto load_panel) {
        multiply_tile<R, 1>(rows + row * row_stride, row_stride, &panel, kLanes, segment.depth,
                            out + row * out_stride, out_stride, accumulate, load_panel);
      };
      if constexpr (std::is_same_v<Weight, float>) {
        multiply(segment.weights, [=](const float* p, int64_t i) {
          _mm_prefetch(ahead + i * step, _MM_HINT_T0);
          return load(p);
        });
      } else if (row == 0) {
        multiply(segment.weights, [=](const Weight* p, int64_t i) {
          _mm_prefetch(ahead + i * step, _MM_HINT_T0);
          Vec weights = Storage{}(p, i);
          store(wide + i * kLanes, weights);
          return weights;
        });
      } else {
        multiply(static_cast<const float*>(wide), [=](const float* p, int64_t i) {
          _mm_prefetch(ahead + i * step, _MM_HINT_T0);
          return load(p);
        });
      }
    });
    ahead += step * segment.depth;
  });
}

template <class Storage>
void many_rows(const Shape& s, const typename Storage::Weight* packed, int64_t first_panel,
               int64_t last_panel, float* scratch) {
  float* wide = scratch;
  float* last_columns = scratch + kDepthPerPass * kLanes;
  balanced(s.num_rows, kRowsPerPass, [&](int64_t first_row, int64_t num_rows) {
    balanced(s.in, kDepthPerPass, [&](int64_t first_k, int64_t depth) {
      for (int64_t panel = first_panel; panel < last_panel; ++panel) {
        const auto* weights = packed + (panel * s.in + first_k) * kLanes;
        const bool turns = panel + 1 == last_panel;  // next: the first panel, deeper
        const auto* next = turns ? packed + (first_panel * s.in + first_k + depth) * kLanes
                                 : weights + s.in * kLanes;
        Target target{s.result + first_row * s.out + panel * kLanes, s.out};
        if ((panel + 1) * kLanes > s.out) target = {last_columns, kLanes};
        multiply_segment<Storage>({weights, next, depth}, s.rows + first_row * s.in + first_k,
                                  s.in, num_rows, target.at, target.stride, first_k > 0, wide);
      }
    });
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
    if (s.num_rows == 1) {
      few_rows<1, Storage>(s, packed, first, last);
    } else if (s.num_rows == 2) {
      few_rows<2, Storage>(s, packed, first, last);
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

void serve_advise_huge_pages(void* memory, int64_t num_bytes) {
#ifdef MADV_HUGEPAGE
  madvise(memory, static_cast<size_t>(num_bytes), MADV_HUGEPAGE);
#endif
}

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
