// Values of one head of a token to the elements of a cache row.
#ifndef ENGINEBAY_CACHE_WRITE_H
#define ENGINEBAY_CACHE_WRITE_H

#include "attention.h"
#include "simd_common.h"

namespace enginebay {
namespace {

// `scales` are the head's, `step` of them (CacheScales); null: none.
template <class T>
inline void write_row(const float* from, T* to, int dim, const float* scales, int step) {
  float scaled[kMaxHeadDim];
  if (scales != nullptr) {
    if (step > 0) {
      for (int d = 0; d < dim; ++d) scaled[d] = from[d] / scales[d];
    } else {
      for (int d = 0; d < dim; ++d) scaled[d] = from[d] / *scales;
    }
    from = scaled;
  }
  for (int d = 0; d < dim; ++d) from_float(from[d], to + d);
}

// An INT4 row. Codes run from the group's least value to its largest, in 15 steps; both are bounded by fp16's
// range first. A group that holds NaN or infinity becomes NaN.
inline void write_row(const float* from, Int4* to, int dim, const float*, int) {
  constexpr int kHalf = kInt4Group / 2;
  constexpr float kBound = 65504.0f;
  for (int group = 0; group < dim / kInt4Group; ++group, from += kInt4Group) {
    float values[kInt4Group], least = kBound, most = -kBound, finite = 0.0f;
    for (int i = 0; i < kInt4Group; ++i) {
      finite += from[i] * 0.0f;  // NaN where from[i] is NaN or infinite
      values[i] = from[i] < kBound ? from[i] : kBound;
      values[i] = values[i] > -kBound ? values[i] : -kBound;
      least = values[i] < least ? values[i] : least;
      most = values[i] > most ? values[i] : most;
    }
    const uint16_t factors[2] = {float_to_fp16((most - least) / 15.0f), float_to_fp16(least + finite)};
    const float scale = fp16_to_float(factors[0]), minimum = fp16_to_float(factors[1]);
    uint8_t codes[kInt4Group];
    for (int i = 0; i < kInt4Group; ++i) {
      const float code = scale > 0.0f ? (values[i] - minimum) / scale : 0.0f;
      const float bounded = code > 15.0f ? 15.0f : code > 0.0f ? code : 0.0f;
      codes[i] = static_cast<uint8_t>(__builtin_rintf(bounded));
    }
    for (int i = 0; i < kHalf; ++i) {
      to[group * kHalf + i].bits = static_cast<uint8_t>(codes[i] | codes[i + kHalf] << 4);
    }
    std::memcpy(to + dim / 2 + group * 4, factors, sizeof factors);
  }
}

}  // namespace
}  // namespace enginebay
#endif
