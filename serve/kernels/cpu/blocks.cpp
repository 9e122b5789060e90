// Finds the blocks that fp32 weights were dequantized from, and packs them as storage.h reads them.
//
// A block's numbers are tried as the quantizers of GGUF choose them; they count only if all 32
// weights come back from them bit for bit, rounded as multiply_blocks rounds.
#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstring>

#include "api.h"
#include "pool.h"
#include "storage.h"

namespace serve {
namespace {

using Values = std::array<float, kBlock>;

uint16_t to_half(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }
float from_half(uint16_t h) { return _cvtsh_ss(h); }

struct Found {
  uint16_t scale, offset;
  std::array<int8_t, kBlock> q;
};

// Whether every value is scale * q + offset for a whole q within the bounds; fills in q.
bool on_grid(const Values& values, int lowest, int highest, Found* found) {
  const float scale = from_half(found->scale), offset = from_half(found->offset);
  bool exact = true;
  for (size_t i = 0; i < values.size(); ++i) {
    const float steps = scale == 0.0f ? 0.0f : (values[i] - offset) / scale;
    const float q = std::min(static_cast<float>(highest),
                             std::max(static_cast<float>(lowest), std::nearbyint(steps)));
    found->q[i] = static_cast<int8_t>(q);
    exact &= scale * q + offset == values[i];  // the product is exact, so this rounds once
  }
  return exact;
}

float farthest(const Values& values) {
  return *std::max_element(values.begin(), values.end(),
                           [](float a, float b) { return std::fabs(a) < std::fabs(b); });
}

// 0 stands for the smallest value; 15, or a little less where the scale's own rounding took it
// there, for the largest.
bool find_q4_1(const Values& values, Found* found) {
  const auto [least, most] = std::minmax_element(values.begin(), values.end());
  found->offset = to_half(*least);
  for (int steps : {15, 14, 13}) {
    found->scale = to_half((*most - from_half(found->offset)) / static_cast<float>(steps));
    if (on_grid(values, 0, 15, found)) return true;
  }
  return false;
}

// scale * (q - 8): 0 stands for the value of largest magnitude, whatever its sign.
bool find_q4_0(const Values& values, Found* found) {
  found->offset = to_half(farthest(values));
  found->scale = to_half(from_half(found->offset) / -8.0f);
  return on_grid(values, 0, 15, found);
}

// 127 or -127, or a little less, stands for the value of largest magnitude.
bool find_q8_0(const Values& values, Found* found) {
  const float reach = std::fabs(farthest(values));
  found->offset = 0;
  for (int steps : {127, 126, 125}) {
    found->scale = to_half(reach / static_cast<float>(steps));
    if (on_grid(values, -127, 127, found)) return true;
  }
  return false;
}

void put_bytes(const Found& found, int lane, uint8_t* block) {
  std::memcpy(block + 2 * lane, &found.scale, 2);
  for (int k = 0; k < kBlock; ++k) {
    block[32 + kLanes * k + lane] = static_cast<uint8_t>(found.q[static_cast<size_t>(k)]);
  }
}

void put_nibbles(const Found& found, int lane, uint8_t* block) {
  std::memcpy(block + 2 * lane, &found.scale, 2);
  std::memcpy(block + 32 + 2 * lane, &found.offset, 2);
  for (int g = 0; g < 4; ++g) {
    uint32_t word = 0;
    for (int j = 0; j < 8; ++j) {
      word |= static_cast<uint32_t>(found.q[static_cast<size_t>(4 * j + g)]) << (4 * j);
    }
    std::memcpy(block + 64 + 4 * (kLanes * g + lane), &word, 4);
  }
}

struct Form {
  bool (*find)(const Values&, Found*);
  void (*put)(const Found&, int lane, uint8_t* block);
  int64_t bytes;
};

constexpr Form kForms[] = {{find_q4_1, put_nibbles, Nibbles::kBytes},
                           {find_q4_0, put_nibbles, Nibbles::kBytes},
                           {find_q8_0, put_bytes, Bytes::kBytes}};

}  // namespace
}  // namespace serve

using namespace serve;

int32_t serve_pack_blocks(Pool* pool, int32_t form_index, const float* weight, int64_t out,
                          int64_t in, uint8_t* packed) {
  const Form& form = kForms[form_index];
  std::atomic<bool> exact{true};
  pool->run((out + kLanes - 1) / kLanes, [&](int64_t panel, int) {
    uint8_t* block = packed + panel * (in / kBlock) * form.bytes;
    for (int64_t k = 0; k < in; k += kBlock, block += form.bytes) {
      for (int lane = 0; lane < kLanes; ++lane) {
        const int64_t row = panel * kLanes + lane;
        Found found{};
        if (row < out) {
          Values values;
          std::copy_n(weight + row * in + k, kBlock, values.begin());
          if (!form.find(values, &found)) exact.store(false, std::memory_order_relaxed);
        }
        form.put(found, lane, block);
      }
      if (!exact.load(std::memory_order_relaxed)) return;
    }
  });
  return exact.load() ? 1 : 0;
}
