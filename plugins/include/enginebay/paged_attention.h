/* PagedAttention: per-head norm, RoPE, cache write and attention over a block table (plugins/ops.py). */
#ifndef ENGINEBAY_PAGED_ATTENTION_H
#define ENGINEBAY_PAGED_ATTENTION_H

#include "abi.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct eb_paged_attention_desc {
  int32_t num_heads, num_kv_heads, head_dim;
  int32_t block_size;     /* tokens of a block */
  int32_t num_blocks;     /* blocks of the pool; an id outside is an invalid argument */
  int32_t table_width;    /* W */
  int32_t rotary_dim;     /* R; 0: no RoPE */
  int32_t rope_positions; /* P */
  int32_t rope_interleaved, causal, window;
  float scale, softcap, norm_epsilon; /* finite; scale above 0, the others 0 or more */
  eb_dtype io_dtype;                  /* of qkv and attention */
  eb_dtype cache_dtype;
  int32_t latent_dim;      /* C; 0: none. Else multi-head latent attention, see below */
  int32_t cache_scale_dim; /* scales a head has in cache_scales: head_dim, or 0 or 1 for a single one */
  /* Blocks of cache_int8 and cache_int4; 0: no such pool. See eb_paged_attention_args. */
  int32_t num_blocks_int8, num_blocks_int4;
} eb_paged_attention_desc;

/* Latent attention: num_kv_heads is 1, head_dim C + R with R = rotary_dim; every head attends to one cached
 * vector a token, RoPE turns the last R elements of queries and of that vector, and its first C are the
 * value: qkv [T, (Hq+1)*(C+R)], cache [blocks, block_size, C+R], attention [T, Hq*C]; no q_norm, no k_norm.
 */

/* INT4 caches: the D elements of a row, one head's key or value of a token, are eb_int4_cache_row_bytes(D)
 * bytes; D is a multiple of 32. 16 bytes for every 32 values: value i in the low half of byte i, value i + 16
 * in the high half. Then a scale and a minimum for every 32 values, fp16: value = scale*code + minimum. Codes
 * run from the least value to the largest, both bounded to +-65504 first; 32 values of which one is NaN or
 * infinite are stored as NaN. With cache_offsets, where a scale's sign bit is set, the 32 offsets were taken
 * off before and are added when read: of the two ways the one whose values span less.
 */
#define EB_INT4_CACHE_GROUP 32
static inline int32_t eb_int4_cache_row_bytes(int32_t head_dim) {
  return head_dim / 2 + 4 * (head_dim / EB_INT4_CACHE_GROUP);
}

typedef struct eb_paged_attention_args {
  int64_t tokens;              /* T */
  int64_t sequences;           /* B */
  const void* qkv;             /* [T, (Hq+2*Hkv)*D] */
  void* cache;                 /* [blocks, 2, block_size, Hkv, D], written in place */
  const int32_t* query_start;  /* [B+1]; rows from query_start[B] on are padding and come out as zeros */
  const int32_t* kv_len;       /* [B]; 0: a padding sequence */
  const int32_t* block_table;  /* [B, W] */
  const int32_t* slot_mapping; /* [T]; block*block_size + offset; -1 writes nothing */
  const int32_t* position_ids; /* [T] */
  const float* rope_cos;       /* [P, R/2] or NULL */
  const float* rope_sin;
  const float* q_norm; /* [D] or NULL */
  const float* k_norm;
  const float* sinks; /* [Hq] or NULL */
  void* attention;    /* [T, Hq*D] */
  /* Of 8-bit caches: [2, Hkv, cache_scale_dim], keys then values; a latent cache has one set, [1, 1, dim].
   * NULL: 1. Must be NULL for wider caches. Stored is value/scale to the nearest (ties to even), at most
   * +-127 as int8 and +-448 as E4M3, infinities included. NaN is NaN in E4M3 and 0 as int8, which has
   * none. Scales are positive and finite. */
  const float* cache_scales;
  /* [T, tree_words]: bit j of token t's words says that it sees token j of its own sequence's chunk (itself
   * included); what was cached before it sees whole, and windows count position_ids. NULL: causal as the desc
   * says. */
  const uint32_t* tree_mask;
  int32_t tree_words;
  /* Colder pools of a float cache, read only: [num_blocks_int8, 2, block_size, Hkv, D], which cache_scales
   * then belong to, and [num_blocks_int4, 2, block_size, Hkv, eb_int4_cache_row_bytes(D)]. Block ids of the
   * table count on from num_blocks through cache_int8, then cache_int4; slots lie in the first pool. */
  const void* cache_int8;
  const void* cache_int4;
  /* Of an INT4 cache that is written: [2, Hkv, D], what keys and values are near to. NULL: none. */
  const float* cache_offsets;
} eb_paged_attention_args;

/* Ints of the plan and bytes of workspace for this step (host pointers to query_start and kv_len). */
EB_API eb_status eb_paged_attention_plan_size(const eb_context* context, const eb_paged_attention_desc* desc,
                                              int64_t tokens, int64_t sequences, size_t* plan_ints,
                                              size_t* workspace_bytes);
EB_API eb_status eb_paged_attention_plan(const eb_context* context, const eb_paged_attention_desc* desc,
                                         int64_t tokens, int64_t sequences, const int32_t* query_start,
                                         const int32_t* kv_len, int32_t* plan, size_t plan_ints);
EB_API eb_status eb_paged_attention_run(const eb_context* context, const eb_paged_attention_desc* desc,
                                        const eb_paged_attention_args* args, const int32_t* plan,
                                        size_t plan_ints, void* workspace, size_t workspace_bytes);

#ifdef __cplusplus
}
#endif
#endif
