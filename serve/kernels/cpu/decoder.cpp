// A whole decoder in one call: what models/layers.py does with single operations, in that order and
// with the same bits.
#include <algorithm>
#include <vector>

#include "api.h"
#include "pool.h"

namespace {

using serve::Pool;

class Decoder {
 public:
  Decoder(Pool& pool, const ServeDecoder& decoder, const ServeStep& step)
      : pool_(pool), d_(decoder), step_(step), num_tokens_(step.num_tokens) {
    heads_width_ = d_.num_heads * d_.head_dim;
    kv_width_ = d_.num_kv_heads * d_.head_dim;
    // Attention and MLP take turns with the same memory.
    const int64_t width = std::max(2 * (heads_width_ + kv_width_), 3 * d_.intermediate);
    float* memory = pool.scratch(pool.num_threads(), num_tokens_ * (2 * d_.hidden + width));
    normed_ = memory;
    output_ = normed_ + num_tokens_ * d_.hidden;
    wide_ = output_ + num_tokens_ * d_.hidden;
  }

  void run() {
    norm(step_.residual, d_.layers[0].before_attention, normed_);
    for (int64_t i = 0; i < d_.num_layers; ++i) {
      const ServeLayer& layer = d_.layers[i];
      const bool last = i + 1 == d_.num_layers;
      attend(layer, i, last && step_.num_wanted < num_tokens_);
      add_norm(layer.after_attention, layer.before_mlp, normed_);
      multiply_gated(layer);
      add_norm(layer.after_mlp, last ? d_.final_norm : d_.layers[i + 1].before_attention,
               last ? step_.out : normed_);
    }
  }

 private:
  // With `narrow`, only the wanted tokens go on once the keys and values of all are written: of a
  // prompt chunk in the last layer that leaves a token or none.
  void attend(const ServeLayer& layer, int64_t index, bool narrow) {
    const int64_t width = heads_width_ + 2 * kv_width_;
    float* query = wide_;
    float* key = query + heads_width_;
    float* value = key + kv_width_;
    float* attended = wide_ + num_tokens_ * width;
    multiply(layer.qkv, normed_, query);
    if (layer.query) {
      serve_norm_heads(&pool_, query, width, layer.query, d_.eps, num_tokens_, d_.num_heads,
                       d_.head_dim);
      serve_norm_heads(&pool_, key, width, layer.key, d_.eps, num_tokens_, d_.num_kv_heads,
                       d_.head_dim);
    }
    const ServeRope& rope = step_.ropes[layer.rope];
    serve_rotate(&pool_, query, width, d_.head_dim, num_tokens_, d_.num_heads + d_.num_kv_heads,
                 rope.rotary_dim, rope.cos_sin, rope.positions);
    const ServeCache cache{step_.keys[index], step_.values[index], d_.num_kv_heads, d_.head_dim,
                           step_.block_size};
    serve_write_kv(&pool_, &cache, key, value, width, width, step_.slots, num_tokens_);
    const ServeAttention attention{d_.num_heads, layer.window, d_.scale, d_.softcap, nullptr};
    ServeBatch batch = *step_.batch;
    if (narrow) {
      keep_wanted(query, width, heads_width_);
      keep_wanted(step_.residual, d_.hidden, d_.hidden);
      batch = batch_of_wanted();
      num_tokens_ = step_.num_wanted;
    }
    serve_attend(&pool_, &cache, &batch, &attention, query, width, attended);
    multiply(layer.output, attended, output_);
  }

  // Moves the wanted rows to the front.
  void keep_wanted(float* rows, int64_t stride, int64_t width) {
    for (int64_t i = 0; i < step_.num_wanted; ++i) {
      std::copy_n(rows + step_.wanted[i] * stride, width, rows + i * stride);
    }
  }

  // Every wanted token as a request of one token, at its own position.
  ServeBatch batch_of_wanted() {
    const ServeBatch& all = *step_.batch;
    tables_.resize(static_cast<size_t>(step_.num_wanted * all.table_stride));
    int64_t request = 0;
    for (int64_t i = 0; i < step_.num_wanted; ++i) {
      const int64_t token = step_.wanted[i];
      while (all.query_start[request + 1] <= token) ++request;
      const int64_t len = all.seq_lens[request] - (all.query_start[request + 1] - 1 - token);
      starts_.push_back(static_cast<int32_t>(i));
      lens_.push_back(static_cast<int32_t>(len));
      std::copy_n(all.block_table + request * all.table_stride,
                  (len + step_.block_size - 1) / step_.block_size,
                  tables_.data() + i * all.table_stride);
    }
    starts_.push_back(static_cast<int32_t>(step_.num_wanted));
    return {starts_.data(), lens_.data(), tables_.data(), all.table_stride, step_.num_wanted};
  }

  void multiply_gated(const ServeLayer& layer) {
    float* activated = wide_ + num_tokens_ * 2 * d_.intermediate;
    serve_gated_linear(&pool_, &layer.gate_up, normed_, num_tokens_, d_.activation, wide_,
                       activated);
    multiply(layer.down, activated, output_);
  }

  // residual += output_, which is normed before if the model says so; out = norm(residual).
  void add_norm(const float* output_norm, const float* weight, float* out) {
    if (output_norm) norm(output_, output_norm, output_);
    serve_rms_norm(&pool_, output_, d_.hidden, step_.residual, weight, d_.eps, num_tokens_,
                   d_.hidden, step_.residual, out);
  }

  void norm(const float* x, const float* weight, float* out) {
    serve_rms_norm(&pool_, x, d_.hidden, nullptr, weight, d_.eps, num_tokens_, d_.hidden, nullptr,
                   out);
  }

  void multiply(const ServeLinear& linear, const float* rows, float* result) {
    serve_linear(&pool_, linear.storage, rows, num_tokens_, linear.in, linear.out, linear.weights,
                 linear.bias, result);
  }

  Pool& pool_;
  const ServeDecoder& d_;
  const ServeStep& step_;
  int64_t num_tokens_;
  int64_t heads_width_, kv_width_;
  std::vector<int32_t> starts_, lens_, tables_;  // of the wanted tokens
  float *normed_, *output_, *wide_;
};

}  // namespace

void serve_decode(Pool* pool, const ServeDecoder* decoder, const ServeStep* step) {
  if (step->num_tokens > 0) Decoder(*pool, *decoder, *step).run();
}
