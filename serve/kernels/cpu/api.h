// What Python calls, through ctypes. Shapes and types are checked there; pointers are to contiguous
// fp32 unless a stride (in elements) or another type is given.
#pragma once

#include <cstdint>

namespace serve {
class Pool;
}

extern "C" {

serve::Pool* serve_pool_create(int32_t num_threads);
void serve_pool_destroy(serve::Pool* pool);

// Asks for 2 MiB pages behind page-aligned memory not yet touched: a few per cent of a step, which
// reads all weights through the address translation.
void serve_advise_huge_pages(void* memory, int64_t num_bytes);

// result[num_rows, out] = rows[num_rows, in] · weights + bias; bias may be null.
// weights: panels of 16 outputs in storage 0 = fp32, 1 = fp16, 2 = bf16, 3 = blocks of bytes,
// 4 = blocks of nibbles (see storage.h; `in` is a multiple of 32), 5 = int8 with a scale per output
// (see integer.cpp).
void serve_linear(serve::Pool* pool, int32_t storage, const float* rows, int64_t num_rows,
                  int64_t in, int64_t out, const void* weights, const float* bias, float* result);

// Packs the blocks of a GGUF file, [count, in], as the outputs from `first` on: form 0 = Q4_1, 1 = Q4_0 (both stored as
// nibbles) or 2 = Q8_0 (as bytes). Returns 1 if every weight comes back unchanged, else 0.
int32_t serve_pack_blocks(serve::Pool* pool, int32_t form, const uint8_t* stored, int64_t first,
                          int64_t count, int64_t in, uint8_t* packed);

// out = x / rms(x) * weight over rows of n; with residual, x + residual is normalised and stored
// in `summed`.
void serve_rms_norm(serve::Pool* pool, const float* x, int64_t row_stride, const float* residual,
                    const float* weight, float eps, int64_t num_rows, int64_t n, float* summed,
                    float* out);

// rms_norm of every head, in place.
void serve_norm_heads(serve::Pool* pool, float* heads, int64_t token_stride, const float* weight,
                      float eps, int64_t num_tokens, int64_t num_heads, int64_t head_dim);

// Rotates the first rotary_dim of each head in place; see RotaryFn.
void serve_rotate(serve::Pool* pool, float* heads, int64_t token_stride, int64_t head_stride,
                  int64_t num_tokens, int64_t num_heads, int64_t rotary_dim, const float* cos_sin,
                  const int64_t* positions);

// activation 0 = silu, 1 = gelu_tanh; gate_up [num_rows, 2n] -> out [num_rows, n].
void serve_gated_act(serve::Pool* pool, const float* gate_up, int32_t activation, int64_t num_rows,
                     int64_t n, float* out);

struct ServeLinear {
  int32_t storage;
  int64_t in, out;
  const void* weights;
  const float* bias;  // or null
};

// result[num_rows, out / 2] = activation(gate) * up, where [gate, up] = serve_linear(rows). Each thread
// gates what it multiplied, except for int8 and halves that are no multiple of 16: those go through
// `wide` [num_rows, out].
void serve_gated_linear(serve::Pool* pool, const ServeLinear* linear, const float* rows,
                        int64_t num_rows, int32_t activation, float* wide, float* result);

struct ServeCache {
  float* keys;    // [num_blocks, num_kv_heads, head_dim, block_size]
  float* values;  // [num_blocks, num_kv_heads, block_size, head_dim]
  int64_t num_kv_heads, head_dim, block_size;
};

void serve_write_kv(serve::Pool* pool, const ServeCache* cache, const float* key,
                    const float* value, int64_t key_stride, int64_t value_stride,
                    const int64_t* slots, int64_t num_tokens);

struct ServeBatch {
  const int32_t* query_start;  // [num_requests + 1]
  const int32_t* seq_lens;     // [num_requests]
  const int32_t* block_table;  // [num_requests, …]
  int64_t table_stride, num_requests;
};

struct ServeAttention {
  int64_t num_heads, window;  // window 0: none
  float scale, softcap;       // softcap 0: none
  const float* sinks;         // [num_heads] or null
};

void serve_attend(serve::Pool* pool, const ServeCache* cache, const ServeBatch* batch,
                  const ServeAttention* attention, const float* query, int64_t query_stride,
                  float* out);

// One layer; norms that a model does not have are null.
struct ServeLayer {
  ServeLinear qkv, output, gate_up, down;
  const float *before_attention, *query, *key, *after_attention, *before_mlp, *after_mlp;
  int64_t window, rope;  // window 0: none; rope: index into ServeStep.ropes
};

struct ServeDecoder {
  const ServeLayer* layers;
  const float* final_norm;
  int64_t num_layers, hidden, intermediate, num_heads, num_kv_heads, head_dim;
  int32_t activation;
  float eps, scale, softcap;
};

struct ServeRope {
  const float* cos_sin;  // [positions, rotary_dim]
  const int64_t* positions;
  int64_t rotary_dim;
};

struct ServeStep {
  const ServeBatch* batch;
  const int64_t* slots;
  float* const* keys;    // per layer, as in ServeCache
  float* const* values;  // per layer
  const ServeRope* ropes;
  int64_t block_size, num_tokens;
  float* residual;       // [num_tokens, hidden]: embeddings; changed
  const int64_t* wanted;  // [num_wanted], ascending: the tokens to give out; not read if all are
  int64_t num_wanted;
  float* out;            // [num_wanted, hidden]: final norm applied
};

// All layers of a decoder: the functions above in the order of models/layers.py, without the way
// back to Python between them.
void serve_decode(serve::Pool* pool, const ServeDecoder* decoder, const ServeStep* step);
}
