// Gated activations of a row.
#pragma once

#include "simd.h"

namespace serve {

inline Vec silu(Vec x) { return mul(x, sigmoid(x)); }

// 0.5 x (1 + tanh(u)) = x sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3)
inline Vec gelu_tanh(Vec x) {
  Vec cubic = mul(mul(mul(x, x), x), splat(0.044715f));
  return mul(x, sigmoid(mul(splat(1.5957691216f), add(x, cubic))));
}

// out[n] = activation(gate) * up; activation as in api.h.
inline void gate_row(const float* gate, const float* up, int32_t activation, int64_t n,
                     float* out) {
  auto gated = [&](auto activate) {
    for_vectors(n, [&](int64_t i, int lanes) {
      Vec other = load_first(up + i, lanes);
      store_first(out + i, mul(activate(load_first(gate + i, lanes)), other), lanes);
    });
  };
  activation == 0 ? gated(silu) : gated(gelu_tanh);
}

}  // namespace serve
