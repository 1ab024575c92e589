// The activations of gated layers, in fp32.
#ifndef ENGINEBAY_CUDA_ACTIVATION_CUH
#define ENGINEBAY_CUDA_ACTIVATION_CUH

#include "enginebay/elementwise.h"

namespace enginebay::cuda {

__device__ __forceinline__ float activate(eb_activation activation, float x) {
  switch (activation) {
    case EB_SILU:
      return x / (1.f + __expf(-x));
    case EB_GELU:
      return 0.5f * x * (1.f + erff(x * 0.70710678f));
    case EB_GELU_TANH:
      return 0.5f * x * (1.f + tanhf(0.79788456f * (x + 0.044715f * x * x * x)));
    case EB_RELU:
      return x < 0.f ? 0.f : x;  // keeps NaN
    default:
      return x < 0.f ? 0.f : x * x;
  }
}

// A gate and its up; clamp 0: none (moe.h).
struct Gate {
  eb_activation activation;
  float clamp, clamp_alpha;
  __device__ __forceinline__ float operator()(float gate, float up) const {
    if (clamp <= 0.f) return activate(activation, gate) * up;
    gate = gate > clamp ? clamp : gate;
    up = up > clamp ? clamp : up < -clamp ? -clamp : up;
    return (up + 1.f) * gate / (1.f + __expf(-clamp_alpha * gate));
  }
};

}  // namespace enginebay::cuda

#endif
