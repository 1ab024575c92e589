// Elements of a cache row of any dtype to floats.
#ifndef ENGINEBAY_CACHE_READ_H
#define ENGINEBAY_CACHE_READ_H

#include "attention.h"
#include "simd_common.h"

namespace enginebay {
namespace {

// Of key head `head`, in the order of CacheScales; null: none.
inline const float* scales_of(const float* scales, const CacheScales& all, int64_t head) {
  return scales == nullptr ? nullptr : scales + head * all.head_stride;
}

// The values of a row, to floats with room for whole vectors. `scales` are the head's, where dtype is int8.
template <class V>
inline void read_row(eb_dtype dtype, const void* row, const float* scales, int step, int dim, float* to) {
  switch (dtype) {
    case EB_F16:
      return expand_row<V>(static_cast<const Fp16*>(row), dim, to);
    case EB_BF16:
      return expand_row<V>(static_cast<const Bf16*>(row), dim, to);
    case EB_I4:
      return expand_row<V>(static_cast<const Int4*>(row), dim, to);
    case EB_I8:
      expand_row<V>(static_cast<const Int8*>(row), dim, to);
      for (int d = 0; scales != nullptr && d < dim; d += V::kWidth) {
        const auto scale = step > 0 ? load_first<V>(scales + d, dim - d) : V::set1(*scales);
        V::store(to + d, V::mul(V::load(to + d), scale));
      }
      return;
    default:
      return expand_row<V>(static_cast<const float*>(row), dim, to);
  }
}

}  // namespace
}  // namespace enginebay
#endif
