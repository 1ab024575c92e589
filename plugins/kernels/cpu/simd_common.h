// What every vector width shares: element types, loads of any element type, exponential and tanh.
//
// Everything here has internal linkage. A kernel template is compiled once per instruction set; were its code
// shared between files, the linker could keep the AVX-512 copy for a machine that has none.
#ifndef ENGINEBAY_SIMD_COMMON_H
#define ENGINEBAY_SIMD_COMMON_H

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "float16.h"

namespace enginebay {
namespace {

struct Fp16 {
  uint16_t bits;
};
struct Bf16 {
  uint16_t bits;
};

struct F8E4M3 {
  uint8_t bits;
};
struct Int8 {
  int8_t code;
};

// A byte of an INT4 row: codes, then scales and minimums (paged_attention.h).
struct Int4 {
  uint8_t bits;
};
constexpr int kInt4Group = 32;

inline float to_float(float value) { return value; }
inline float to_float(Fp16 value) { return fp16_to_float(value.bits); }
inline float to_float(Bf16 value) { return bf16_to_float(value.bits); }
inline float to_float(F8E4M3 value) { return f8e4m3_to_float(value.bits); }
inline float to_float(Int8 value) { return value.code; }
inline void from_float(float value, float* to) { *to = value; }
inline void from_float(float value, Fp16* to) { to->bits = float_to_fp16(value); }
inline void from_float(float value, Bf16* to) { to->bits = float_to_bf16(value); }
inline void from_float(float value, F8E4M3* to) { to->bits = float_to_f8e4m3(value); }
// To the nearest, ties to even; NaN to 0.
inline void from_float(float value, Int8* to) {
  const float bounded = value > 127.0f ? 127.0f : value < -127.0f ? -127.0f : value == value ? value : 0.0f;
  to->code = static_cast<int8_t>(__builtin_rintf(bounded));
}

// The first `count` values of a vector, zeros after them; count may exceed the width.
template <class V, class T>
inline typename V::F load_first(const T* from, int count) {
  if (count >= V::kWidth) return V::load(from);
  T padded[V::kWidth] = {};
  std::memcpy(padded, from, static_cast<size_t>(count) * sizeof(T));
  return V::load(padded);
}

// Values d.. of a row of `dim`; kPartial: the row ends within the vector, zeros follow.
template <class V, bool kPartial, class T>
inline typename V::F load_row(const T* row, int d, int dim) {
  if constexpr (kPartial) return load_first<V>(row + d, dim - d);
  return V::load(row + d);
}

// A whole row, to floats with room for whole vectors.
template <class V, class T>
inline void expand_row(const T* row, int dim, float* to) {
  for (int d = 0; d < dim; d += V::kWidth) V::store(to + d, load_first<V>(row + d, dim - d));
}
template <class V>
inline void expand_row(const Int4* row, int dim, float* to) {
  const uint8_t *codes = &row->bits, *factors = codes + dim / 2;
  for (int d = 0; d < dim; d += kInt4Group, codes += kInt4Group / 2, factors += 4) {
    V::expand_int4(codes, factors, to + d);
  }
}
// `offsets` are added where a scale's sign bit says that they were taken off.
template <class V>
inline void expand_row(const Int4* row, int dim, const float* offsets, float* to) {
  const uint8_t *codes = &row->bits, *factors = codes + dim / 2;
  for (int d = 0; d < dim; d += kInt4Group, codes += kInt4Group / 2, factors += 4) {
    uint8_t plain[4] = {factors[0], static_cast<uint8_t>(factors[1] & 0x7f), factors[2], factors[3]};
    V::expand_int4(codes, plain, to + d);
    if (plain[1] == factors[1]) continue;
    for (int i = d; i < d + kInt4Group; i += V::kWidth) {
      V::store(to + i, V::add(V::load(to + i), V::load(offsets + i)));
    }
  }
}

template <class V>
inline void store_first(float* to, typename V::F value, int count) {
  if (count >= V::kWidth) return V::store(to, value);
  float padded[V::kWidth];
  V::store(padded, value);
  std::memcpy(to, padded, static_cast<size_t>(count) * sizeof(float));
}

// e^x to 2 units in the last place: exactly 1 at 0, 0 below -87.3, the largest finite power above 88.37, NaN
// for NaN. e^x = 2^n * e^r with |r| <= ln(2)/2; the polynomial is a Chebyshev fit of (e^r - 1 - r)/r^2.
template <class V>
inline typename V::F exponential(typename V::F x) {
  using F = typename V::F;
  constexpr float kLowest = -87.3f, kHighest = 88.37f;
  const F bounded = V::min(V::set1(kHighest), V::max(V::set1(kLowest), x));
  const F n = V::round(V::mul(bounded, V::set1(1.44269504f)));
  F r = V::fma(n, V::set1(-0.693359375f), bounded);
  r = V::fma(n, V::set1(2.12194440e-4f), r);
  F p = V::set1(1.393365208e-3f);
  p = V::fma(p, r, V::set1(8.363181725e-3f));
  p = V::fma(p, r, V::set1(4.166646674e-2f));
  p = V::fma(p, r, V::set1(1.666657627e-1f));
  p = V::fma(p, r, V::set1(0.5f));
  p = V::fma(p, V::mul(r, r), r);
  return V::zero_below(V::scale(V::add(p, V::set1(1.0f)), n), x, V::set1(kLowest));
}

// tanh(x) = 1 - 2/(e^2x + 1): absolute error near 1e-7.
template <class V>
inline typename V::F hyperbolic_tangent(typename V::F x) {
  const auto one = V::set1(1.0f);
  const auto power = exponential<V>(V::add(x, x));
  return V::sub(one, V::div(V::set1(2.0f), V::add(power, one)));
}

}  // namespace
}  // namespace enginebay
#endif
