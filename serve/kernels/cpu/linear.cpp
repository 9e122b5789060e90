// Linear layers over weights packed in panels of sixteen outputs, [panels, in, 16], on all threads.
#include <sys/mman.h>

#include <algorithm>

#include "activation.h"
#include "api.h"
#include "integer.h"
#include "panel_product.h"
#include "pool.h"

namespace serve {
namespace {

// work(first, last, thread) for ranges that make up all panels of a layer.
template <class Storage, class Work>
void for_panels(Pool& pool, int64_t num_rows, int64_t num_panels, int64_t in, Work work) {
  const int64_t abreast = panels_abreast<Storage>(num_rows);
  const int64_t num_bytes = num_panels * in / Storage::kDepth * Storage::kBytes;
  pool.run_ranges((num_panels + abreast - 1) / abreast, pool.chunks_worth(num_rows, num_bytes),
                  [&](int64_t first, int64_t last, int thread) {
                    work(first * abreast, std::min(last * abreast, num_panels), thread);
                  });
}

template <class Storage>
void multiply(Pool& pool, const Shape& s, const void* weights) {
  for_panels<Storage>(pool, s.num_rows, (s.out + kLanes - 1) / kLanes, s.in,
                      [&](int64_t first, int64_t last, int thread) {
                        multiply_range<Storage>(s, static_cast<const uint8_t*>(weights), first,
                                                last, pool.scratch(thread, kRangeScratch));
                      });
}

// A thread multiplies the same columns of both halves into its own scratch and gates them while
// they are in its cache: nothing wide goes through memory.
template <class Storage>
void multiply_gated(Pool& pool, const Shape& s, const void* weights, int32_t activation) {
  const int64_t half = s.out / 2, half_panels = half / kLanes;
  auto packed = static_cast<const uint8_t*>(weights);
  for_panels<Storage>(pool, s.num_rows, half_panels, s.in, [&](int64_t first, int64_t last,
                                                               int thread) {
    const int64_t width = (last - first) * kLanes;
    float* scratch = pool.scratch(thread, kRangeScratch + 2 * s.num_rows * width);
    float* gate = scratch + kRangeScratch;
    float* up = gate + s.num_rows * width;
    auto part = [&](int64_t panel, float* result) {
      const float* bias = s.bias ? s.bias + panel * kLanes : nullptr;
      const Shape columns{s.rows, s.num_rows, s.in, width, bias, result};
      multiply_range<Storage>(columns, place<Storage>(packed, s.in, panel, 0), 0, last - first,
                              scratch);
    };
    part(first, gate);
    part(half_panels + first, up);
    for (int64_t row = 0; row < s.num_rows; ++row) {
      gate_row(gate + row * width, up + row * width, activation, width,
               s.result + row * half + first * kLanes);
    }
  });
}

// use.template operator()<Storage>() with the storage of a number that api.h gives.
template <class Use>
void with_storage(int32_t storage, Use use) {
  switch (storage) {
    case 0:
      return use.template operator()<Float32>();
    case 1:
      return use.template operator()<Float16>();
    case 2:
      return use.template operator()<BFloat16>();
    case 3:
      return use.template operator()<Bytes>();
    case 4:
      return use.template operator()<Nibbles>();
  }
}

constexpr int32_t kInt8 = 5;

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
  if (storage == kInt8) {
    return multiply_integers(*pool, rows, num_rows, in, out, weights, bias, result);
  }
  const Shape shape{rows, num_rows, in, out, bias, result};
  with_storage(storage, [&]<class Storage>() { multiply<Storage>(*pool, shape, weights); });
}

void serve_gated_linear(Pool* pool, const ServeLinear* linear, const float* rows, int64_t num_rows,
                        int32_t activation, float* wide, float* result) {
  if (num_rows == 0) return;
  const int64_t half = linear->out / 2;
  if (linear->storage == kInt8 || half % kLanes != 0) {
    serve_linear(pool, linear->storage, rows, num_rows, linear->in, linear->out, linear->weights,
                 linear->bias, wide);
    return serve_gated_act(pool, wide, activation, num_rows, half, result);
  }
  const Shape shape{rows, num_rows, linear->in, linear->out, linear->bias, result};
  with_storage(linear->storage, [&]<class Storage>() {
    multiply_gated<Storage>(*pool, shape, linear->weights, activation);
  });
}
