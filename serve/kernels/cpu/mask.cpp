// Leaves a row of logits the tokens that a grammar allows, told by packed bits.
#include <algorithm>
#include <limits>

#include "pool.h"
#include "sampling.h"

namespace serve {
namespace {

constexpr int64_t kWord = 32;
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// Words are mostly all 0 or all 1: what a grammar allows is few tokens, or nearly every one.
void mask_row(float* logits, int64_t vocab, const uint32_t* bits) {
  for (int64_t start = 0; start < vocab; start += kWord) {
    const uint32_t word = bits[start / kWord];
    if (word == ~0u) continue;
    const int64_t count = std::min(kWord, vocab - start);
    for (int64_t i = 0; i < count; ++i) {
      logits[start + i] = word >> i & 1 ? logits[start + i] : kMinusInfinity;
    }
  }
}

}  // namespace
}  // namespace serve

using namespace serve;

void serve_mask(Pool* pool, float* logits, int64_t vocab, const int64_t* rows,
                const uint32_t* bits, int64_t num_masked) {
  const int64_t num_words = (vocab + kWord - 1) / kWord;
  pool->run(num_masked, [=](int64_t i, int) {
    mask_row(logits + rows[i] * vocab, vocab, bits + i * num_words);
  });
}
