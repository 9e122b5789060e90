// Attention of some query rows over one span of positions: scores, softmax, weighted values.
//
// Keys of a block lie transposed, [head_dim, block_size], so that sixteen positions fill the lanes
// of a score; values lie [block_size, head_dim]. The query heads that share a KV head are rows of
// one tile, so keys and values are read once for all of them.
#pragma once

#include <algorithm>

#include "attention.h"
#include "tile.h"

namespace serve {

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

}  // namespace serve
