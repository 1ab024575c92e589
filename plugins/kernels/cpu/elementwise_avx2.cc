#include "elementwise_kernel.h"
#include "simd_avx2.h"

namespace enginebay {

const ElementwiseKernels& elementwise_kernels_avx2() { return ElementwiseEntry<Avx2>::kTable; }

}  // namespace enginebay
