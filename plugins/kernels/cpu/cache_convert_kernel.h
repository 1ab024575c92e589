// One block of CacheConvert, for one vector type.
#ifndef ENGINEBAY_CACHE_CONVERT_KERNEL_H
#define ENGINEBAY_CACHE_CONVERT_KERNEL_H

#include "attention.h"
#include "cache_read.h"
#include "cache_write.h"

namespace enginebay {
namespace {

template <class V>
void convert_block(const CacheConversion& work, int32_t from, int32_t into) {
  const CachePool &source = work.source, &destination = work.destination;
  const bool to_int8 = destination.dtype == EB_I8;
  const int64_t rows = int64_t{work.block_size} * work.heads;
  float values[kMaxHeadDim + kDimMultiple];
  for (int part = 0; part < 2; ++part) {
    const float* const all = part == 0 ? work.scales.keys : work.scales.values;
    const char* read = source.base + from * source.block_stride + part * source.value_offset;
    char* write = work.written + into * destination.block_stride + part * destination.value_offset;
    for (int64_t row = 0; row < rows; ++row, read += source.row_bytes, write += destination.row_bytes) {
      const float* const scales = scales_of(all, work.scales, row % work.heads);
      read_row<V>(source.dtype, read, scales, work.scales.step, work.dim, values);
      if (to_int8) {
        write_row(values, reinterpret_cast<Int8*>(write), work.dim, scales, work.scales.step);
      } else {
        write_row(values, reinterpret_cast<Int4*>(write), work.dim, nullptr, 0);
      }
    }
  }
}

}  // namespace
}  // namespace enginebay
#endif
