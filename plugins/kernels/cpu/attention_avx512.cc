#include "attention_entry.h"
#include "simd_avx512.h"

namespace enginebay {

const AttentionKernels& attention_kernels_avx512() { return AttentionEntry<Avx512>::kTable; }

}  // namespace enginebay
