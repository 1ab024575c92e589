// What the AVX-512 files of QuantLinear share. Functions are static: each file keeps its own ISA's copy.
#ifndef ENGINEBAY_QUANT_LINEAR_AVX512_H
#define ENGINEBAY_QUANT_LINEAR_AVX512_H

// GCC 12's AVX-512 header reads the undefined value it passes for unmasked lanes (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>

#include "quant_linear_kernels.h"

namespace enginebay {

static inline __mmask16 column_mask(int64_t columns) {
  return static_cast<__mmask16>(columns >= kPanel ? 0xffff : (1 << columns) - 1);
}

}  // namespace enginebay
#endif
