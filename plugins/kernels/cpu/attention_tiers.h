// A cache of several pools: blocks that were moved to narrower elements stay in their sequences' tables.
#ifndef ENGINEBAY_ATTENTION_TIERS_H
#define ENGINEBAY_ATTENTION_TIERS_H

#include "attention_rows.h"
#include "simd_common.h"

namespace enginebay {
namespace {

// Every row says which pool it is in.
template <>
class TileRows<Tiered> {
 public:
  int first, count;

  void locate(const AttentionCall& call, int sequence, int first_head, int64_t start, int from, int to) {
    const eb_paged_attention_desc& desc = *call.desc;
    const int32_t* table = call.args->block_table + int64_t{sequence} * desc.table_width;
    first = from, count = to, first_head_ = first_head, scales_ = call.tier_scales;
    for (int j = from; j < to; ++j) {
      const int32_t block = table[(start + j) / desc.block_size];
      const CachePool* pool = call.pools;
      while (block >= pool->end_block) ++pool;
      pools_[j] = pool;
      keys_[j] = pool->base + (block - pool->first_block) * pool->block_stride +
                 (start + j) % desc.block_size * pool->token_stride + first_head * pool->row_bytes;
    }
  }

  const char* key(int j, int head) const { return keys_[j] + head * pools_[j]->row_bytes; }
  const char* value(int j, int head) const { return key(j, head) + pools_[j]->value_offset; }
  int64_t row_bytes(int j) const { return pools_[j]->row_bytes; }
  template <class V>
  void expand(int j, int head, bool values, int dim, float* to) const {
    const void* row = values ? value(j, head) : key(j, head);
    switch (pools_[j]->dtype) {
      case EB_F16:
        return expand_row<V>(static_cast<const Fp16*>(row), dim, to);
      case EB_BF16:
        return expand_row<V>(static_cast<const Bf16*>(row), dim, to);
      case EB_I4:
        return expand_row<V>(static_cast<const Int4*>(row), dim, to);
      case EB_I8:
        expand_row<V>(static_cast<const Int8*>(row), dim, to);
        return scale_row<V>(values ? scales_.values : scales_.keys, head, dim, to);
      default:
        return expand_row<V>(static_cast<const float*>(row), dim, to);
    }
  }

 private:
  template <class V>
  void scale_row(const float* scales, int head, int dim, float* to) const {
    if (scales == nullptr) return;
    scales += (first_head_ + head) * scales_.head_stride;
    for (int d = 0; d < dim; d += V::kWidth) {
      const auto scale = scales_.step > 0 ? load_first<V>(scales + d, dim - d) : V::set1(*scales);
      V::store(to + d, V::mul(V::load(to + d), scale));
    }
  }

  const char* keys_[kTile];
  const CachePool* pools_[kTile];
  CacheScales scales_;
  int first_head_;
};

}  // namespace
}  // namespace enginebay
#endif
