// Attention straight over the block table, for any mix of prefills, chunks and decodes.
//
// The KV range is cut at absolute multiples of kSpan. Each span is an independent softmax (maximum,
// sum, weighted values), and spans are merged in ascending order, whether one thread walked them
// all or several computed them at once. A result thus depends on the sequence alone.
// Source of the merge: FlashAttention-2, alg. 1 (arXiv:2307.08691); paging: arXiv:2309.06180.
#include <vector>

#include "pool.h"
#include "span_attention.h"

namespace serve {
namespace {

// state <- state merged with the later span `next`, for one row.
void merge_row(const State& state, const State& next, int64_t row, int64_t dim) {
  const float top = std::max(state.maximum[row], next.maximum[row]);
  const float keep = exp(state.maximum[row] - top), take = exp(next.maximum[row] - top);
  state.maximum[row] = top;
  state.sum[row] = state.sum[row] * keep + next.sum[row] * take;
  float* values = state.values + row * dim;
  for (int64_t i = 0; i < dim; i += kLanes) {
    Vec kept = mul(load(values + i), splat(keep));
    store(values + i, fma(load(next.values + row * dim + i), splat(take), kept));
  }
}

void copy_row(const State& to, const State& from, int64_t row, int64_t dim) {
  to.maximum[row] = from.maximum[row];
  to.sum[row] = from.sum[row];
  std::copy_n(from.values + row * dim, dim, to.values + row * dim);
}

// Folds a span's state into the running one: rows that see nothing of it are left alone, rows that
// see their first span take it as it is.
void fold(const Problem& p, const Item& item, int64_t span, const State& total, const State& next) {
  const int64_t group = p.group(), dim = p.cache.head_dim;
  for (int64_t row = 0; row < item.num_tokens * group; ++row) {
    const Range seen = visible(p, item.first_position + row / group);
    if (seen.first >= (span + 1) * kSpan || seen.last <= span * kSpan) continue;
    if (seen.first / kSpan == span) {
      copy_row(total, next, row, dim);
    } else {
      merge_row(total, next, row, dim);
    }
  }
}

void finish(const Problem& p, const Item& item, const State& total) {
  const int64_t group = p.group(), dim = p.cache.head_dim;
  for (int64_t row = 0; row < item.num_tokens * group; ++row) {
    const int64_t head = item.kv_head * group + row % group;
    float sum = total.sum[row], keep = 1.0f;
    if (p.attention.sinks) {
      const float top = std::max(total.maximum[row], p.attention.sinks[head]);
      keep = exp(total.maximum[row] - top);
      sum = sum * keep + exp(p.attention.sinks[head] - top);
    }
    const Vec factor = splat(keep / sum);
    float* out =
        p.out + ((item.first_token + row / group) * p.attention.num_heads + head) * dim;
    for (int64_t i = 0; i < dim; i += kLanes) {
      store(out + i, mul(load(total.values + row * dim + i), factor));
    }
  }
}

std::vector<Item> items_of(const Problem& p) {
  std::vector<Item> items;
  const int64_t tokens = std::max<int64_t>(1, kRowsPerItem / p.group());
  for (int64_t request = 0; request < p.batch.num_requests; ++request) {
    const int64_t start = p.batch.query_start[request];
    const int64_t num_tokens = p.batch.query_start[request + 1] - start;
    const int64_t first_position = p.batch.seq_lens[request] - num_tokens;
    balanced(num_tokens, tokens, [&](int64_t token, int64_t size) {
      for (int64_t head = 0; head < p.cache.num_kv_heads; ++head) {
        items.push_back({request, head, start + token, size, first_position + token});
      }
    });
  }
  return items;
}

void walk_spans(const Problem& p, const Item& item, float* scratch) {
  const int64_t rows = item.num_tokens * p.group(), dim = p.cache.head_dim;
  const State total = State::at(scratch, rows, dim);
  const State next = State::at(scratch + State::size(rows, dim), rows, dim);
  SpanAttention attention(p, item, scratch + 2 * State::size(rows, dim));
  const Range spans = spans_of(p, item);
  for (int64_t span = spans.first; span < spans.last; ++span) {
    attention.run(span, next);
    fold(p, item, span, total, next);
  }
  finish(p, item, total);
}

// Few items, many spans (one long conversation decoding): every span is a chunk of its own, and a
// second round folds them in order.
void spread_spans(Pool& pool, const Problem& p, const std::vector<Item>& items) {
  struct Part {
    int64_t item, span;
    float* state;
  };
  const int64_t dim = p.cache.head_dim;
  std::vector<Part> parts;
  std::vector<int64_t> first_part;
  int64_t num_floats = 0;
  for (size_t i = 0; i < items.size(); ++i) {
    first_part.push_back(static_cast<int64_t>(parts.size()));
    const Range spans = spans_of(p, items[i]);
    for (int64_t span = spans.first; span < spans.last; ++span) {
      parts.push_back({static_cast<int64_t>(i), span, nullptr});
      num_floats += State::size(items[i].num_tokens * p.group(), dim);
    }
  }
  std::vector<float> states(static_cast<size_t>(num_floats));
  float* at = states.data();
  for (auto& part : parts) {
    part.state = at;
    at += State::size(items[static_cast<size_t>(part.item)].num_tokens * p.group(), dim);
  }
  pool.run(static_cast<int64_t>(parts.size()), [&](int64_t chunk, int thread) {
    const Part& part = parts[static_cast<size_t>(chunk)];
    const Item& item = items[static_cast<size_t>(part.item)];
    float* scratch = pool.scratch(thread, static_cast<size_t>(SpanAttention::scratch_size(p)));
    SpanAttention attention(p, item, scratch);
    attention.run(part.span, State::at(part.state, attention.rows(), dim));
  });
  for (size_t i = 0; i < items.size(); ++i) {
    const int64_t rows = items[i].num_tokens * p.group();
    const Range spans = spans_of(p, items[i]);
    const Part* own = parts.data() + first_part[i];
    const State total = State::at(own->state, rows, dim);
    for (int64_t span = spans.first + 1; span < spans.last; ++span) {
      fold(p, items[i], span, total, State::at(own[span - spans.first].state, rows, dim));
    }
    finish(p, items[i], total);
  }
}

}  // namespace
}  // namespace serve

using namespace serve;

void serve_attend(Pool* pool, const ServeCache* cache, const ServeBatch* batch,
                  const ServeAttention* attention, const float* query, int64_t query_stride,
                  float* out) {
  const Problem problem{*cache, *batch, *attention, query, query_stride, out};
  const std::vector<Item> items = items_of(problem);
  if (static_cast<int>(items.size()) < 4 * pool->num_threads()) {
    return spread_spans(*pool, problem, items);
  }
  const int64_t rows = std::max(kRowsPerItem, problem.group());
  const int64_t floats = 2 * State::size(rows, cache->head_dim) +
                         SpanAttention::scratch_size(problem);
  pool->run(static_cast<int64_t>(items.size()), [&](int64_t chunk, int thread) {
    float* scratch = pool->scratch(thread, static_cast<size_t>(floats));
    walk_spans(problem, items[static_cast<size_t>(chunk)], scratch);
  });
}
