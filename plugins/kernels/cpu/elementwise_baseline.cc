#include "elementwise_kernel.h"
#include "simd_baseline.h"

namespace enginebay {

const ElementwiseKernels& elementwise_kernels_baseline() { return ElementwiseEntry<Baseline>::kTable; }

}  // namespace enginebay
