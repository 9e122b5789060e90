// New keys and values into their slots, in the layout that span_attention.h reads.
#include <algorithm>

#include "api.h"
#include "pool.h"

using namespace serve;

void serve_write_kv(Pool* pool, const ServeCache* cache, const float* key, const float* value,
                    int64_t key_stride, int64_t value_stride, const int64_t* slots,
                    int64_t num_tokens) {
  const int64_t dim = cache->head_dim, heads = cache->num_kv_heads, size = cache->block_size;
  auto write = [&](int64_t token) {
    const int64_t block = slots[token] / size, offset = slots[token] % size;
    for (int64_t head = 0; head < heads; ++head) {
      const int64_t start = (block * heads + head) * dim * size;
      const float* k = key + token * key_stride + head * dim;
      float* column = cache->keys + start + offset;
      for (int64_t i = 0; i < dim; ++i) column[i * size] = k[i];
      const float* v = value + token * value_stride + head * dim;
      std::copy_n(v, dim, cache->values + start + offset * dim);
    }
  };
  constexpr int64_t kTokens = 16;
  pool->run((num_tokens + kTokens - 1) / kTokens, [&](int64_t chunk, int) {
    const int64_t last = std::min(num_tokens, (chunk + 1) * kTokens);
    for (int64_t token = chunk * kTokens; token < last; ++token) write(token);
  });
}
