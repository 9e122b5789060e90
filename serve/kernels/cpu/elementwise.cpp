// Row by row: norms, rotary embedding, gated activations.
#include <algorithm>

#include "activation.h"
#include "api.h"
#include "pool.h"

namespace serve {
namespace {

// Splits rows over the threads once there is enough to do (a chunk of 1 << 14 floats that are only
// added and multiplied takes about 3 us, which is what waking another thread is worth).
template <class Row>
void for_rows(Pool& pool, int64_t num_rows, int64_t cost_per_row, Row row) {
  const int64_t size = std::max<int64_t>(1, (1 << 14) / std::max<int64_t>(1, cost_per_row));
  pool.run((num_rows + size - 1) / size, [&](int64_t chunk, int) {
    const int64_t last = std::min(num_rows, (chunk + 1) * size);
    for (int64_t i = chunk * size; i < last; ++i) row(i);
  });
}

void norm_row(const float* x, const float* weight, float eps, int64_t n, float* out) {
  Vec squares = splat(0.0f);
  for_vectors(n, [&](int64_t i, int lanes) {
    Vec v = load_first(x + i, lanes);
    squares = fma(v, v, squares);
  });
  const Vec inverse =
      splat(1.0f / __builtin_sqrtf(sum(squares) / static_cast<float>(n) + eps));
  for_vectors(n, [&](int64_t i, int lanes) {
    Vec normed = mul(load_first(x + i, lanes), inverse);
    store_first(out + i, mul(normed, load_first(weight + i, lanes)), lanes);
  });
}

void rotate_head(float* head, const float* cos, const float* sin, int64_t half) {
  for_vectors(half, [&](int64_t i, int lanes) {
    Vec first = load_first(head + i, lanes), second = load_first(head + half + i, lanes);
    Vec c = load_first(cos + i, lanes), s = load_first(sin + i, lanes);
    store_first(head + i, sub(mul(first, c), mul(second, s)), lanes);
    store_first(head + half + i, add(mul(second, c), mul(first, s)), lanes);
  });
}

}  // namespace
}  // namespace serve

using namespace serve;

void serve_rms_norm(Pool* pool, const float* x, int64_t row_stride, const float* residual,
                    const float* weight, float eps, int64_t num_rows, int64_t n, float* summed,
                    float* out) {
  for_rows(*pool, num_rows, n, [=](int64_t row) {
    const float* in = x + row * row_stride;
    if (residual) {
      float* total = summed + row * n;
      for_vectors(n, [&](int64_t i, int lanes) {
        Vec before = load_first(residual + row * n + i, lanes);
        store_first(total + i, add(load_first(in + i, lanes), before), lanes);
      });
      in = total;
    }
    norm_row(in, weight, eps, n, out + row * n);
  });
}

void serve_norm_heads(Pool* pool, float* heads, int64_t token_stride, const float* weight,
                      float eps, int64_t num_tokens, int64_t num_heads, int64_t head_dim) {
  for_rows(*pool, num_tokens, num_heads * head_dim, [=](int64_t token) {
    float* head = heads + token * token_stride;
    for (int64_t i = 0; i < num_heads; ++i, head += head_dim) {
      norm_row(head, weight, eps, head_dim, head);
    }
  });
}

void serve_rotate(Pool* pool, float* heads, int64_t token_stride, int64_t head_stride,
                  int64_t num_tokens, int64_t num_heads, int64_t rotary_dim, const float* cos_sin,
                  const int64_t* positions) {
  for_rows(*pool, num_tokens, num_heads * rotary_dim, [=](int64_t token) {
    const float* cos = cos_sin + positions[token] * rotary_dim;
    for (int64_t head = 0; head < num_heads; ++head) {
      rotate_head(heads + token * token_stride + head * head_stride, cos, cos + rotary_dim / 2,
                  rotary_dim / 2);
    }
  });
}

void serve_gated_act(Pool* pool, const float* gate_up, int32_t activation, int64_t num_rows,
                     int64_t n, float* out) {
  constexpr int64_t kCost = 8;  // of an exponential and a division, in additions
  for_rows(*pool, num_rows, kCost * n, [=](int64_t row) {
    const float* gate = gate_up + row * 2 * n;
    gate_row(gate, gate + n, activation, n, out + row * n);
  });
}

Pool* serve_pool_create(int32_t num_threads) { return new Pool(num_threads); }
void serve_pool_destroy(Pool* pool) { delete pool; }
