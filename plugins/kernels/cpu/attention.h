// PagedAttention on the CPU: what its files share.
//
//   attention_check.cc   refuses what is wrong before anything is written
//   attention_plan.cc    cuts a step into tiles of query rows
//   attention_kernel.h   the arithmetic, once for every vector width
//   attention.cc         runs the tiles on the caller's threads
//
// A row's answer never depends on its company. Keys are visited in tiles of kTile cache positions, and tiles
// in splits of kSplit, both aligned to absolute positions. Within a split the softmax is online; the splits
// of a row are then merged from the first to the last. Masked positions, and tiles and splits that a row does
// not see, change no bit. So the plan may cut queries and splits as the load asks.
#ifndef ENGINEBAY_ATTENTION_H
#define ENGINEBAY_ATTENTION_H

#include "cpu_features.h"
#include "enginebay/paged_attention.h"

namespace enginebay {

constexpr int kTile = 64;      // cache positions
constexpr int kSplit = 512;    // cache positions
constexpr int kTileRows = 64;  // query rows (tokens times heads of a group) of a tile, at least one token
constexpr int kMaxHeadDim = 640;

// Sizes derived from a descriptor.
struct AttentionShape {
  int group;             // query heads of a key head
  int padded_dim;        // head_dim rounded up to kDimMultiple
  int qkv_width;         // floats of a row of qkv
  int tile_tokens;       // query tokens of a tile
  int value_dim;         // elements of a value
  int rotary_offset;     // of the first element RoPE turns
  int64_t row_elements;  // elements of a cached key or value of one head
  int64_t token_stride;  // elements between two cache positions of a block
  int64_t value_offset;  // elements from a block's keys to its values; 0: values are the keys' first elements
  int64_t block_stride;  // elements between two blocks
};
constexpr int kDimMultiple = 16;

// The scales of a quantised cache: `head_stride` apart, each `step` of them (1: a channel, 0: the whole
// head).
struct CacheScales {
  const float* keys;  // null: the cache has none
  const float* values;
  int64_t head_stride;
  int step;
};
CacheScales cache_scales_of(const float* scales, int heads, int64_t channels);
eb_status check_scale_values(const eb_context* context, const char* op, const float* scales, int heads,
                             int parts, int64_t channels);
CacheScales cache_scales(const eb_paged_attention_desc& desc, const eb_paged_attention_args& args);

AttentionShape attention_shape(const eb_paged_attention_desc& desc);
eb_status check_attention_desc(const eb_context* context, const eb_paged_attention_desc* desc);
eb_status check_attention_lengths(const eb_context* context, const eb_paged_attention_desc& desc,
                                  int64_t tokens, int64_t sequences, const int32_t* query_start,
                                  const int32_t* kv_len);
eb_status check_attention_args(const eb_context* context, const eb_paged_attention_desc& desc,
                               const eb_paged_attention_args& args);

// The plan, a flat int32 array: header, then tiles, then items, the costliest first.
struct PlanHeader {
  int32_t magic, tokens, sequences, tiles, items;
  int32_t part_tokens;  // tokens of all parts
};
// Some consecutive tokens of one sequence.
struct PlanTile {
  int32_t sequence, first_token, tokens;
  int32_t first_split, end_split;  // those that any of its rows sees
  int32_t part_token;  // where its first part lies, in tokens of a workspace of parts; -1: one item does all
};
struct PlanItem {
  int32_t tile, first_split, end_split;
};

struct Plan {
  const PlanHeader* header;
  const PlanTile* tiles;
  const PlanItem* items;
};

// Upper bounds for a step of this many tokens.
struct PlanBounds {
  int64_t tiles, items, part_tokens, plan_ints;
};
PlanBounds plan_bounds(const eb_context* context, const eb_paged_attention_desc& desc, int64_t tokens,
                       int64_t sequences);
// Reads a plan back; EB_INVALID_ARGUMENT where it was made for another step.
eb_status read_plan(const eb_context* context, const eb_paged_attention_desc& desc,
                    const eb_paged_attention_args& args, const int32_t* ints, size_t count, Plan* plan);

// First cache position that the token at cache position `position` sees.
inline int64_t first_visible(const eb_paged_attention_desc& desc, int64_t position) {
  return desc.window > 0 && position >= desc.window ? position - desc.window + 1 : 0;
}

// Where the workspace's parts lie, in bytes from its start.
struct AttentionWorkspace {
  size_t queries;  // float [T, Hq, padded_dim]
  size_t scratch;  // per worker
  size_t scratch_bytes;
  size_t parts;     // float [part_tokens, Hq, padded_dim + 2]: sums, then maximum and total weight
  size_t counters;  // uint32 [tiles, Hkv]: parts done
  size_t bytes;
};
AttentionWorkspace attention_workspace(const eb_context* context, const eb_paged_attention_desc& desc,
                                       int64_t tokens, const PlanBounds& bounds);

// One pool of a tiered cache: blocks [first_block, end_block) of the block tables; strides in bytes.
struct CachePool {
  const char* base;
  eb_dtype dtype;
  int32_t first_block, end_block;
  int64_t row_bytes, token_stride, value_offset, block_stride;
};
constexpr int kMostPools = 3;
inline bool is_tiered(const eb_paged_attention_desc& desc) {
  return desc.num_blocks_int8 > 0 || desc.num_blocks_int4 > 0;
}
CachePool cache_pool(const void* base, eb_dtype dtype, int heads, int dim, int block_size);
// Refuses a pool of more bytes than an address can count: offsets into it would wrap.
eb_status check_pool_bytes(const eb_context* context, const char* op, const char* pool, int64_t blocks,
                           int64_t block_bytes);
void cache_pools(const eb_paged_attention_desc& desc, const eb_paged_attention_args& args,
                 CachePool (&pools)[kMostPools]);

// Everything a kernel reads.
struct AttentionCall {
  const eb_paged_attention_desc* desc;
  const eb_paged_attention_args* args;
  AttentionShape shape;
  CacheScales scales;       // of the cache that is written; those of a tiered one are none
  CacheScales tier_scales;  // of the int8 pool of a tiered cache
  CacheScales offsets;      // of an INT4 cache, a channel each
  CachePool pools[kMostPools];
  float* queries;
  float* parts;
};

// What CacheConvert's kernels read.
struct CacheConversion {
  CachePool source, destination;
  char* written;  // the destination
  int heads, dim, block_size;
  CacheScales scales;  // of the int8 pool among the two
};

// What a thread does at a time: splits [first_split, end_split) of one tile, for some key heads.
struct AttentionJob {
  const PlanTile* tile;
  int first_head, heads, first_split, end_split;
};

// One instruction set's code.
struct AttentionKernels {
  // Norm, RoPE and cache write of tokens [first, last); queries come out scaled, in call.queries.
  void (*prepare)(const AttentionCall& call, int64_t first, int64_t last);
  // A job: into its tile's parts, or, where the tile has none, into the output. `following` is what comes
  // next on this thread, probably; null: nothing. `scratch` holds attention_scratch_floats(shape).
  void (*attend)(const AttentionCall& call, const AttentionJob& job, const AttentionJob* following,
                 float* scratch);
  // Merges the parts of a tile and key head into the output.
  void (*merge)(const AttentionCall& call, const PlanTile& tile, int kv_head, float* scratch);
  // Block `from` of the source to block `into` of the destination.
  void (*convert)(const CacheConversion& work, int32_t from, int32_t into);
};
const AttentionKernels& attention_kernels(Isa isa);
const AttentionKernels& attention_kernels_baseline();
const AttentionKernels& attention_kernels_avx2();
const AttentionKernels& attention_kernels_avx512();

constexpr int kRowsToTranspose = 8;  // rows of a tile from which on transposed keys pay
constexpr int kHeadsTogether = 8;    // most key heads that take turns at a tile of positions

// What the heads of a job share: keys transposed, values converted.
inline int64_t attention_shared_floats(const AttentionShape& shape) {
  return int64_t{2} * kTile * shape.padded_dim;
}
// A head's own: weights, two sets of sums with maxima and totals, and a row's factors.
inline int64_t attention_own_floats(const AttentionShape& shape, int64_t rows) {
  return rows * (kTile + 2 * int64_t{shape.padded_dim} + 5);
}
inline int64_t attention_scratch_floats(const AttentionShape& shape) {
  const int64_t tile_rows = shape.tile_tokens * shape.group, turns = kHeadsTogether * (kRowsToTranspose - 1);
  return attention_shared_floats(shape) + attention_own_floats(shape, tile_rows > turns ? tile_rows : turns);
}

}  // namespace enginebay
#endif
