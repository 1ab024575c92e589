// Attention of sequences with few new tokens: bound by the bytes of the cache.
//
// A block takes an item: 16 rows of queries of one key/value head and a range of keys. Its four warps take 16
// keys in turn, each through its own ring of shared memory, so that no warp waits for another; they meet once
// at the end. Items that share a tile leave unnormalised sums, and the last of them to arrive adds all up, in
// order.
#ifndef ENGINEBAY_CUDA_ATTENTION_SPLIT_CUH
#define ENGINEBAY_CUDA_ATTENTION_SPLIT_CUH

#include "attention_tile.cuh"

namespace enginebay::cuda::attention {

constexpr int kSplitWarps = 4, kSplitThreads = kSplitWarps * 32, kSplitKeys = 16;

// Stages of a warp's ring: three hide more latency, two fit into less shared memory.
template <typename Io, typename Cache, int D, int Stages>
struct SplitShape {
  using T = Tile<Io, Cache, D>;
  static constexpr int stage = 2 * kSplitKeys * T::kKeyPitch;
  static constexpr int ring = kSplitWarps * Stages * stage;
  static constexpr int merge = kSplitWarps * kSplitRows * (D + 2) * 4;
  static constexpr int queries = kSplitRows * T::kQueryPitch + kSplitRows * 4;
  static constexpr int shared = queries + (ring > merge ? ring : merge);
  static constexpr int blocks =
      228 * 1024 / (shared + 1024) < kMostBlocks ? 228 * 1024 / (shared + 1024) : kMostBlocks;
};

// Row r of a tile's answer: rows past the end have none.
template <typename Io, int D>
__device__ __forceinline__ Io* answer_row(const Step& s, int first_token, int query_length, int row,
                                          int kv_head) {
  const int query = s.by_group.quotient(row);
  if (query >= query_length) return nullptr;
  return static_cast<Io*>(s.a.attention) +
         (int64_t{first_token + query} * s.d.num_heads + kv_head * s.group + row % s.group) * D;
}

template <typename Io, typename Cache, int D, int Stages>
__global__ void __launch_bounds__(kSplitThreads) split(const Step s) {
  using T = Tile<Io, Cache, D>;
  using Shape = SplitShape<Io, Cache, D, Stages>;
  constexpr int kStages = Stages;
  extern __shared__ __align__(16) uint8_t shared[];
  uint8_t* const queries = shared;
  float* const factors = reinterpret_cast<float*>(shared + kSplitRows * T::kQueryPitch);
  uint8_t* const ring = shared + Shape::queries;
  float* const merge = reinterpret_cast<float*>(ring);  // after the loop: [warp][row][D + 2]
  __shared__ int last_to_arrive;

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  let_next_start();
  wait_for_previous();
  const int kv_heads = s.d.num_kv_heads, work = s.counts->split_items * kv_heads;

  for (int w = blockIdx.x; w < work; w += gridDim.x) {
    const Item item = s.split_items[w / kv_heads];
    const int kv_head = w % kv_heads;
    const int first_token = s.a.query_start[item.sequence];
    const int query_length = s.a.query_start[item.sequence + 1] - first_token;
    const int kv_length = s.a.kv_len[item.sequence];
    const int32_t* const table = s.a.block_table + int64_t{item.sequence} * s.d.table_width;
    const float key_scale = s.a.cache_scales != nullptr ? s.a.cache_scales[kv_head] : 1.f;
    const float value_scale = s.a.cache_scales != nullptr ? s.a.cache_scales[kv_heads + kv_head] : 1.f;

    const uint32_t my_ring = shared_address(ring) + warp * kStages * Shape::stage;
    bool bad = false;
    // Lane l looks up key l of a round; the id is asked for one round before its copies start.
    const auto look_up = [&](int round) {
      const int key = item.key_begin + (round * kSplitWarps + warp) * kSplitKeys + lane % kSplitKeys;
      return key < item.key_end ? __ldg(table + s.by_block.quotient(key)) : -1;
    };
    const auto* const cache = static_cast<const uint8_t*>(s.a.cache);
    constexpr int kRowBytes = D * static_cast<int>(sizeof(Cache));
    const int64_t to_values = int64_t{s.d.block_size} * kv_heads * kRowBytes;
    const auto fill = [&](int round, int block) {
      const int key0 = item.key_begin + (round * kSplitWarps + warp) * kSplitKeys;
      if (key0 < item.key_end) {
        const int key = key0 + lane % kSplitKeys;
        const bool inside = key < item.key_end;
        // Keys past the end and of unknown blocks are zeros and not looked at.
        const uint32_t row = inside ? key_row(s, block, key, kv_head) : kNoRow;
        bad |= inside && row == kNoRow;
        const uint32_t stage = my_ring + round % kStages * Shape::stage;
        const bool all = __all_sync(~0u, row != kNoRow);
#pragma unroll
        for (int j = 0; j < kSplitKeys * T::kPieces / 32; ++j) {
          const int i = lane + 32 * j;
          const int k = 32 % T::kPieces == 0 ? lane / T::kPieces + j * (32 / T::kPieces) : i / T::kPieces;
          const int piece = 32 % T::kPieces == 0 ? lane % T::kPieces : i % T::kPieces;
          const uint32_t at = __shfl_sync(~0u, row, k);
          const uint32_t to = stage + k * T::kKeyPitch + piece * 16;
          if (all) {
            const uint8_t* const from = cache + uint64_t{at} * kRowBytes + piece * 16;
            copy_async16_stream(to, from);
            copy_async16_stream(to + kSplitKeys * T::kKeyPitch, from + to_values);
          } else {
            const int bytes = at == kNoRow ? 0 : 16;
            const uint8_t* const from = at == kNoRow ? cache : cache + uint64_t{at} * kRowBytes + piece * 16;
            copy_async16(to, from, bytes);
            copy_async16(to + kSplitKeys * T::kKeyPitch, at == kNoRow ? cache : from + to_values, bytes);
          }
        }
      }
      copy_commit();
    };
    static_assert(kSplitKeys * T::kPieces % 32 == 0, "every lane takes part in every shuffle");

    const int rounds = ceil_div(max(0, item.key_end - item.key_begin), kSplitWarps * kSplitKeys);
    int ahead = look_up(0);
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) {
      const int block = ahead;
      ahead = look_up(i + 1);
      fill(i, block);
    }
    for (int r = warp; r < kSplitRows; r += kSplitWarps) {
      const int row = item.row + r, query = row / s.group;
      const Io* from =
          query < query_length
              ? static_cast<const Io*>(s.queries) +
                    (int64_t{first_token + query} * s.d.num_heads + kv_head * s.group + row % s.group) * D
              : nullptr;
      const float factor = stage_query<T, Io, D>(queries + r * T::kQueryPitch, from);
      if (lane == 0) factors[r] = factor;
    }
    __syncthreads();

    const ScoreScale scale(s.d, key_scale);
    const float row_factor[2] = {factors[lane / 4], factors[lane / 4 + 8]};
    const int last_query = query_length - 1, past = kv_length - query_length;
    const int query[2] = {min(last_query, s.by_group.quotient(item.row + lane / 4)),
                          min(last_query, s.by_group.quotient(item.row + lane / 4 + 8))};
    const Sight sight[2] = {Sight(s, first_token, query_length, kv_length, query[0]),
                            Sight(s, first_token, query_length, kv_length, query[1])};
    // Rounds inside [clear_begin, clear_end) are seen by every row, whole.
    int clear_begin = max(sight[0].begin, sight[1].begin), clear_end = min(sight[0].end, sight[1].end);
    for (int o = 16; o >= 4; o /= 2) {
      clear_begin = max(clear_begin, __shfl_xor_sync(~0u, clear_begin, o));
      clear_end = min(clear_end, __shfl_xor_sync(~0u, clear_end, o));
    }
    clear_end = min(clear_end, s.a.tree_mask != nullptr ? min(past, item.key_end) : item.key_end);
    T tile;
    tile.clear();
    for (int round = 0; round < rounds; ++round) {
      {
        const int block = ahead;
        ahead = look_up(round + kStages);
        fill(round + kStages - 1, block);
      }
      copy_wait<kStages - 1>();
      __syncwarp();
      const int key0 = item.key_begin + (round * kSplitWarps + warp) * kSplitKeys;
      if (key0 < item.key_end) {
        const uint32_t stage = my_ring + round % kStages * Shape::stage;
        float p[kSplitKeys / 8][4];
        T::template scores<kSplitKeys>(shared_address(queries), stage, p);
        scale.apply(p, row_factor);
        if (key0 < clear_begin || key0 + kSplitKeys > clear_end)
          mask_scores(s, p, sight, query, first_token, past, key0, item.key_end);
        tile.template softmax<kSplitKeys>(p);
        tile.template add_values<kSplitKeys>(stage + kSplitKeys * T::kKeyPitch, p);
      }
      __syncwarp();  // the stage is filled again in the next round
    }
    copy_wait<0>();
    tile.finish();
    const int any_bad = __syncthreads_or(bad);  // and the ring is free for merging

#pragma unroll
    for (int n = 0; n < D / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = lane / 4 + i / 2 * 8;
        merge[(warp * kSplitRows + r) * (D + 2) + T::value_place(n, lane % 4 * 2 + i % 2)] = tile.sums[n][i];
      }
    if (lane % 4 == 0)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float* at = merge + (warp * kSplitRows + lane / 4 + 8 * r) * (D + 2) + D;
        at[0] = tile.top[r];
        at[1] = tile.total[r];
      }
    __syncthreads();

