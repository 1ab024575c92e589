// Norm, RoPE, cache write and the step's plan.
#ifndef ENGINEBAY_CUDA_ATTENTION_PREPARE_CUH
#define ENGINEBAY_CUDA_ATTENTION_PREPARE_CUH

#include "attention.cuh"

namespace enginebay::cuda::attention {

constexpr int kPrepareThreads = 256;

template <typename Cache>
__device__ __forceinline__ Cache to_cache(float v, float inverse_scale) {
  if constexpr (std::is_same_v<Cache, __nv_fp8_e4m3>)
    return __nv_fp8_e4m3(v * inverse_scale);  // saturates at 448, keeps NaN
  else if constexpr (std::is_same_v<Cache, int8_t>)
    return static_cast<int8_t>(max(-127, min(127, __float2int_rn(v * inverse_scale))));
  else
    return from_float<Cache>(v);
}

// Sum over the block's threads of a pair, and each thread's exclusive prefix of it.
__device__ inline void block_scan(int2 value, int2* before, int2* all) {
  __shared__ int2 warps[kPrepareThreads / 32];
  int2 sum = value;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int o = 1; o < 32; o *= 2) {
    const int x = __shfl_up_sync(~0u, sum.x, o), y = __shfl_up_sync(~0u, sum.y, o);
    if (lane >= o) sum = make_int2(sum.x + x, sum.y + y);
  }
  __syncthreads();  // `warps` of the call before is read
  if (lane == 31) warps[warp] = sum;
  __syncthreads();
  int2 base = make_int2(0, 0), total = make_int2(0, 0);
  for (int w = 0; w < kPrepareThreads / 32; ++w) {
    if (w == warp) base = total;
    total = make_int2(total.x + warps[w].x, total.y + warps[w].y);
  }
  *before = make_int2(base.x + sum.x - value.x, base.y + sum.y - value.y);
  *all = total;
}

