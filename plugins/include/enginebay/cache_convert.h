/* CacheConvert: copies blocks of a paged cache into a pool of narrower elements (plugins/ops.py). */
#ifndef ENGINEBAY_CACHE_CONVERT_H
#define ENGINEBAY_CACHE_CONVERT_H

#include "abi.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Pools are as PagedAttention's caches (paged_attention.h): [blocks, 2, block_size, Hkv, row], keys then
 * values, row head_dim elements or the bytes of an INT4 row. */
typedef struct eb_cache_convert_desc {
  int32_t num_kv_heads, head_dim, block_size;
  int32_t source_blocks, destination_blocks;
  eb_dtype source_dtype;      /* EB_F32, EB_F16, EB_BF16, or EB_I8 where the destination is EB_I4 */
  eb_dtype destination_dtype; /* EB_I8 or EB_I4 */
  int32_t cache_scale_dim;    /* head_dim, or 0 or 1: a scale a head */
} eb_cache_convert_desc;

/* pairs [count, 2]: a block of the source and the one of the destination that it becomes; destinations differ
 * from each other, and the pools do not overlap. cache_scales [2, Hkv, cache_scale_dim] are those of the int8
 * pool, whichever of the two it is (NULL: 1); NULL where there is none. Elements are rounded as
 * PagedAttention writes them. Pointers are aligned to their elements. Nothing is written where anything is
 * refused. */
EB_API eb_status eb_cache_convert(const eb_context* context, const eb_cache_convert_desc* desc,
                                  const void* source, void* destination, const int32_t* pairs, int64_t count,
                                  const float* cache_scales);

#ifdef __cplusplus
}
#endif
#endif
