// Attention of sequences with many new tokens, for every head size and cache: a block takes 64 rows of
// queries, each of its four warps 16 of them, and all read the same keys from a ring of two stages in shared
// memory.
#ifndef ENGINEBAY_CUDA_ATTENTION_PREFILL_CUH
#define ENGINEBAY_CUDA_ATTENTION_PREFILL_CUH

#include "attention_split.cuh"

namespace enginebay::cuda::attention {

constexpr int kPrefillThreads = 128, kPrefillRows = 64;

template <typename Io, typename Cache, int D>
struct PrefillShape {
  using T = Tile<Io, Cache, D>;
  static constexpr int keys = D > 128 ? 32 : 64;
  static constexpr int stage = 2 * keys * T::kKeyPitch;
  static constexpr int queries = kPrefillRows * T::kQueryPitch;
  static constexpr int shared = queries + 2 * stage + kPrefillRows * 4 + 3 * keys * 4;
};

template <typename Io, typename Cache, int D>
__global__ void __launch_bounds__(kPrefillThreads) prefill(const Step s) {
  using T = Tile<Io, Cache, D>;
  using Shape = PrefillShape<Io, Cache, D>;
  constexpr int kKeys = Shape::keys;
  extern __shared__ __align__(16) uint8_t shared[];
  uint8_t* const queries = shared;
  uint8_t* const ring = shared + Shape::queries;
  float* const factors = reinterpret_cast<float*>(ring + 2 * Shape::stage);
  uint32_t* const row_ring =
      reinterpret_cast<uint32_t*>(factors + kPrefillRows);  // cache rows of three tiles' keys

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  let_next_start();
  wait_for_previous();
  const int kv_heads = s.d.num_kv_heads, work = s.counts->prefill_items * kv_heads;

  for (int w = blockIdx.x; w < work; w += gridDim.x) {
    const Item item = s.prefill_items[w / kv_heads];
    const int kv_head = w % kv_heads;
    const int first_token = s.a.query_start[item.sequence];
    const int query_length = s.a.query_start[item.sequence + 1] - first_token;
    const int kv_length = s.a.kv_len[item.sequence];
    const int32_t* const table = s.a.block_table + int64_t{item.sequence} * s.d.table_width;
    const float key_scale = s.a.cache_scales != nullptr ? s.a.cache_scales[kv_head] : 1.f;
    const float value_scale = s.a.cache_scales != nullptr ? s.a.cache_scales[kv_heads + kv_head] : 1.f;
    const int key_base = item.key_begin / kKeys * kKeys;
    const int tiles = ceil_div(item.key_end - key_base, kKeys);

    bool bad = false;
    const auto look_up = [&](int t) {
      const int key = key_base + t * kKeys + static_cast<int>(threadIdx.x);
      if (t < tiles && threadIdx.x < kKeys) {
        const bool inside = key < item.key_end;
        const uint32_t row =
            inside ? key_row(s, __ldg(table + s.by_block.quotient(key)), key, kv_head) : kNoRow;
        bad |= inside && row == kNoRow;
        row_ring[t % 3 * kKeys + threadIdx.x] = row;
      }
    };
    const auto* const cache = static_cast<const uint8_t*>(s.a.cache);
    constexpr int kRowBytes = D * static_cast<int>(sizeof(Cache));
    const int64_t to_values = int64_t{s.d.block_size} * kv_heads * kRowBytes;
    const auto fill = [&](int t) {
      if (t < tiles) {
        const uint32_t stage = shared_address(ring) + t % 2 * Shape::stage;
#pragma unroll 4
        for (int i = threadIdx.x; i < kKeys * T::kPieces; i += kPrefillThreads) {
          const int k = i / T::kPieces, piece = i % T::kPieces;
          const uint32_t row = row_ring[t % 3 * kKeys + k];
          const int bytes = row == kNoRow ? 0 : 16;
          const uint8_t* const from = row == kNoRow ? cache : cache + uint64_t{row} * kRowBytes + piece * 16;
          const uint32_t to = stage + k * T::kKeyPitch + piece * 16;
          copy_async16(to, from, bytes);
          copy_async16(to + kKeys * T::kKeyPitch, row == kNoRow ? cache : from + to_values, bytes);
        }
      }
      copy_commit();
    };
    look_up(0);
    look_up(1);
    __syncthreads();
    fill(0);
    for (int r = warp; r < kPrefillRows; r += kPrefillThreads / 32) {
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
    const int my_row = item.row + warp * 16 + lane / 4;
    const float row_factor[2] = {factors[warp * 16 + lane / 4], factors[warp * 16 + lane / 4 + 8]};
    const int last_query = query_length - 1, past = kv_length - query_length;
    const int query[2] = {min(last_query, my_row / s.group), min(last_query, (my_row + 8) / s.group)};
    const Sight sight[2] = {Sight(s, first_token, query_length, kv_length, query[0]),
                            Sight(s, first_token, query_length, kv_length, query[1])};
    // Keys every row of the warp sees need no test: rows fall in order, so the first and the last decide.
    const int first_query = min(last_query, (item.row + warp * 16) / s.group);
    const int end_query = min(last_query, (item.row + warp * 16 + 15) / s.group);
    const Sight low(s, first_token, query_length, kv_length, first_query);
    const Sight high(s, first_token, query_length, kv_length, end_query);
    const bool tree = s.a.tree_mask != nullptr;

    T tile;
    tile.clear();
    for (int t = 0; t < tiles; ++t) {
      fill(t + 1);
      look_up(t + 2);
      copy_wait<1>();
      __syncthreads();
      const uint32_t stage = shared_address(ring) + t % 2 * Shape::stage;
      const int key0 = key_base + t * kKeys;
      if (tree || (key0 < high.end && key0 + kKeys > low.begin)) {
        float p[kKeys / 8][4];
        T::template scores<kKeys>(shared_address(queries + warp * 16 * T::kQueryPitch), stage, p);
        scale.apply(p, row_factor);
        if (tree || key0 < high.begin || key0 + kKeys > low.end)
          mask_scores(s, p, sight, query, first_token, past, key0, item.key_end);
        tile.template softmax<kKeys>(p);
        tile.template add_values<kKeys>(stage + kKeys * T::kKeyPitch, p);
      }
      __syncthreads();  // the stage is filled again in the next round
    }
    copy_wait<0>();
    tile.finish();
    const int any_bad = __syncthreads_or(bad);

#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = my_row + 8 * r;
      Io* const out = answer_row<Io, D>(s, first_token, query_length, row, kv_head);
      constexpr float kLog2e = 1.4426950408889634f;
      const float sink = s.a.sinks != nullptr ? s.a.sinks[kv_head * s.group + row % s.group] * kLog2e : kNone;
      const float top = fmaxf(tile.top[r], sink), base = top == kNone ? 0.f : top;
      const float own = fast_exp2(tile.top[r] - base);
      const float total = any_bad ? __int_as_float(0x7fc00000) : tile.total[r] * own + fast_exp2(sink - base);
      const float inverse = total == 0.f ? 0.f : own * value_scale / total;
      if (out == nullptr) continue;
#pragma unroll
      for (int n = 0; n < D / 8; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          out[T::value_place(n, lane % 4 * 2 + i)] = from_float<Io>(tile.sums[n][2 * r + i] * inverse);
    }
    __syncthreads();
  }
}

}  // namespace enginebay::cuda::attention

#endif
