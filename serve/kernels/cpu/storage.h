// The forms weights are stored in, and how each becomes fp32 again, sixteen outputs at a time.
//
// Plain forms hold one number per weight: [in, 16] per panel. Block forms share a scale (and an
// offset) among 32 neighbours along `in`, as GGUF's Q8_0, Q4_0 and Q4_1 do; a block of a panel is
// kBytes long: fp16 scales[16], fp16 offsets[16] if any, then the integers. The fp32 value is the one
// GGUF defines, bit for bit: scale * q, plus the offset in one rounding.
#pragma once

#include "tile.h"

namespace serve {

constexpr int64_t kPlain = 1;
constexpr int64_t kBlock = 32;

struct Float32 {
  using Weight = float;
  static constexpr int64_t kDepth = kPlain, kBytes = 64;
  Vec operator()(const float* p, int64_t, int) const { return load(p); }
};

struct Float16 {
  using Weight = uint16_t;
  static constexpr int64_t kDepth = kPlain, kBytes = 32;
  Vec operator()(const uint16_t* p, int64_t, int) const { return widen_halves(p); }
};

struct BFloat16 {
  using Weight = uint16_t;
  static constexpr int64_t kDepth = kPlain, kBytes = 32;
  Vec operator()(const uint16_t* p, int64_t, int) const { return widen_bfloats(p); }
};

// A reader of blocks gives the weights of k = 4 * J + g, J = 0 … 7 and g = 0 … 3, in that order.

// Signed bytes, [32][16].
class Bytes {
 public:
  static constexpr int64_t kDepth = kBlock, kBytes = 32 + 32 * 16;

  void begin(const uint8_t* block) {
    scale_ = widen_halves(block);
    bytes_ = block + 32;
  }
  template <int J>
  void begin_group() {}
  template <int J>
  Vec weight(int g) const {
    return mul(widen_signed_bytes(bytes_ + 16 * (4 * J + g)), scale_);
  }

 private:
  Vec scale_;
  const uint8_t* bytes_;
};

// Four bits, unsigned, [4][16] words of 32 bits: word g of an output holds the nibbles of
// k = 4 * J + g. A nibble is masked where it lies, q * 16^J, and the scale divided by 16^J, which
// is exact and saves a shift per vector.
class Nibbles {
 public:
  static constexpr int64_t kDepth = kBlock, kBytes = 32 + 32 + 32 * 16 / 2;

  void begin(const uint8_t* block) {
    scale_ = widen_halves(block);
    offset_ = widen_halves(block + 32);
    words_ = block + 64;
  }
  template <int J>
  void begin_group() {
    step_ = mul(scale_, splat(J == 7 ? 1.0f : 1.0f / static_cast<float>(1 << (4 * J))));
  }
  template <int J>
  Vec weight(int g) const {
    return fma(nibble<J>(words_ + 64 * g), step_, offset_);
  }

 private:
  Vec scale_, offset_, step_;
  const uint8_t* words_;
};

// use(k, panel, weights) for each of a block's k, of P panels abreast.
template <int P, class Reader, class Use, int J = 0>
inline __attribute__((always_inline)) void each_weight(Reader (&readers)[P], Use use) {
#pragma GCC unroll 4
  for (int p = 0; p < P; ++p) readers[p].template begin_group<J>();
#pragma GCC unroll 4
  for (int g = 0; g < 4; ++g) {
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) use(4 * J + g, p, readers[p].template weight<J>(g));
  }
  if constexpr (J < 7) each_weight<P, Reader, Use, J + 1>(readers, use);
}

// Blocks of one panel as fp32, [depth, 16].
template <class Reader>
__attribute__((noinline)) void unpack(const uint8_t* blocks, int64_t depth, float* wide) {
  Reader reader[1];
  for (int64_t k = 0; k < depth; k += kBlock, blocks += Reader::kBytes, wide += kBlock * kLanes) {
    reader[0].begin(blocks);
    each_weight(reader, [&](int i, int, Vec weights) { store(wide + i * kLanes, weights); });
  }
}

// Blocks this far ahead of the one being read are fetched: what the processor finds by itself comes
// late, since a block keeps it busy for longer than it can look ahead (8 % of the time at 1 to 8
// rows).
constexpr int64_t kFetchAhead = 2560;

template <class Reader>
inline void fetch_block(const uint8_t* block) {
#pragma GCC unroll 16
  for (int64_t at = 0; at < Reader::kBytes; at += 64) _mm_prefetch(block + at, _MM_HINT_T0);
}

// multiply_tile for R rows and P panels, `panel_bytes` apart, straight from blocks.
template <int R, int P, class Reader>
__attribute__((noinline)) void multiply_blocks(const float* rows, int64_t row_stride,
                                               const uint8_t* blocks, int64_t panel_bytes,
                                               int64_t depth, float* out, int64_t out_stride) {
  Vec acc[R][P];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) acc[r][p] = splat(0.0f);
  }
  Reader readers[P];
  for (int64_t k = 0; k < depth; k += kBlock, blocks += Reader::kBytes) {
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) {
      readers[p].begin(blocks + p * panel_bytes);
      fetch_block<Reader>(blocks + p * panel_bytes + kFetchAhead);
    }
    each_weight(readers, [&](int i, int p, Vec weights) {
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        acc[r][p] = fma(splat(rows[r * row_stride + k + i]), weights, acc[r][p]);
      }
    });
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) store(out + r * out_stride + p * kLanes, acc[r][p]);
  }
}

// The same for the lanes of a panel's register I, and so many rows that all of its lanes would not
// fit into the registers.
template <int R, int I, class Reader>
__attribute__((noinline)) void multiply_register(const float* rows, int64_t row_stride,
                                                 const uint8_t* blocks, int64_t depth, float* out,
                                                 int64_t out_stride) {
  Register acc[R];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) acc[r] = splat_register(0.0f);
  Reader reader[1];
  for (int64_t k = 0; k < depth; k += kBlock, blocks += Reader::kBytes) {
    reader[0].begin(blocks);
    fetch_block<Reader>(blocks + kFetchAhead);
    each_weight(reader, [&](int i, int, Vec weights) {
      const Register lanes = register_of<I>(weights);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        acc[r] = fma(splat_register(rows[r * row_stride + k + i]), lanes, acc[r]);
      }
    });
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) store(out + r * out_stride + I * (kLanes / kRegisters), acc[r]);
}

}  // namespace serve
