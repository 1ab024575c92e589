// The row-wise ops of one instruction set.
#ifndef ENGINEBAY_ELEMENTWISE_KERNELS_H
#define ENGINEBAY_ELEMENTWISE_KERNELS_H

#include "enginebay/elementwise.h"

namespace enginebay {

struct ElementwiseKernels {
  // One row. residual and sum may be null.
  void (*add_rms_norm)(int width, float epsilon, const float* x, const float* residual, const float* weight,
                       float* y, float* sum);
  void (*gated_activation)(eb_activation activation, int width, const float* gate, const float* up, float* y);
};
const ElementwiseKernels& elementwise_kernels_baseline();
const ElementwiseKernels& elementwise_kernels_avx2();
const ElementwiseKernels& elementwise_kernels_avx512();

}  // namespace enginebay
#endif
