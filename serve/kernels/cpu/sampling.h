// What Python calls around the choice of tokens, under the rules of api.h.
#pragma once

#include <cstdint>

namespace serve {
class Pool;
}

extern "C" {

// tokens[row] = the first of the row's largest logits [num_rows, vocab].
void serve_argmax(serve::Pool* pool, const float* logits, int64_t num_rows, int64_t vocab,
                  int64_t* tokens);

// One token per row, after temperature, min_p, top_k and top_p; see DrawFn. controls [num_rows, …]:
// temperature, top_k, top_p, min_p, then what the stride skips; keys [num_rows, 2].
void serve_draw(serve::Pool* pool, const float* logits, int64_t num_rows, int64_t vocab,
                const float* controls, int64_t controls_stride, const int32_t* keys,
                int64_t* tokens);

// Penalizes logits [num_rows, vocab] in place; see PenalizeFn. controls [num_rows, 3]: presence,
// frequency, repetition; generated and in_prompt [num_rows, vocab].
void serve_penalize(serve::Pool* pool, float* logits, int64_t num_rows, int64_t vocab,
                    const float* controls, const int32_t* generated, const uint8_t* in_prompt);

// Puts -inf where a token's bit is 0, in rows[num_masked] of logits [..., vocab]; see MaskFn. bits
// [num_masked, ceil(vocab / 32)].
void serve_mask(serve::Pool* pool, float* logits, int64_t vocab, const int64_t* rows,
                const uint32_t* bits, int64_t num_masked);

struct ServeScores {
  float* logprobs;      // [num_rows], of the tokens given
  int64_t* ranks;       // [num_rows], 1 = most likely
  int64_t* top_ids;     // [num_rows, num_top], best first
  float* top_logprobs;  // [num_rows, num_top]
};

// Scores tokens[row] by logits [num_rows, vocab], and lists each row's num_top <= vocab best.
void serve_score(serve::Pool* pool, const float* logits, int64_t num_rows, int64_t vocab,
                 const int64_t* tokens, int64_t num_top, const ServeScores* scores);
}
