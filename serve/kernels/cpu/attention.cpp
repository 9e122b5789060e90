// Attention straight over the block table, for any mix of prefills, chunks and decodes.
//
// Keys of a block lie transposed, [head_dim, block_size], so that sixteen positions fill the lanes
// of a score; values lie [block_size, head_dim]. The query heads that share a KV head are rows of
// one tile, so keys and values are read once for all of them.
//
// The KV range is cut at absolute multiples of kSpan. Each span is an independent softmax (maximum,
// sum, weighted values), and spans are merged in ascending order, whether one thread walked them
// all or several computed them at once. A result thus depends on the sequence alone.
// Source of the merge: FlashAttention-2, alg. 1 (arXiv:2307.08691); paging: arXiv:2309.06180.
#include <algorithm>
#include <limits>
#include <vector>

#include "api.h"
#include "pool.h"
#include "tile.h"

namespace serve {
namespace {

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

Range visible(const Problem& p, int64_t position) {
  const int64_t window = p.attention.window;
  return {window > 0 ? std::max<int64_t>(0, position - window + 1) : 0, position + 1};
}

Range overlap(Range a, Range b) {
  return {std::max(a.first, b.first), std::min(a.last, b.last)};
}

// The spans an item's rows look at, as indices.
Range spans_of(const Problem& p, const Item& item) {
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

// A run of positions whose values lie together, [count, head_dim].
struct Run {
  const float* values;
  int64_t count;
};

// How many 16-wide panels a tile of so many rows takes abreast: enough accumulators to cover the
// latency of fma, no more than there are registers.
constexpr int panels_abreast(int rows) { return rows == 1 ? 4 : rows <= kMaxTileRows / 2 ? 2 : 1; }

// out[R, P * 16] += weights[R, positions] * values[positions, column …] over the runs, in order. While
// a run is added, the next one is fetched: blocks lie anywhere, where no hardware expects them.
template <int R, int P>
__attribute__((noinline)) void weigh_runs(const float* weights, int64_t weights_stride,
                                          const Run* runs, int64_t num_runs, int64_t column,
                                          int64_t head_dim, float* out) {
  Vec acc[R][P];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) acc[r][p] = load(out + r * head_dim + p * kLanes);
  }
  for (int64_t run = 0; run < num_runs; ++run) {
    const float* values = runs[run].values + column;
    const int64_t ahead = run + 1 < num_runs ? runs[run + 1].values + column - values : 0;
    for (int64_t i = 0; i < runs[run].count; ++i, values += head_dim) {
      Vec value[P];
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) {
        _mm_prefetch(values + ahead + p * kLanes, _MM_HINT_T0);
        value[p] = load(values + p * kLanes);
      }
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        Vec weight = splat(weights[r * weights_stride + i]);
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) acc[r][p] = fma(weight, value[p], acc[r][p]);
      }
    }
    weights += runs[run].count;
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) store(out + r * head_dim + p * kLanes, acc[r][p]);
  }
}

class SpanAttention {
 public:
  SpanAttention(const Problem& problem, const Item& item, float* scratch)
      : p_(problem),
        item_(item),
        dim_(problem.cache.head_dim),
        block_size_(problem.cache.block_size),
        rows_(item.num_tokens * problem.group()),
        table_(problem.batch.block_table + item.request * problem.batch.table_stride),
        query_(scratch),
        scores_(query_ + kRowsPerItem * dim_ * row_blocks()),
        gathered_(scores_ + kRowsPerItem * kSpan * row_blocks()) {
    gather_query();
  }

  static int64_t scratch_size(const Problem& p) {
    const int64_t blocks = (p.group() + kRowsPerItem - 1) / kRowsPerItem;
    return kRowsPerItem * blocks * (p.cache.head_dim + kSpan) + p.cache.head_dim * kSpan;
  }

