#include "attention_entry.h"
#include "simd_avx2.h"

namespace enginebay {

const AttentionKernels& attention_kernels_avx2() { return AttentionEntry<Avx2>::kTable; }

}  // namespace enginebay
