// Attention of sequences with many new tokens on sm_90a, for 16-bit caches and head sizes 64 and 128.
//
// A block takes 128 rows of queries: two warpgroups with 64 each multiply, a third gathers keys and values
// from the paged cache into two rings of shared memory. The scores of the next keys are under way while this
// tile's softmax runs, and the weighted sum of the last ones while the next softmax does (Shah et al., 2024,
// FlashAttention-3).
#ifndef ENGINEBAY_CUDA_ATTENTION_WGMMA_CUH
#define ENGINEBAY_CUDA_ATTENTION_WGMMA_CUH

#include "attention_split.cuh"
#include "bulk_copy.cuh"
#include "wgmma.cuh"

namespace enginebay::cuda::attention {

constexpr int kWgmmaThreads = 384, kWgmmaRows = 128, kWgmmaKeys = 128, kWgmmaStages = 2;

template <int D>
struct WgmmaShape {
  static constexpr int block_bytes = 128 * 128;  // 128 rows of 64 elements
  static constexpr int tile_bytes = D / 64 * block_bytes;
  static constexpr int shared = 1024 + tile_bytes * (1 + 2 * kWgmmaStages);
};

// A place in a ring of kWgmmaStages and how often it has gone round.
struct Place {
  int stage = 0, parity = 0;
  __device__ __forceinline__ void next() {
    if (++stage == kWgmmaStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

template <typename Io, int D>
__global__ void __launch_bounds__(kWgmmaThreads, 1)
    prefill_wgmma(const Step s, const bool bulk, const __grid_constant__ CUtensorMap cache_map) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Shape = WgmmaShape<D>;
  extern __shared__ uint8_t raw[];
  const uint32_t base = (shared_address(raw) + 1023) & ~1023u;
  const uint32_t queries = base, keys = base + Shape::tile_bytes,
                 values = keys + kWgmmaStages * Shape::tile_bytes;
  __shared__ __align__(8) uint64_t barriers[4 * kWgmmaStages];
  __shared__ int any_bad;
  const uint32_t full_keys = shared_address(barriers), full_values = full_keys + 8 * kWgmmaStages;
  const uint32_t free_keys = full_values + 8 * kWgmmaStages, free_values = free_keys + 8 * kWgmmaStages;

  const int group = threadIdx.x / 128, thread = threadIdx.x % 128;
  let_next_start();
  wait_for_previous();
  const int kv_heads = s.d.num_kv_heads;
  const int64_t index = static_cast<int64_t>(blockIdx.x);
  if (index >= int64_t{s.counts->prefill_items} * kv_heads) return;
  const Item item = s.prefill_items[index / kv_heads];
  const int kv_head = static_cast<int>(index % kv_heads);
  const int first_token = s.a.query_start[item.sequence];
  const int query_length = s.a.query_start[item.sequence + 1] - first_token;
  const int kv_length = s.a.kv_len[item.sequence], past = kv_length - query_length;
  // The engine copies whole cache blocks, so tiles begin with one.
  const int key_base = bulk ? item.key_begin - item.key_begin % s.d.block_size : item.key_begin;
  const int tiles = ceil_div(item.key_end - key_base, kWgmmaKeys);

  if (threadIdx.x == 0) {
    any_bad = 0;
    for (int i = 0; i < kWgmmaStages; ++i) {
      barrier_init(full_keys + 8 * i, bulk ? 1 : 128);
      barrier_init(full_values + 8 * i, bulk ? 1 : 128);
      barrier_init(free_keys + 8 * i, 256);
      barrier_init(free_values + 8 * i, 256);
    }
    barrier_init_done();
  }
  // Queries: rows past the end are zeros.
  for (int i = threadIdx.x; i < kWgmmaRows * D / 8; i += kWgmmaThreads) {
    const int row = i / (D / 8), piece = i % (D / 8), query = s.by_group.quotient(item.row + row);
    const int head = item.row + row - query * s.group;
    const bool live = query < query_length;
    const Io* from =
        static_cast<const Io*>(s.queries) +
        (live ? (int64_t{first_token + query} * s.d.num_heads + kv_head * s.group + head) * D + piece * 8
              : 0);
    copy_async16(queries + piece / 8 * Shape::block_bytes + row * 128 + ((piece % 8 ^ (row & 7)) << 4), from,
                 live ? 16 : 0);
  }
  copy_commit();
  copy_wait<0>();
  fence_async_proxy();
  __syncthreads();

  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 56;\n");
    const int32_t* const table = s.a.block_table + int64_t{item.sequence} * s.d.table_width;
    const auto* const cache = static_cast<const uint8_t*>(s.a.cache);
    if (bulk) {
      // A warp for keys, one for values; a lane a cache block.
      const int role = thread / 32, lane = thread % 32, blocks = kWgmmaKeys / s.d.block_size;
      if (role > 1) return;
      const uint32_t ring = role == 0 ? keys : values, full = role == 0 ? full_keys : full_values;
      const uint32_t free = role == 0 ? free_keys : free_values;
      Place place;
      for (int tile = 0; tile < tiles; ++tile, place.next()) {
        const int key = key_base + tile * kWgmmaKeys + lane * s.d.block_size;
        // What lies outside the pool reads as zeros: unknown blocks, and those past the end.
        int block = s.d.num_blocks;
        if (lane < blocks && key < item.key_end) {
          const int id = __ldg(table + s.by_block.quotient(key));
          if (id >= 0 && id < s.d.num_blocks)
            block = id;
          else if (key + s.d.block_size > item.key_begin)
            any_bad = 1;
        }
        if (tile >= kWgmmaStages) barrier_wait(free + 8 * place.stage, place.parity ^ 1);
        __syncwarp();  // what any lane found bad is known before the tile is announced
        if (lane == 0) barrier_expect(full + 8 * place.stage, Shape::tile_bytes);
        __syncwarp();
        if (lane < blocks)
#pragma unroll
          for (int half = 0; half < D / 64; ++half)
            copy_tile(ring + place.stage * Shape::tile_bytes + half * Shape::block_bytes +
                          lane * s.d.block_size * 128,
                      &cache_map, half * 64, kv_head, 0, 2 * block + role, full + 8 * place.stage);
      }
      return;
    }
    const int64_t to_values = int64_t{s.d.block_size} * kv_heads * D * 2;
    constexpr int kPieces = D / 8, kPasses = kWgmmaKeys * kPieces / 128;
    const int piece = thread % kPieces, first_key = thread / kPieces;
    const uint32_t column = piece / 8 * Shape::block_bytes;
    bool bad = false;
    uint32_t rows[kPasses];
    const auto look_up = [&](int tile) {
#pragma unroll
      for (int i = 0; i < kPasses; ++i) {
        const int key = key_base + tile * kWgmmaKeys + first_key + i * (128 / kPieces);
        const bool inside = key < item.key_end;
        rows[i] = inside ? key_row(s, __ldg(table + s.by_block.quotient(key)), key, kv_head) : kNoRow;
        bad |= inside && rows[i] == kNoRow;
      }
    };
    const auto gather = [&](uint32_t tile_at, int64_t offset) {
#pragma unroll
      for (int i = 0; i < kPasses; ++i) {
        const int key = first_key + i * (128 / kPieces);
        const bool known = rows[i] != kNoRow;
        const uint8_t* const from = known ? cache + uint64_t{rows[i]} * (D * 2) + offset + piece * 16 : cache;
        copy_async16(tile_at + column + key * 128 + ((piece % 8 ^ (key & 7)) << 4), from, known ? 16 : 0);
      }
    };
    Place place;
    for (int tile = 0; tile < tiles; ++tile, place.next()) {
      look_up(tile);
      if (bad) any_bad = 1;
      if (tile >= kWgmmaStages) barrier_wait(free_keys + 8 * place.stage, place.parity ^ 1);
      gather(keys + place.stage * Shape::tile_bytes, 0);
      barrier_arrive_after_copies(full_keys + 8 * place.stage);
      if (tile >= kWgmmaStages) barrier_wait(free_values + 8 * place.stage, place.parity ^ 1);
      gather(values + place.stage * Shape::tile_bytes, to_values);
      barrier_arrive_after_copies(full_values + 8 * place.stage);
    }
    copy_wait<0>();
    return;
  }

  asm volatile("setmaxnreg.inc.sync.aligned.u32 224;\n");
  const int consumer = group - 1, warp = thread / 32, lane = threadIdx.x % 32;
  const int my_row = item.row + consumer * 64 + warp * 16 + lane / 4;
  const int last_query = query_length - 1;
  const int query[2] = {min(last_query, s.by_group.quotient(my_row)),
                        min(last_query, s.by_group.quotient(my_row + 8))};
  const Sight sight[2] = {Sight(s, first_token, query_length, kv_length, query[0]),
                          Sight(s, first_token, query_length, kv_length, query[1])};
  // Tiles every row of the warpgroup sees, whole: rows fall in order, so the first and the last decide.
  const int first_row = item.row + consumer * 64;
  const Sight low(s, first_token, query_length, kv_length, min(last_query, s.by_group.quotient(first_row)));
  const Sight high(s, first_token, query_length, kv_length,
                   min(last_query, s.by_group.quotient(first_row + 63)));
  const bool tree = s.a.tree_mask != nullptr;
  const ScoreScale scale(s.d, 1.f);
  const float unit[2] = {1.f, 1.f};
  const bool capped = scale.cap > 0.f;
  // Without a soft cap the scale is folded into the exponent.
  const float factor = capped ? 1.f : scale.scale;

  float score[kWgmmaKeys / 8][4], sum[D / 8][4], top[2] = {kNone, kNone}, total[2] = {0.f, 0.f};
  auto& score_flat = reinterpret_cast<float (&)[kWgmmaKeys / 2]>(score);
  auto& sum_flat = reinterpret_cast<float (&)[D / 2]>(sum);
#pragma unroll
  for (int i = 0; i < D / 2; ++i) sum_flat[i] = 0.f;
  uint32_t probability[kWgmmaKeys / 16][4];
  const uint32_t my_queries = queries + consumer * 64 * 128;

  const auto start_scores = [&](const Place& place) {
    barrier_wait(full_keys + 8 * place.stage, place.parity);
    fence_async_proxy();  // the producer's copies may be ordinary writes
    const uint32_t tile = keys + place.stage * Shape::tile_bytes;
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
      const uint32_t block = k / 4 * Shape::block_bytes;
      WgmmaSharedA<Io, kWgmmaKeys>::run(score_flat, wgmma_descriptor(my_queries + block) + k % 4 * 2,
                                        wgmma_descriptor(tile + block) + k % 4 * 2, k > 0);
    }
    wgmma_commit();
  };
  const auto start_sum = [&](const Place& place, bool last) {
    barrier_wait(full_values + 8 * place.stage, place.parity);
    const uint32_t tile = values + place.stage * Shape::tile_bytes;
    const int valid = item.key_end - key_base - (tiles - 1) * kWgmmaKeys;
    if (bulk && last && valid < kWgmmaKeys) {
      // The last cache block may hold anything past the end, and NaN times nothing is NaN.
      constexpr int kPieces = D / 8;
      for (int i = valid * kPieces + static_cast<int>(threadIdx.x) - 128; i < kWgmmaKeys * kPieces;
           i += 256) {
        const int row = i / kPieces, piece = i % kPieces;
        const uint32_t at = tile + piece / 8 * Shape::block_bytes + row * 128 + piece % 8 * 16;
        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};\n" ::"r"(at), "r"(0) : "memory");
      }
      fence_async_proxy();
      asm volatile("bar.sync 1, 256;\n" ::: "memory");
    } else {
      fence_async_proxy();  // the producer's copies may be ordinary writes
    }
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kWgmmaKeys / 16; ++k)
      WgmmaRegisterA<Io, D, true>::run(sum_flat, probability[k],
                                       wgmma_descriptor_mn(tile, Shape::block_bytes) + k * 128);
    wgmma_commit();
  };
  // Scores to probabilities; returns by how much the sums so far shrink.
  const auto softmax = [&](int tile, float (&shrink)[2]) {
    const int key0 = key_base + tile * kWgmmaKeys;
    if (capped) scale.apply(score, unit);
    if (tree || key0 < high.begin || key0 + kWgmmaKeys > low.end)
      mask_scores(s, score, sight, query, first_token, past, key0, item.key_end);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float best = kNone;
#pragma unroll
      for (int n = 0; n < kWgmmaKeys / 8; ++n)
        best = fmaxf(best, fmaxf(score[n][2 * r], score[n][2 * r + 1]));
      best = fmaxf(best, __shfl_xor_sync(~0u, best, 1));
      best = fmaxf(best, __shfl_xor_sync(~0u, best, 2));
      best = fmaxf(top[r], best * factor);
      const float offset = best == kNone ? 0.f : best;
      shrink[r] = fast_exp2(top[r] - offset);
      top[r] = best;
      float mine = 0.f;
#pragma unroll
      for (int n = 0; n < kWgmmaKeys / 8; ++n)
#pragma unroll
        for (int i = 2 * r; i < 2 * r + 2; ++i) {
          score[n][i] = fast_exp2(fmaf(score[n][i], factor, -offset));
          mine += score[n][i];
        }
      total[r] = total[r] * shrink[r] + mine;
    }
  };
  const auto pack = [&] {
    using H = Half16<Io>;
#pragma unroll
    for (int k = 0; k < kWgmmaKeys / 16; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        probability[k][i] =
            bits(H::pair(score[2 * k + i / 2][i % 2 * 2], score[2 * k + i / 2][i % 2 * 2 + 1]));
  };

  Place key_place, value_place;
  float shrink[2];
  start_scores(key_place);
  wgmma_wait<0>();
  wgmma_touch(score_flat);
  barrier_arrive(free_keys + 8 * key_place.stage);
  key_place.next();
  softmax(0, shrink);
  pack();
  for (int tile = 1; tile < tiles; ++tile) {
    start_scores(key_place);
    start_sum(value_place, false);
    wgmma_wait<1>();
    wgmma_touch(score_flat);
    barrier_arrive(free_keys + 8 * key_place.stage);
    key_place.next();
    softmax(tile, shrink);
    wgmma_wait<0>();
    wgmma_touch(sum_flat);
    barrier_arrive(free_values + 8 * value_place.stage);
    value_place.next();
#pragma unroll
    for (int n = 0; n < D / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[n][i] *= shrink[i / 2];
    pack();
  }
  start_sum(value_place, true);
  wgmma_wait<0>();
  wgmma_touch(sum_flat);

  const bool nan = *reinterpret_cast<volatile int*>(&any_bad) != 0;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    total[r] += __shfl_xor_sync(~0u, total[r], 1);
    total[r] += __shfl_xor_sync(~0u, total[r], 2);
    const int row = my_row + 8 * r;
    Io* const out = answer_row<Io, D>(s, first_token, query_length, row, kv_head);
    constexpr float kLog2e = 1.4426950408889634f;
    const float sink = s.a.sinks != nullptr ? s.a.sinks[kv_head * s.group + row % s.group] * kLog2e : kNone;
    const float best = fmaxf(top[r], sink), offset = best == kNone ? 0.f : best;
    const float own = fast_exp2(top[r] - offset);
    const float whole = nan ? __int_as_float(0x7fc00000) : total[r] * own + fast_exp2(sink - offset);
    const float inverse = whole == 0.f ? 0.f : own / whole;
    if (out == nullptr) continue;
#pragma unroll
    for (int n = 0; n < D / 8; ++n) {
      const auto pair = Half16<Io>::pair(sum[n][2 * r] * inverse, sum[n][2 * r + 1] * inverse);
      *reinterpret_cast<uint32_t*>(out + n * 8 + lane % 4 * 2) = bits(pair);
    }
  }
#endif
}

}  // namespace enginebay::cuda::attention

#endif