__device__ inline void plan(const Step& s, bool all_split) {
  const int sequences = static_cast<int>(s.a.sequences);
  const auto lengths = [&](int b, int* queries, int* keys) {
    *queries = s.a.query_start[b + 1] - s.a.query_start[b];
    *keys = s.a.kv_len[b];
    return valid_lengths(s, *queries, *keys) && s.a.query_start[b] >= 0 &&
           s.a.query_start[b + 1] <= s.a.tokens;
  };
  const auto split_tiles = [&](int queries) {
    const int rows = queries * s.group;
    return all_split || rows <= kSplitLimit ? ceil_div(rows, kSplitRows) : 0;
  };
  const auto tile_keys = [&](int queries, int keys, int tile) {
    const int first = tile * kSplitRows / s.group;
    const int last = min(queries - 1, (tile * kSplitRows + kSplitRows - 1) / s.group);
    return visible_keys(s, queries, keys, first, last);
  };

  __shared__ unsigned long long work;
  if (threadIdx.x == 0) work = 0;
  __syncthreads();
  unsigned long long mine = 0;
  for (int b = threadIdx.x; b < sequences; b += kPrepareThreads) {
    int queries, keys;
    if (!lengths(b, &queries, &keys)) continue;
    for (int tile = 0; tile < split_tiles(queries); ++tile) {
      const int2 range = tile_keys(queries, keys, tile);
      mine += static_cast<unsigned long long>(max(0, range.y - range.x));
    }
  }
  if (mine > 0) atomicAdd(&work, mine);
  __syncthreads();
  // One round of all slots where keys are few, several (which even out ragged lengths) where each is long.
  const auto keys_a_slot = [&](int rounds) {
    const long long keys =
        static_cast<long long>(work) * s.d.num_kv_heads / (static_cast<long long>(s.slots) * rounds);
    return (keys / 64 + 1) * 64;
  };
  const int chunk = static_cast<int>(
      max(static_cast<long long>(kKeysAtLeast),
          max(min(static_cast<long long>(kKeysAlone), keys_a_slot(1)), keys_a_slot(kRounds))));

  int items = 0, tiles_before = 0, slots_before = 0, prefills = 0;
  for (int b0 = 0; b0 < sequences; b0 += kPrepareThreads) {
    const int b = b0 + threadIdx.x;
    int queries = 0, keys = 0;
    const bool live = b < sequences && lengths(b, &queries, &keys);
    const int tiles = live ? split_tiles(queries) : 0;
    const int prefill_tiles = live && tiles == 0 ? ceil_div(queries * s.group, s.prefill_rows) : 0;
    int count = 0, slots = 0;
    for (int tile = 0; tile < tiles; ++tile) {
      const int2 range = tile_keys(queries, keys, tile);
      const int splits = max(1, ceil_div(range.y - range.x, chunk));
      count += splits;
      slots += splits > 1 ? splits : 0;
    }
    int2 at, total, more, more_total;
    block_scan(make_int2(count, prefill_tiles), &at, &total);
    block_scan(make_int2(slots, tiles), &more, &more_total);
    int item = items + at.x, slot = slots_before + more.x, counter = tiles_before + more.y;
    for (int tile = 0; tile < tiles; ++tile, ++counter) {
      const int2 range = tile_keys(queries, keys, tile);
      const int splits = max(1, ceil_div(range.y - range.x, chunk));
      // Equal shares, in whole rounds of a block's warps.
      const int share = ceil_div(ceil_div(range.y - range.x, splits), 64) * 64;
      for (int split = 0; split < splits; ++split) {
        const int begin = min(range.y, range.x + split * share), end = min(range.y, begin + share);
        s.split_items[item++] = {b,     tile * kSplitRows,        begin,  end, splits,
                                 split, splits > 1 ? slot++ : -1, counter};
      }
      for (int h = 0; h < s.d.num_kv_heads; ++h) s.counters[counter * s.d.num_kv_heads + h] = 0;
    }
    // The tiles that see most first.
    int prefill = prefills + at.y;
    for (int tile = prefill_tiles - 1; tile >= 0; --tile) {
      const int first = tile * s.prefill_rows / s.group;
      const int last = min(queries - 1, (tile * s.prefill_rows + s.prefill_rows - 1) / s.group);
      const int2 range = visible_keys(s, queries, keys, first, last);
      s.prefill_items[prefill++] = {b, tile * s.prefill_rows, range.x, range.y, 1, 0, -1, 0};
    }
    items += total.x;
    prefills += total.y;
    slots_before += more_total.x;
    tiles_before += more_total.y;
  }
  if (threadIdx.x == 0) *s.counts = {items, prefills};
}

