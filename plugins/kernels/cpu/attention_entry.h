// The kernel table of one vector type: chooses the cache element type once per call.
#ifndef ENGINEBAY_ATTENTION_ENTRY_H
#define ENGINEBAY_ATTENTION_ENTRY_H

#include "attention_kernel.h"
#include "attention_prepare.h"
#include "cache_convert_kernel.h"

namespace enginebay {
namespace {

template <class V>
struct AttentionEntry {
  static void prepare(const AttentionCall& call, int64_t first, int64_t last) {
    switch (call.desc->cache_dtype) {
      case EB_F16:
        return prepare_tokens<V, Fp16>(call, first, last);
      case EB_BF16:
        return prepare_tokens<V, Bf16>(call, first, last);
      case EB_F8E4M3:
        return prepare_tokens<V, F8E4M3>(call, first, last);
      case EB_I8:
        return prepare_tokens<V, Int8>(call, first, last);
      case EB_I4:
        return prepare_tokens<V, Int4>(call, first, last);
      default:
        return prepare_tokens<V, float>(call, first, last);
    }
  }
  static void attend(const AttentionCall& call, const AttentionJob& job, const AttentionJob* following,
                     float* scratch) {
    if (is_tiered(*call.desc)) return attend_heads<V, Tiered>(call, job, following, scratch);
    switch (call.desc->cache_dtype) {
      case EB_F16:
        return attend_heads<V, Fp16>(call, job, following, scratch);
      case EB_BF16:
        return attend_heads<V, Bf16>(call, job, following, scratch);
      case EB_F8E4M3:
        return attend_heads<V, F8E4M3>(call, job, following, scratch);
      case EB_I8:
        return attend_heads<V, Int8>(call, job, following, scratch);
      case EB_I4:
        return attend_heads<V, Int4>(call, job, following, scratch);
      default:
        return attend_heads<V, float>(call, job, following, scratch);
    }
  }
  static void merge(const AttentionCall& call, const PlanTile& tile, int kv_head, float* scratch) {
    TileAttention<V, float>(call, tile, kv_head, scratch, scratch + attention_shared_floats(call.shape))
        .merge();
  }
  static constexpr AttentionKernels kTable = {prepare, attend, merge, convert_block<V>};
};

}  // namespace
}  // namespace enginebay
#endif
