// Linear layers over int8 weights; see integer.cpp.
#pragma once

#include "pool.h"

namespace serve {

// serve_linear for weights of storage 5.
void multiply_integers(Pool& pool, const float* rows, int64_t num_rows, int64_t in, int64_t out,
                       const void* weights, const float* bias, float* result);

}  // namespace serve
