// PagedAttention on CUDA: what its kernels share.
//
// One step is two launches. `prepare` norms and rotates, writes keys and values into the cache and queries
// into the workspace; one more block of it plans: ragged lengths, read on the device, become lists of work
// items, so that a captured graph replays right whatever the lengths have become. Then `split` runs sequences
// with few new tokens (decode, verification), several blocks sharing one sequence's keys; `prefill` the
// others, a block a tile of queries.
#ifndef ENGINEBAY_CUDA_ATTENTION_CUH
#define ENGINEBAY_CUDA_ATTENTION_CUH

#include <cuda_fp8.h>

#include "device.cuh"
#include "enginebay/paged_attention.h"

namespace enginebay::cuda::attention {

constexpr int kSplitRows = 16;   // rows of a tile: (query, head of the group) pairs
constexpr int kSplitLimit = 64;  // sequences with more rows go to `prefill`
constexpr int kLeastPrefillRows = 64;
constexpr int kKeysAtLeast = 256;  // keys of a split, where there are as many
constexpr int kKeysAlone = 1024;   // up to here an item has its slot for itself
constexpr int kRounds = 2;         // items a slot takes otherwise
constexpr int kMostBlocks = 4;     // of `split` on a multiprocessor

struct Item {
  int sequence, row;       // first row of the tile
  int key_begin, key_end;  // what the item reads
  int splits, split;       // of how many, which
  int slot;                // its place among the partial results; -1: it writes the answer
  int counter;             // shared by the splits of a tile
};

// n / divisor for n below 2^31, without a division.
struct Divider {
  uint32_t divisor, multiplier, shift;
  Divider() = default;
  __host__ explicit Divider(int by) : divisor(static_cast<uint32_t>(by)), shift(0) {
    while ((uint64_t{1} << shift) < divisor) ++shift;
    multiplier =
        static_cast<uint32_t>((uint64_t{1} << 32) * ((uint64_t{1} << shift) - divisor) / divisor + 1);
  }
  __device__ __forceinline__ int quotient(int n) const {
    return static_cast<int>((__umulhi(static_cast<uint32_t>(n), multiplier) + static_cast<uint32_t>(n)) >>
                            shift);
  }
};

struct Counts {
  int split_items, prefill_items;
};

// Everything a kernel reads, by value.
struct Step {
  eb_paged_attention_desc d;
  eb_paged_attention_args a;
  int group;  // Hq / Hkv
  Divider by_group, by_block;
  int prefill_rows;  // of a tile of `prefill`
  int slots;         // thread blocks of `split` that run at a time
  // In the workspace:
  void* queries;  // [T, Hq, D], rotated
  Counts* counts;
  Item* split_items;
  Item* prefill_items;
  int* counters;   // [split tiles, Hkv]
  float* partial;  // [slots, Hkv, kSplitRows, D + 2]: unnormalised sums, then maximum and total
};

// Where the workspace holds what, in bytes.
struct Workspace {
  size_t queries, counts, split_items, prefill_items, counters, partial, total;

