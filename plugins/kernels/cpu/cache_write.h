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

// 32 values on their way to codes: bounded by fp16's range, with the least and the largest.
struct Int4Span {
  float values[kInt4Group];
  float least, most;
};
// `offsets` are taken off first; null: none.
inline void int4_span(const float* from, const float* offsets, Int4Span* span) {
  constexpr float kBound = 65504.0f;
  float least = kBound, most = -kBound;
  for (int i = 0; i < kInt4Group; ++i) {
    float value = offsets == nullptr ? from[i] : from[i] - offsets[i];
    value = value < kBound ? value : kBound;
    value = value > -kBound ? value : -kBound;
    span->values[i] = value;
    least = value < least ? value : least;
    most = value > most ? value : most;
  }
  span->least = least, span->most = most;
}

// An INT4 row. Codes run from the group's least value to its largest, in 15 steps. A group that holds NaN or
// infinity becomes NaN. With `offsets`, a group may store what is left without them: see paged_attention.h.
inline void write_row(const float* from, Int4* to, int dim, const float* offsets, int) {
  constexpr int kHalf = kInt4Group / 2;
  constexpr uint16_t kMoved = 0x8000;
  for (int group = 0; group < dim / kInt4Group; ++group, from += kInt4Group) {
    Int4Span plain, moved;
    int4_span(from, nullptr, &plain);
    const Int4Span* span = &plain;
    if (offsets != nullptr) {
      int4_span(from, offsets + group * kInt4Group, &moved);
      if (moved.most - moved.least < plain.most - plain.least) span = &moved;
    }
    float finite = 0.0f;
    for (int i = 0; i < kInt4Group; ++i) finite += from[i] * 0.0f;  // NaN where from[i] is NaN or infinite
    uint16_t factors[2] = {float_to_fp16((span->most - span->least) / 15.0f),
                           float_to_fp16(span->least + finite)};
    const float scale = fp16_to_float(factors[0]), minimum = fp16_to_float(factors[1]);
    if (span == &moved) factors[0] |= kMoved;
    uint8_t codes[kInt4Group];
    for (int i = 0; i < kInt4Group; ++i) {
      const float code = scale > 0.0f ? (span->values[i] - minimum) / scale : 0.0f;
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