  // Softmax over the span's positions, into `state`.
  void run(int64_t span, const State& state) {
    score(span);
    for (int64_t row = 0; row < rows_; ++row) soften(span, row, state);
    weigh(span, state);
  }

  // The positions of the span, relative to its start, that a row looks at; empty if first >= last.
  Range within(int64_t span, int64_t row) const {
    const int64_t start = span * kSpan;
    Range range = overlap(visible(p_, item_.first_position + row / p_.group()),
                          {start, start + kSpan});
    return {range.first - start, range.last - start};
  }

  int64_t rows() const { return rows_; }

 private:
  int64_t row_blocks() const { return (p_.group() + kRowsPerItem - 1) / kRowsPerItem; }

  void gather_query() {
    const Vec scale = splat(p_.attention.scale);
    for (int64_t row = 0; row < rows_; ++row) {
      const int64_t token = item_.first_token + row / p_.group();
      const int64_t head = item_.kv_head * p_.group() + row % p_.group();
      const float* from = p_.query + token * p_.query_stride + head * dim_;
      for (int64_t i = 0; i < dim_; i += kLanes) {
        store(query_ + row * dim_ + i, mul(load(from + i), scale));
      }
    }
  }

  const float* key_block(int64_t block) const {
    const int64_t id = table_[block];
    return p_.cache.keys + (id * p_.cache.num_kv_heads + item_.kv_head) * dim_ * block_size_;
  }
  const float* value_block(int64_t block) const {
    const int64_t id = table_[block];
    return p_.cache.values + (id * p_.cache.num_kv_heads + item_.kv_head) * dim_ * block_size_;
  }

