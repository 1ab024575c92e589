#include "elementwise_kernel.h"
#include "simd_avx512.h"

namespace enginebay {

const ElementwiseKernels& elementwise_kernels_avx512() { return ElementwiseEntry<Avx512>::kTable; }

}  // namespace enginebay
