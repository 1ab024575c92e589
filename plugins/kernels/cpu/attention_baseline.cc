#include "attention_entry.h"
#include "simd_baseline.h"

namespace enginebay {

const AttentionKernels& attention_kernels_baseline() { return AttentionEntry<Baseline>::kTable; }

}  // namespace enginebay