  // Sixteen keys from `position` on as a panel [head_dim, 16]: where they are, if a block holds
  // them side by side, else gathered (small or odd block sizes). Lanes from `last` on are not read.
  const float* key_panel(int64_t position, int64_t last, float* gathered) const {
    if (in_place()) return key_block(position / block_size_) + position % block_size_;
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const bool real = position + lane < last;
      const int64_t at = real ? position + lane : position;
      const float* from = key_block(at / block_size_) + at % block_size_;
      for (int64_t i = 0; i < dim_; ++i) {
        gathered[i * kLanes + lane] = real ? from[i * block_size_] : 0.0f;
      }
    }
    return gathered;
  }
  bool in_place() const { return block_size_ % kLanes == 0; }

  // scores_[row, position in span] for the panels that any row looks at.
  void score(int64_t span) {
    const int64_t start = span * kSpan;
    const int64_t first = (start + within(span, 0).first) / kLanes * kLanes;
    const int64_t last = start + within(span, rows_ - 1).last;
    const float* panels[kSpan / kLanes + 1];
    int64_t num_panels = 0;
    for (int64_t at = first; at < last; at += kLanes, ++num_panels) {
      panels[num_panels] = key_panel(at, last, gathered_ + num_panels * dim_ * kLanes);
    }
    // What is fetched during the last panels: the first values.
    panels[num_panels] = value_block(first / block_size_) + first % block_size_ * dim_;
    balanced(rows_, kMaxTileRows, [&](int64_t row, int64_t num_rows) {
      with_rows(num_rows, [&]<int R>() {
        constexpr int P = panels_abreast(R);
        float* out = scores_ + row * kSpan + first - start;
        int64_t panel = 0;
        for (; panel + P <= num_panels; panel += P) {
          score_tile<R, P>(row, panels + panel, num_panels - panel, out + panel * kLanes);
        }
        for (; panel < num_panels; ++panel) {
          score_tile<R, 1>(row, panels + panel, num_panels - panel, out + panel * kLanes);
        }
      });
    });
  }

  // P of the panels left, while the P after them are fetched.
  template <int R, int P>
  void score_tile(int64_t row, const float* const* panels, int64_t left, float* out) const {
    const int64_t stride = in_place() ? block_size_ : kLanes;
    int64_t ahead[P];
    for (int64_t p = 0; p < P; ++p) ahead[p] = panels[std::min(p + P, left)] - panels[p];
    multiply_tile<R, P>(query_ + row * dim_, dim_, panels, stride, dim_, out, kSpan, false,
                        [=](const float* keys, int64_t, int p) {
                          _mm_prefetch(keys + ahead[p], _MM_HINT_T0);
                          return load(keys);
                        });
  }

  // Scores of a row become weights e^(score - maximum); unseen positions become zero.
  void soften(int64_t span, int64_t row, const State& state) {
    const Range range = within(span, row);
    float* scores = scores_ + row * kSpan;
    const int64_t begin = range.first / kLanes * kLanes;
    Vec top = splat(kMinusInfinity);
    for (int64_t i = begin; i < range.last; i += kLanes) {
      Vec score = load(scores + i);
      if (p_.attention.softcap > 0.0f) score = capped(score);
      score = select_range(score, splat(kMinusInfinity),
                           static_cast<int>(std::max<int64_t>(0, range.first - i)),
                           static_cast<int>(std::min<int64_t>(kLanes, range.last - i)));
      store(scores + i, score);
      top = max(top, score);
    }
    const float highest = maximum(top);
    Vec total = splat(0.0f);
    for (int64_t i = begin; i < range.last; i += kLanes) {
      Vec weight = exp(sub(load(scores + i), splat(highest)));
      store(scores + i, weight);
      total = add(total, weight);
    }
    state.maximum[row] = highest;
    state.sum[row] = sum(total);
  }

  Vec capped(Vec score) const {
    const Vec cap = splat(p_.attention.softcap);
    return mul(cap, tanh(div(score, cap)));
  }

  // values[row] = sum of weight * value in the order of positions. Rows of a tile run together over
  // the positions they all see, and alone over the rest.
  void weigh(int64_t span, const State& state) {
    balanced(rows_, kMaxTileRows, [&](int64_t row, int64_t num_rows) {
      Range common = within(span, row);
      for (int64_t r = row; r < row + num_rows; ++r) common = overlap(common, within(span, r));
      if (common.first >= common.last) common = {0, 0};
      for (int64_t r = row; r < row + num_rows; ++r) {
        std::fill_n(state.values + r * dim_, dim_, 0.0f);
        Range own = within(span, r);
        if (common.first < common.last) own.last = common.first;
        weigh_rows(span, own, r, 1, state);
      }
      weigh_rows(span, common, row, num_rows, state);
      if (common.first >= common.last) return;
      for (int64_t r = row; r < row + num_rows; ++r) {
        weigh_rows(span, {common.last, within(span, r).last}, r, 1, state);
      }
    });
  }

  void weigh_rows(int64_t span, Range range, int64_t row, int64_t num_rows, const State& state) {
    Run runs[kSpan];
    int64_t num_runs = 0;
    for (int64_t at = range.first; at < range.last; at += runs[num_runs++].count) {
      const int64_t position = span * kSpan + at, offset = position % block_size_;
      runs[num_runs] = {value_block(position / block_size_) + offset * dim_,
                        std::min(block_size_ - offset, range.last - at)};
    }
    if (num_runs == 0) return;
    with_rows(num_rows, [&]<int R>() {
      const float* weights = scores_ + row * kSpan + range.first;
      float* out = state.values + row * dim_;
      int64_t i = 0;
      for (constexpr int P = panels_abreast(R); i + P * kLanes <= dim_; i += P * kLanes) {
        weigh_runs<R, P>(weights, kSpan, runs, num_runs, i, dim_, out + i);
      }
      for (; i < dim_; i += kLanes) weigh_runs<R, 1>(weights, kSpan, runs, num_runs, i, dim_, out + i);
    });
  }

  const Problem& p_;
  const Item& item_;
  const int64_t dim_, block_size_, rows_;
  const int32_t* table_;
  float* query_;
  float* scores_;
  float* gathered_;
};

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
