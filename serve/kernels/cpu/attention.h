// What an attention call is about: who looks at which positions, and the state of a softmax.
#pragma once

#include <algorithm>
#include <limits>

#include "api.h"

namespace serve {

constexpr int64_t kSpan = 256;
// Query rows (tokens x heads of a group) that share one pass over keys and values; the scores of
// 24 rows (24 KiB) stay in the L1 cache.
constexpr int64_t kRowsPerItem = 24;
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

struct Problem {
  const ServeCache& cache;
  const ServeBatch& batch;
  const ServeAttention& attention;
  const float* query;
  int64_t query_stride;
  float* out;

  int64_t group() const { return attention.num_heads / cache.num_kv_heads; }
};

// Some tokens of one request, and the query heads of one KV head.
struct Item {
  int64_t request, kv_head, first_token, num_tokens;  // tokens counted in the whole step
  int64_t first_position;
};

// Positions [first, last) that a row may look at.
struct Range {
  int64_t first, last;
};

inline Range visible(const Problem& p, int64_t position) {
  const int64_t window = p.attention.window;
  return {window > 0 ? std::max<int64_t>(0, position - window + 1) : 0, position + 1};
}

inline Range overlap(Range a, Range b) {
  return {std::max(a.first, b.first), std::min(a.last, b.last)};
}

// The spans an item's rows look at, as indices.
inline Range spans_of(const Problem& p, const Item& item) {
  const int64_t last = visible(p, item.first_position + item.num_tokens - 1).last;
  return {visible(p, item.first_position).first / kSpan, (last + kSpan - 1) / kSpan};
}

// Softmax state of an item's rows over one or more spans.
struct State {
  float* maximum;  // [rows]
  float* sum;      // [rows]
  float* values;   // [rows, head_dim]

  static int64_t size(int64_t rows, int64_t head_dim) { return rows * (head_dim + 2); }
  static State at(float* memory, int64_t rows, int64_t head_dim) {
    return {memory + rows * head_dim, memory + rows * (head_dim + 1), memory};
  }
};

}  // namespace serve
