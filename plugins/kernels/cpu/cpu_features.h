// What this processor can run, and how far a user lowered it.
#ifndef ENGINEBAY_CPU_FEATURES_H
#define ENGINEBAY_CPU_FEATURES_H

#include "enginebay/abi.h"

namespace enginebay {

// Each level includes the ones before it.
enum class Isa {
  kBaseline = 0,    // x86-64: SSE2
  kAvx2 = 1,        // AVX2, FMA, F16C
  kAvx512 = 2,      // AVX-512 F, BW, DQ, VL
  kAvx512Vnni = 3,  // AVX-512 VNNI
  kAmx = 4,         // AMX tile, int8, bf16 (and AVX-512 BF16), permitted by the system
};

struct CpuFeatures {
  Isa isa;
  bool avx512_bf16;  // with isa kAvx512Vnni or above
  bool forced;       // ENGINEBAY_ISA asks for this level: nothing is to be chosen by measurement
  bool emulate_amx;  // and for its tile unit in plain C++, with the other kernels of this processor
};

// Asks the processor and ENGINEBAY_ISA (baseline, avx2, avx512, avx512vnni, amx, amx-emulated), once per
// process. EB_INVALID_ARGUMENT for another value, EB_UNSUPPORTED for a level this processor does not have.
eb_status cpu_features(const eb_context* context, CpuFeatures* features);

}  // namespace enginebay
#endif
