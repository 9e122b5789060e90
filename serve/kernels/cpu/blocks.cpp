// Packs the blocks of a GGUF file as storage.h reads them: the same integers and scales, in another
// order, so that every weight is the one the file stands for, bit for bit.
#include <array>
#include <atomic>
#include <cstring>

#include "api.h"
#include "pool.h"
#include "storage.h"

namespace serve {
namespace {

uint16_t to_half(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }
float from_half(uint16_t h) { return _cvtsh_ss(h); }

struct Block {
  uint16_t scale, offset;
  std::array<int8_t, kBlock> q;
};

// Byte i holds the numbers i and i + 16.
void read_nibbles(const uint8_t* bytes, Block* block) {
  for (size_t i = 0; i < 16; ++i) {
    block->q[i] = static_cast<int8_t>(bytes[i] & 15);
    block->q[i + 16] = static_cast<int8_t>(bytes[i] >> 4);
  }
}

// Readers return whether the block can be written down exactly.
bool read_q4_1(const uint8_t* bytes, Block* block) {
  std::memcpy(&block->scale, bytes, 2);
  std::memcpy(&block->offset, bytes + 2, 2);
  read_nibbles(bytes + 4, block);
  return true;
}

// scale * (q - 8)
bool read_q4_0(const uint8_t* bytes, Block* block) {
  std::memcpy(&block->scale, bytes, 2);
  const float offset = -8.0f * from_half(block->scale);
  block->offset = to_half(offset);
  read_nibbles(bytes + 2, block);
  return from_half(block->offset) == offset;
}

bool read_q8_0(const uint8_t* bytes, Block* block) {
  std::memcpy(&block->scale, bytes, 2);
  std::memcpy(block->q.data(), bytes + 2, kBlock);
  return true;
}

void put_bytes(const Block& from, int lane, uint8_t* to) {
  std::memcpy(to + 2 * lane, &from.scale, 2);
  for (int k = 0; k < kBlock; ++k) {
    to[32 + kLanes * k + lane] = static_cast<uint8_t>(from.q[static_cast<size_t>(k)]);
  }
}

void put_nibbles(const Block& from, int lane, uint8_t* to) {
  std::memcpy(to + 2 * lane, &from.scale, 2);
  std::memcpy(to + 32 + 2 * lane, &from.offset, 2);
  for (int g = 0; g < 4; ++g) {
    uint32_t word = 0;
    for (int j = 0; j < 8; ++j) {
      word |= static_cast<uint32_t>(from.q[static_cast<size_t>(4 * j + g)]) << (4 * j);
    }
    std::memcpy(to + 64 + 4 * (kLanes * g + lane), &word, 4);
  }
}

struct Form {
  bool (*read)(const uint8_t* bytes, Block*);
  int64_t file_bytes;
  void (*put)(const Block&, int lane, uint8_t* to);
  int64_t bytes;
};

constexpr Form kForms[] = {{read_q4_1, 20, put_nibbles, Nibbles::kBytes},
                           {read_q4_0, 18, put_nibbles, Nibbles::kBytes},
                           {read_q8_0, 34, put_bytes, Bytes::kBytes}};

}  // namespace
}  // namespace serve

using namespace serve;

int32_t serve_pack_blocks(Pool* pool, int32_t form_index, const uint8_t* stored, int64_t first,
                          int64_t count, int64_t in, uint8_t* packed) {
  const Form& form = kForms[form_index];
  const int64_t depth = in / kBlock, end = first + count, first_panel = first / kLanes;
  std::atomic<bool> exact{true};
  pool->run((end + kLanes - 1) / kLanes - first_panel, [&](int64_t index, int) {
    const int64_t panel = first_panel + index;
    for (int lane = 0; lane < kLanes; ++lane) {
      const int64_t row = panel * kLanes + lane;
      if (row < first || row >= end) continue;
      const uint8_t* from = stored + (row - first) * depth * form.file_bytes;
      uint8_t* to = packed + panel * depth * form.bytes;
      for (int64_t k = 0; k < depth; ++k, from += form.file_bytes, to += form.bytes) {
        Block block{};
        if (!form.read(from, &block)) exact.store(false, std::memory_order_relaxed);
        form.put(block, lane, to);
      }
    }
  });
  return exact.load() ? 1 : 0;
}