  Workspace(const eb_paged_attention_desc& d, int64_t tokens, int64_t sequences, int slots) {
    const auto round = [](size_t v) { return (v + 255) / 256 * 256; };
    const size_t group = static_cast<size_t>(d.num_heads / d.num_kv_heads),
                 b = static_cast<size_t>(sequences);
    const size_t t = static_cast<size_t>(tokens), heads = static_cast<size_t>(d.num_kv_heads);
    const size_t work = static_cast<size_t>(slots) * kRounds / heads + 1;
    const size_t tiles = t * group / kSplitRows + b;
    queries = 0;
    counts = round(t * static_cast<size_t>(d.num_heads) * static_cast<size_t>(d.head_dim) * 2);
    split_items = counts + 256;
    prefill_items = split_items + round((work + tiles) * sizeof(Item));
    counters = prefill_items + round((t * group / kLeastPrefillRows + b + 1) * sizeof(Item));
    partial = counters + round(tiles * heads * sizeof(int));
    total = partial +
            round(2 * work * heads * kSplitRows * (static_cast<size_t>(d.head_dim) + 2) * sizeof(float));
  }
};

__device__ __forceinline__ bool valid_lengths(const Step& s, int query_length, int kv_length) {
  return query_length > 0 && kv_length >= query_length &&
         kv_length <= int64_t{s.d.table_width} * s.d.block_size;
}

// The keys any of the queries [first, last] of a sequence sees.
__device__ __forceinline__ int2 visible_keys(const Step& s, int query_length, int kv_length, int first,
                                             int last) {
  const int past = kv_length - query_length;
  const bool tree = s.a.tree_mask != nullptr;
  int begin = 0;
  const int end = s.d.causal && !tree ? past + last + 1 : kv_length;
  if (s.d.window > 0) {
    // A tree's positions are not slots: its deepest token may stand right after the past.
    const int position = tree ? past : past + first;
    begin = max(0, position - s.d.window + 1);
  }
  return make_int2(begin, end);
}

// A cache row (one head of one key) by number: values lie block_size * Hkv rows after their keys. kNoRow: an
// unknown block.
constexpr uint32_t kNoRow = ~0u;
__device__ __forceinline__ uint32_t key_row(const Step& s, int block, int key, int kv_head) {
  if (block < 0 || block >= s.d.num_blocks) return kNoRow;
  const int offset = key - s.by_block.quotient(key) * s.d.block_size;
  return (static_cast<uint32_t>(block) * 2 * s.d.block_size + offset) * s.d.num_kv_heads + kv_head;
}

// What a query sees: keys [begin, end), and with a tree those of its own chunk that its bits name.
struct Sight {
  int begin, end;
  __device__ __forceinline__ Sight(const Step& s, int first_token, int query_length, int kv_length,
                                   int query) {
    const bool tree = s.a.tree_mask != nullptr;
    const int slot = kv_length - query_length + query,
              position = tree ? s.a.position_ids[first_token + query] : slot;
    begin = s.d.window > 0 ? max(0, position - s.d.window + 1) : 0;
    end = s.d.causal && !tree ? slot + 1 : kv_length;
  }
  __device__ __forceinline__ bool sees(int key) const { return key >= begin && key < end; }
};

// Whether a query of a tree sees a key of its chunk; keys before the chunk are Sight's matter.
__device__ __forceinline__ bool tree_sees(const Step& s, int first_token, int query, int past, int key) {
  const int j = key - past;
  if (j >= s.a.tree_words * 32) return false;
  const uint32_t word = s.a.tree_mask[int64_t{first_token + query} * s.a.tree_words + j / 32];
  if ((word >> (j % 32) & 1) == 0) return false;
  return s.d.window == 0 ||
         s.a.position_ids[first_token + query] - s.a.position_ids[first_token + j] < s.d.window;
}

// Raw score (q.k) to the exponent of 2 that softmax takes.
struct ScoreScale {
  float scale, cap;
  __device__ __forceinline__ explicit ScoreScale(const eb_paged_attention_desc& d, float key_scale) {
    constexpr float kLog2e = 1.4426950408889634f;
    cap = d.softcap > 0.f ? d.softcap * kLog2e : 0.f;
    scale = d.scale * key_scale * (d.softcap > 0.f ? 1.f / d.softcap : kLog2e);
  }
  // tanh, to about 1e-7 of its range.
  static __device__ __forceinline__ float bounded(float v) {
    return 1.f - __fdividef(2.f, fast_exp2(v * 2.885390081777927f) + 1.f);
  }

  // Of Count scores of rows that alternate in pairs; row_factor undoes what stage_query did.
  template <int Count>
  __device__ __forceinline__ void apply(float (&scores)[Count][4], const float (&row_factor)[2]) const {
    const float f[2] = {scale * row_factor[0], scale * row_factor[1]};
#pragma unroll
    for (int n = 0; n < Count; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[n][i] *= f[i / 2];
    if (cap > 0.f)
#pragma unroll
      for (int n = 0; n < Count; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[n][i] = cap * bounded(scores[n][i]);
  }
};

// The dtype of the matrix products: 8-bit caches are converted to half.
template <typename Io, typename Cache>
using MmaType = std::conditional_t<sizeof(Cache) == 2, Io, half>;

// Masks scores of keys [key0, key0 + 8*Count) for the two rows of a lane.
template <int Count>
__device__ __forceinline__ void mask_scores(const Step& s, float (&scores)[Count][4], const Sight (&sight)[2],
                                            const int (&query)[2], int first_token, int past, int key0,
                                            int key_end) {
  const int key_of_lane = key0 + static_cast<int>(threadIdx.x % 4) * 2;
  const bool tree = s.a.tree_mask != nullptr;
#pragma unroll
  for (int n = 0; n < Count; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = key_of_lane + n * 8 + i % 2;
      bool seen = key < key_end;
      if (tree && key >= past)
        seen = seen && tree_sees(s, first_token, query[i / 2], past, key);
      else
        seen = seen && sight[i / 2].sees(key);
      if (!seen) scores[n][i] = -INFINITY;
    }
}

// Entry points of one instance, found by paged_attention.cu through a table.
struct Instance {
  eb_dtype io, cache;
  int head_dim;
  int (*split_blocks)(const Device& device);  // of `split` that a multiprocessor holds
  int (*prefill_rows)(const Device& device);
  eb_status (*run)(const eb_context* context, const Device& device, const Step& step, bool all_split);
};

}  // namespace enginebay::cuda::attention

#endif