// Block t < T: token t. Block T: the plan.
template <typename Io, typename Cache, int D>
__global__ void __launch_bounds__(kPrepareThreads) prepare(const Step s, const bool all_split) {
  let_next_start();
  wait_for_previous();
  if (blockIdx.x == s.a.tokens) {
    plan(s, all_split);
    return;
  }
  const int token = blockIdx.x, sequences = static_cast<int>(s.a.sequences);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int heads = s.d.num_heads, kv_heads = s.d.num_kv_heads;

  // The sequence: the last one that starts at or before the token.
  int low = 0, high = sequences;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (s.a.query_start[middle] <= token ? low : high) = middle;
  }
  const int first = s.a.query_start[low], end = s.a.query_start[low + 1];
  const int kv_length = s.a.kv_len[low];
  const bool padding = token < first || token >= end || kv_length == 0;
  if (padding || !valid_lengths(s, end - first, kv_length) || end > s.a.tokens) {
    // Padding gives zeros; lengths that contradict each other give NaN, which shows, and touch nothing.
    const Io fill = padding ? from_float<Io>(0.f) : from_float<Io>(__int_as_float(0x7fc00000));
    Io* const out = static_cast<Io*>(s.a.attention) + int64_t{token} * heads * D;
    for (int i = threadIdx.x; i < heads * D; i += kPrepareThreads) out[i] = fill;
    return;
  }

  __shared__ __align__(16) float rows[kPrepareThreads / 32][D];
  float* const row = rows[warp];
  const int position = s.a.position_ids[token];
  const int half_rotary = s.d.rotary_dim / 2;
  const bool rotate = half_rotary > 0;
  const bool known_position = position >= 0 && position < s.d.rope_positions;
  const int64_t slot = s.a.slot_mapping[token];
  const bool write = slot >= 0 && slot < int64_t{s.d.num_blocks} * s.d.block_size;
  const int64_t block = write ? slot / s.d.block_size : 0;
  const int offset = write ? static_cast<int>(slot % s.d.block_size) : 0;

  // Pairs of neighbouring elements, lane by lane; the next head is under way while this one is worked on.
  constexpr int kPairs = ceil_div(D, 64), kStep = kPrepareThreads / 32;
  using IoPair = typename Half16<Io>::Pair;
  const auto* const in =
      static_cast<const IoPair*>(s.a.qkv) + int64_t{token} * (heads + 2 * kv_heads) * (D / 2);
  IoPair next[kPairs];
  const auto read = [&](int head) {
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const int i = lane + 32 * j;
      if (i < D / 2 && head < heads + 2 * kv_heads) next[j] = in[int64_t{head} * (D / 2) + i];
    }
  };
  read(warp);
  for (int head = warp; head < heads + 2 * kv_heads; head += kStep) {
    const bool is_query = head < heads, is_key = !is_query && head < heads + kv_heads;
    float square = 0.f;
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const int i = lane + 32 * j;
      if (i < D / 2) {
        const float2 v = Half16<Io>::floats(next[j]);
        reinterpret_cast<float2*>(row)[i] = v;
        square += v.x * v.x + v.y * v.y;
      }
    }
    read(head + kStep);
    const float* const norm = is_query ? s.a.q_norm : is_key ? s.a.k_norm : nullptr;
    if (norm != nullptr) {
      for (int o = 16; o > 0; o /= 2) square += __shfl_xor_sync(~0u, square, o);
      const float factor = rsqrtf(square / D + s.d.norm_epsilon);
      __syncwarp();
      for (int i = lane; i < D; i += 32) row[i] *= factor * norm[i];
    }
    __syncwarp();
    if (rotate && (is_query || is_key)) {
      for (int i = lane; i < half_rotary; i += 32) {
        // A position outside the tables gives NaN: visible, and no wild read.
        const float nan = __int_as_float(0x7fc00000);
        const float c = known_position ? __ldg(s.a.rope_cos + int64_t{position} * half_rotary + i) : nan;
        const float n = known_position ? __ldg(s.a.rope_sin + int64_t{position} * half_rotary + i) : nan;
        const int a = s.d.rope_interleaved ? 2 * i : i,
                  b = s.d.rope_interleaved ? 2 * i + 1 : i + half_rotary;
        const float x = row[a], y = row[b];
        row[a] = x * c - y * n;
        row[b] = y * c + x * n;
      }
      __syncwarp();
    }
    if (is_query) {
      auto* const out = static_cast<IoPair*>(s.queries) + (int64_t{token} * heads + head) * (D / 2);
#pragma unroll
      for (int j = 0; j < kPairs; ++j) {
        const int i = lane + 32 * j;
        if (i < D / 2) out[i] = Half16<Io>::pair(row[2 * i], row[2 * i + 1]);
      }
    } else if (write) {
      const int h = head - heads - (is_key ? 0 : kv_heads);
      const float scale = s.a.cache_scales != nullptr ? s.a.cache_scales[(is_key ? 0 : kv_heads) + h] : 1.f;
      const float inverse = 1.f / scale;
      Cache* const out = static_cast<Cache*>(s.a.cache) +
                         (((block * 2 + (is_key ? 0 : 1)) * s.d.block_size + offset) * kv_heads + h) * D;
#pragma unroll
      for (int j = 0; j < kPairs; ++j) {
        const int i = lane + 32 * j;
        if (i < D / 2) {
          const Cache pair[2] = {to_cache<Cache>(row[2 * i], inverse),
                                 to_cache<Cache>(row[2 * i + 1], inverse)};
          using Both = std::conditional_t<sizeof(Cache) == 2, uint32_t, uint16_t>;
          Both both;
          memcpy(&both, pair, sizeof both);
          *reinterpret_cast<Both*>(out + 2 * i) = both;
        }
      }
    }
  }
}

}  // namespace enginebay::cuda::attention

#endif
