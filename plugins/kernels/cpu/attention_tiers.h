// A cache of several pools: blocks that were moved to narrower elements stay in their sequences' tables.
#ifndef ENGINEBAY_ATTENTION_TIERS_H
#define ENGINEBAY_ATTENTION_TIERS_H

#include "attention_rows.h"
#include "cache_read.h"

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
    const float* const scales =
        scales_of(values ? scales_.values : scales_.keys, scales_, first_head_ + head);
    read_row<V>(pools_[j]->dtype, values ? value(j, head) : key(j, head), scales, scales_.step, dim, to);
  }

 private:
  const char* keys_[kTile];
  const CachePool* pools_[kTile];
  CacheScales scales_;
  int first_head_;
};

}  // namespace
}  // namespace enginebay
#endif
