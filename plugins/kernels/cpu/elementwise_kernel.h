// The arithmetic of the row-wise ops for one vector type V (simd_*.h).
#ifndef ENGINEBAY_ELEMENTWISE_KERNEL_H
#define ENGINEBAY_ELEMENTWISE_KERNEL_H

#include <cmath>

#include "elementwise_kernels.h"
#include "simd_common.h"

namespace enginebay {
namespace {

// x / (1 + e^-x)
template <class V>
inline typename V::F silu(typename V::F x) {
  return V::div(x, V::add(V::set1(1.0f), exponential<V>(V::sub(V::zero(), x))));
}

// 0.5*x*(1 + tanh(u)) = x / (1 + e^-2u), u = sqrt(2/pi)*(x + 0.044715*x^3)
template <class V>
inline typename V::F gelu_tanh(typename V::F x) {
  const auto cube = V::mul(V::mul(x, x), x);
  const auto minus_2u = V::mul(V::set1(-1.59576912f), V::fma(V::set1(0.044715f), cube, x));
  return V::div(x, V::add(V::set1(1.0f), exponential<V>(minus_2u)));
}

// 0.5*x*(1 + erf(x/sqrt(2))) = max(x, 0) - 0.5*|x|*erfc(z), z = |x|/sqrt(2). With t = 1/(1 + z/2),
// erfc(z)*e^(z^2)/t is a polynomial in t, a Chebyshev fit: relative error 3e-7 for z up to 9.5.
template <class V>
inline typename V::F gelu(typename V::F x) {
  const auto one = V::set1(1.0f);
  const auto magnitude = V::max(V::sub(V::zero(), x), x);
  const auto z = V::mul(magnitude, V::set1(0.707106781f));
  const auto t = V::div(one, V::fma(V::set1(0.5f), z, one));
  constexpr float kFit[] = {2.894461155e-01f, -4.968295693e-01f, 2.885151505e-01f, -3.339901939e-02f,
                            2.053604275e-01f, 2.424793839e-01f,  2.824538350e-01f, 2.820823491e-01f};
  auto p = V::set1(-6.010870636e-02f);
  for (const float coefficient : kFit) p = V::fma(p, t, V::set1(coefficient));
  const auto tail = V::mul(V::mul(p, t), exponential<V>(V::sub(V::zero(), V::mul(z, z))));  // erfc(z)
  const auto half = V::mul(V::set1(0.5f), magnitude);
  const auto positive = V::max(V::zero(), x);
  return V::sub(positive, V::mul(half, tail));
}

template <class V>
struct ElementwiseEntry {
  static void add_rms_norm(int width, float epsilon, const float* x, const float* residual,
                           const float* weight, float* y, float* sum) {
    constexpr int W = V::kWidth;
    const auto total = [&](int d) {
      const auto value = load_first<V>(x + d, width - d);
      return residual == nullptr ? value : V::add(value, load_first<V>(residual + d, width - d));
    };
    // Four chains hide the latency of the addition.
    typename V::F squares[4] = {V::zero(), V::zero(), V::zero(), V::zero()};
    for (int d = 0, chain = 0; d < width; d += W, chain = (chain + 1) % 4) {
      const auto value = total(d);
      squares[chain] = V::fma(value, value, squares[chain]);
    }
    const auto all = V::add(V::add(squares[0], squares[1]), V::add(squares[2], squares[3]));
    const auto factor = V::set1(1.0f / std::sqrt(V::sum(all) / static_cast<float>(width) + epsilon));
    for (int d = 0; d < width; d += W) {
      const auto value = total(d);
      if (sum != nullptr) store_first<V>(sum + d, value, width - d);
      store_first<V>(y + d, V::mul(V::mul(value, factor), load_first<V>(weight + d, width - d)), width - d);
    }
  }

  template <class Activation>
  static void gate_row(int width, const float* gate, const float* up, float* y, Activation activation) {
    for (int d = 0; d < width; d += V::kWidth) {
      const auto gated = activation(load_first<V>(gate + d, width - d));
      store_first<V>(y + d, V::mul(gated, load_first<V>(up + d, width - d)), width - d);
    }
  }

  static void gated_activation(eb_activation activation, int width, const float* gate, const float* up,
                               float* y) {
    using F = typename V::F;
    switch (activation) {
      case EB_SILU:
        return gate_row(width, gate, up, y, [](F x) { return silu<V>(x); });
      case EB_GELU:
        return gate_row(width, gate, up, y, [](F x) { return gelu<V>(x); });
      case EB_GELU_TANH:
        return gate_row(width, gate, up, y, [](F x) { return gelu_tanh<V>(x); });
      case EB_RELU:
        return gate_row(width, gate, up, y, [](F x) { return V::max(V::zero(), x); });
      case EB_RELU2:
        return gate_row(width, gate, up, y, [](F x) {
          const F positive = V::max(V::zero(), x);
          return V::mul(positive, positive);
        });
    }
  }

  static constexpr ElementwiseKernels kTable = {add_rms_norm, gated_activation};
};

}  // namespace
}  // namespace enginebay
#endif
