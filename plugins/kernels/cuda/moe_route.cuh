// QuantMoE's routing: experts and weights of each token, entries sorted by expert, rows of x brought there.
// Counts and tiles stay on the device, so that a captured graph follows the routing.
#ifndef ENGINEBAY_CUDA_MOE_ROUTE_CUH
#define ENGINEBAY_CUDA_MOE_ROUTE_CUH

#include "device.cuh"
#include "enginebay/moe.h"

namespace enginebay::cuda::moe {

constexpr int kMostExperts = 1024, kMostTopK = 32, kMostGroups = 32;

struct Routing {
  int tokens, experts, top_k;
  eb_moe_scoring scoring;
  int renormalize, num_groups, top_groups;
  float routed_scale;
  const float *logits, *bias;
  int* expert;    // [T, top_k]
  float* weight;  // [T, top_k]
};

// The best of a warp's candidates, the lower index among equals; NaN never wins.
__device__ __forceinline__ void warp_best(float* value, int* index) {
  for (int o = 16; o > 0; o /= 2) {
    const float v = __shfl_xor_sync(~0u, *value, o);
    const int i = __shfl_xor_sync(~0u, *index, o);
    if (v > *value || (v == *value && i < *index)) {
      *value = v;
      *index = i;
    }
  }
}

// A warp a token.
static __global__ void __launch_bounds__(32) route(const Routing r) {
  extern __shared__ float scores[];  // [E] scores, then [E] what experts are chosen by
  float* const choice = scores + r.experts;
  let_next_start();
  wait_for_previous();
  const int token = blockIdx.x, lane = threadIdx.x;
  const float* const logits = r.logits + int64_t{token} * r.experts;
  float top = -INFINITY;
  bool nan = false;
  for (int e = lane; e < r.experts; e += 32) {
    top = fmaxf(top, logits[e]);
    nan |= isnan(logits[e]);
  }
  for (int o = 16; o > 0; o /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
  nan = __any_sync(~0u, nan);
  float total = 0.f;
  for (int e = lane; e < r.experts; e += 32) total += expf(logits[e] - top);
  for (int o = 16; o > 0; o /= 2) total += __shfl_xor_sync(~0u, total, o);
  for (int e = lane; e < r.experts; e += 32) {
    const float v = logits[e];
    scores[e] = r.scoring == EB_SCORE_SOFTMAX   ? expf(v - top) / total
                : r.scoring == EB_SCORE_SIGMOID ? 1.f / (1.f + expf(-v))
                                                : v;
    choice[e] = scores[e] + (r.bias != nullptr ? r.bias[e] : 0.f);
  }
  __syncwarp();
  if (r.num_groups > 1) {
    // A lane a group: its rank, then every expert outside the best groups is out.
    const int each = r.experts / r.num_groups;
    float rank = -INFINITY;
    if (lane < r.num_groups) {
      float first = -INFINITY, second = -INFINITY;
      for (int i = 0; i < each; ++i) {
        const float v = choice[lane * each + i];
        if (v > first) {
          second = first;
          first = v;
        } else if (v > second) {
          second = v;
        }
      }
      rank = r.bias != nullptr && each > 1 ? first + second : first;
    }
    bool kept = false;
    float left = rank;
    for (int i = 0; i < r.top_groups; ++i) {
      float value = left;
      int index = lane < r.num_groups && !kept ? lane : 1 << 20;
      if (kept || lane >= r.num_groups) value = -INFINITY;
      warp_best(&value, &index);
      if (index == lane) kept = true;
    }
    if (lane < r.num_groups && !kept)
      for (int i = 0; i < each; ++i) choice[lane * each + i] = -INFINITY;
    __syncwarp();
  }
  float sum = 0.f, mine = 0.f, best_logit = 0.f;
  int my_expert = 0;
  for (int k = 0; k < r.top_k; ++k) {
    float value = -INFINITY;
    int index = 1 << 20;
    for (int e = lane; e < r.experts; e += 32)
      if (choice[e] > value) {
        value = choice[e];
        index = e;
      }
    warp_best(&value, &index);
    if (index >= r.experts) index = k;  // a row of NaN: any expert will do, the weight says NaN
    float weight = nan ? __int_as_float(0x7fc00000) : scores[index];
    if (r.scoring == EB_SCORE_SOFTMAX_TOPK) {
      if (k == 0) best_logit = weight;
      weight = expf(weight - best_logit);
    }
    sum += weight;
    if (lane == k) {
      mine = weight;
      my_expert = index;
    }
    __syncwarp();
    if (lane == 0) choice[index] = -INFINITY;
    __syncwarp();
  }
  if (lane < r.top_k) {
    if (r.renormalize || r.scoring == EB_SCORE_SOFTMAX_TOPK) mine /= sum;
    r.expert[int64_t{token} * r.top_k + lane] = my_expert;
    r.weight[int64_t{token} * r.top_k + lane] = mine * r.routed_scale;
  }
}

struct Sorting {
  int entries, experts, tile_rows;  // T*top_k
  const int* expert;                // [entries]
  int* place;                       // [entries]: where the entry went
  int4* tiles;
  int* tile_count;
};

// Places entries by expert and lists the tiles. One block. Entries of an expert may come in any order: no
// result depends on it.
static __global__ void __launch_bounds__(1024) sort_entries(const Sorting s) {
  __shared__ int count[kMostExperts], begin[kMostExperts], tile_begin[kMostExperts];
  let_next_start();
  wait_for_previous();
  for (int e = threadIdx.x; e < s.experts; e += 1024) count[e] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < s.entries; i += 1024) atomicAdd(count + s.expert[i], 1);
  __syncthreads();
  if (threadIdx.x == 0) {
    int rows = 0, tiles = 0;
    for (int e = 0; e < s.experts; ++e) {
      begin[e] = rows;
      tile_begin[e] = tiles;
      rows += count[e];
      tiles += ceil_div(count[e], s.tile_rows);
    }
    *s.tile_count = tiles;
  }
  __syncthreads();
  for (int e = threadIdx.x; e < s.experts; e += 1024) {
    const int end = begin[e] + count[e];
    for (int first = begin[e], tile = tile_begin[e]; first < end; first += s.tile_rows)
      s.tiles[tile++] = make_int4(e, first, end, 0);
  }
  __syncthreads();
  for (int e = threadIdx.x; e < s.experts; e += 1024) count[e] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < s.entries; i += 1024) {
    const int e = s.expert[i];
    s.place[i] = begin[e] + atomicAdd(count + e, 1);
  }
}

// Rows of x to where their experts look for them. A block an entry.
static __global__ void __launch_bounds__(128)
    spread(const uint4* x, int top_k, int pieces, const int* place, uint4* sorted) {
  let_next_start();
  wait_for_previous();
  const int64_t from = int64_t{blockIdx.x} / top_k * pieces, to = int64_t{place[blockIdx.x]} * pieces;
  for (int i = threadIdx.x; i < pieces; i += 128) sorted[to + i] = x[from + i];
}

}  // namespace enginebay::cuda::moe

#endif