    const bool whole = item.splits == 1;
    float* const partial =
        s.partial + (int64_t{max(item.slot, 0)} * kv_heads + kv_head) * kSplitRows * (D + 2);
    const auto sink_of = [&](int row) {
      constexpr float kLog2e = 1.4426950408889634f;
      return s.a.sinks != nullptr ? s.a.sinks[kv_head * s.group + row % s.group] * kLog2e : kNone;
    };
    for (int r = warp; r < kSplitRows; r += kSplitWarps) {
      Io* const out = answer_row<Io, D>(s, first_token, query_length, item.row + r, kv_head);
      if (out == nullptr) continue;
      float top = kNone, total = 0.f, weight[kSplitWarps];
#pragma unroll
      for (int k = 0; k < kSplitWarps; ++k) top = fmaxf(top, merge[(k * kSplitRows + r) * (D + 2) + D]);
      const float sink = whole ? sink_of(item.row + r) : kNone;
      top = fmaxf(top, sink);
      const float base = top == kNone ? 0.f : top;
#pragma unroll
      for (int k = 0; k < kSplitWarps; ++k) {
        weight[k] = fast_exp2(merge[(k * kSplitRows + r) * (D + 2) + D] - base);
        total += weight[k] * merge[(k * kSplitRows + r) * (D + 2) + D + 1];
      }
      total += fast_exp2(sink - base);
      if (any_bad) total = __int_as_float(0x7fc00000);
      const float inverse = total == 0.f ? 0.f : value_scale / total;
      for (int e = lane; e < D; e += 32) {
        float sum = 0.f;
#pragma unroll
        for (int k = 0; k < kSplitWarps; ++k) sum += weight[k] * merge[(k * kSplitRows + r) * (D + 2) + e];
        if (whole)
          out[e] = from_float<Io>(sum * inverse);
        else
          partial[r * (D + 2) + e] = sum;
      }
      if (!whole && lane == 0) {
        partial[r * (D + 2) + D] = top;
        partial[r * (D + 2) + D + 1] = total;
      }
    }
    if (!whole) {
      __threadfence();
      __syncthreads();
      if (threadIdx.x == 0)
        last_to_arrive = atomicAdd(s.counters + item.counter * kv_heads + kv_head, 1) == item.splits - 1;
      __syncthreads();
      if (last_to_arrive) {
        __threadfence();
        const int64_t stride = int64_t{kv_heads} * kSplitRows * (D + 2);
        const float* const parts = partial - item.split * stride;
        for (int r = warp; r < kSplitRows; r += kSplitWarps) {
          Io* const out = answer_row<Io, D>(s, first_token, query_length, item.row + r, kv_head);
          if (out == nullptr) continue;
          const float sink = sink_of(item.row + r);
          float top = sink;
          for (int k = 0; k < item.splits; ++k)
            top = fmaxf(top, __ldcg(parts + k * stride + r * (D + 2) + D));
          const float base = top == kNone ? 0.f : top;
          float total = fast_exp2(sink - base), sum[ceil_div(D, 32)] = {};
          for (int k = 0; k < item.splits; ++k) {
            const float* const part = parts + k * stride + r * (D + 2);
            const float weight = fast_exp2(__ldcg(part + D) - base);
            total += weight * __ldcg(part + D + 1);
#pragma unroll
            for (int e = 0; e < D / 32; ++e) sum[e] += weight * __ldcg(part + e * 32 + lane);
          }
          const float inverse = total == 0.f ? 0.f : value_scale / total;
#pragma unroll
          for (int e = 0; e < D / 32; ++e) out[e * 32 + lane] = from_float<Io>(sum[e] * inverse);
        }
      }
    }
    __syncthreads();  // the merge area and the queries are free
  }
}

}  // namespace enginebay::cuda::attention

#endif
