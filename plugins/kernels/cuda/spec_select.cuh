// Which tokens of a row top-k and top-p keep.
//
// extremes: maximum, its lowest id and minimum of every slice of a row. histogram: counts (top-k) or weights
// (top-p alone) by distance from the maximum, and the bin where the set ends. refine: collects what is in and
// around that bin; the row's last block finds the exact element where the set ends, and draws the token at
// once where top-k leaves few and there are no drafts.
#ifndef ENGINEBAY_CUDA_SPEC_SELECT_CUH
#define ENGINEBAY_CUDA_SPEC_SELECT_CUH

#include "spec_state.cuh"

namespace enginebay::cuda::spec {

template <typename T>
__global__ void __launch_bounds__(kThreads) extremes(const Problem p) {
  let_next_start();
  wait_for_previous();
  const int row = blockIdx.y, slice = blockIdx.x;
  const int begin = slice * p.slice, end = min(p.vocab, begin + p.slice);
  Extremes mine{-INFINITY, INFINITY, -1, 0};
  for_slice(static_cast<const T*>(p.a.logits) + int64_t{row} * p.vocab, begin, end, rows_vectorise<T>(p),
            [&](float v, int id) {
              mine.bad |= !(v < INFINITY);
              if (v > mine.best) {  // ids rise, so the first of equals stays
                mine.best = v;
                mine.id = id;
              }
              if (v > -INFINITY) mine.least = fminf(mine.least, v);
            });
  __shared__ Extremes warps[kThreads / 32];
  mine = warp_extremes(mine);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = mine;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < kThreads / 32; ++w) mine = join_extremes(mine, warps[w]);
    p.extremes[int64_t{row} * p.slices + slice] = mine;
    if (slice == 0) {
      Row state{};
      const int b = sequence_of(p, row);
      state.sequence = b;
      if (b >= 0) {
        const float t = p.a.temperature != nullptr ? p.a.temperature[b] : 0.f;
        state.inverse_temperature = t > 0.f ? fminf(1.f / t, 1e30f) : 0.f;
        const int k = p.a.top_k != nullptr ? p.a.top_k[b] : 0;
        state.top_k = k > 0 && k < p.vocab ? k : 0;
        state.top_p = p.a.top_p != nullptr ? p.a.top_p[b] : 1.f;
        state.min_p = p.a.min_p != nullptr ? fminf(p.a.min_p[b], 1.f) : 0.f;
      }
      p.rows[row] = state;
      if (p.a.row_start == nullptr) {
        p.finals[row] = {row, 0, 0};
        if (p.a.accepted != nullptr) p.a.accepted[row] = 0;
        if (p.a.path != nullptr)
          for (int i = 0; i < p.depth; ++i) p.a.path[int64_t{row} * p.depth + i] = -1;
      }
    }
  }
  // The row's bins, shared out among its blocks.
  for (int i = slice * kThreads + threadIdx.x; i < kBins; i += p.slices * kThreads) {
    p.counts[int64_t{row} * kBins + i] = 0;
    p.weights[int64_t{row} * kBins + i] = 0;
  }
}

struct Pair {
  unsigned long long count, weight;
};

// The first bin at which the running count (or, by_weight, weight) reaches `target`, and what lies before it.
// All threads of the block call it; the bins of a thread are neighbours. Where the target is never reached:
// the last bin that is not empty.
template <typename Count, typename Weight>
__device__ inline int find_bin(Count&& count, Weight&& weight, unsigned long long target, bool by_weight,
                               Pair* before, Pair* all) {
  constexpr int kEach = kBins / kThreads;
  __shared__ Pair warps[kThreads / 32];
  __shared__ Pair found_before;
  __shared__ int found;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  Pair own[kEach], sum{0, 0};
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    own[i] = {count(threadIdx.x * kEach + i), weight(threadIdx.x * kEach + i)};
    sum.count += own[i].count;
    sum.weight += own[i].weight;
  }
  Pair scan = sum;
  for (int o = 1; o < 32; o *= 2) {
    const Pair up{__shfl_up_sync(~0u, scan.count, o), __shfl_up_sync(~0u, scan.weight, o)};
    if (lane >= o) scan = {scan.count + up.count, scan.weight + up.weight};
  }
  __syncthreads();
  if (lane == 31) warps[warp] = scan;
  if (threadIdx.x == 0) found = -1;
  __syncthreads();
  Pair base{0, 0}, total{0, 0};
  for (int w = 0; w < kThreads / 32; ++w) {
    if (w == warp) base = total;
    total = {total.count + warps[w].count, total.weight + warps[w].weight};
  }
  Pair run{base.count + scan.count - sum.count, base.weight + scan.weight - sum.weight};
  const unsigned long long reachable = by_weight ? total.weight : total.count;
  const unsigned long long goal = max(1ull, min(target, reachable));
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const unsigned long long from = by_weight ? run.weight : run.count;
    const unsigned long long to = from + (by_weight ? own[i].weight : own[i].count);
    if (from < goal && to >= goal) {
      found = threadIdx.x * kEach + i;
      found_before = run;
    }
    run = {run.count + own[i].count, run.weight + own[i].weight};
  }
  __syncthreads();
  *before = found_before;
  *all = total;
  return found;
}

struct Binning {
  float best, scale;
  bool clamped;  // the last bin also holds all that lies further below the maximum
  __device__ __forceinline__ Binning(const Extremes& e, float inverse_temperature) : best(e.best) {
    const float all = e.best - e.least, range = fminf(all, kRangeNats / inverse_temperature);
    clamped = range < all;
    scale = range > 0.f ? (kBins - 1) / range : 0.f;
  }
  __device__ __forceinline__ int operator()(float v) const {
    // The conversion saturates: below 0 only where logits change while they are read.
    return static_cast<int>(min(__float2uint_rz((best - v) * scale), static_cast<unsigned>(kBins - 1)));
  }
};

__device__ inline bool is_last(unsigned* arrivals, int blocks) {
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(arrivals, 1u) == static_cast<unsigned>(blocks - 1);
  __syncthreads();
  if (last) __threadfence();
  return last;
}

__device__ __forceinline__ unsigned long long share_of(unsigned long long total, float part) {
  return static_cast<unsigned long long>(static_cast<double>(total) * fmaxf(part, 0.f));
}

template <typename T>
__global__ void __launch_bounds__(kThreads) histogram(const Problem p) {
  __shared__ unsigned count[kBins], high[kBins], low[kBins];
  let_next_start();
  for (int i = threadIdx.x; i < kBins; i += kThreads) count[i] = high[i] = low[i] = 0;
  wait_for_previous();
  const int row = blockIdx.y;
  const Row state = p.rows[row];
  const bool by_count = state.top_k > 0, by_weight = !by_count && state.top_p < 1.f;
  if (state.sequence < 0 || state.inverse_temperature == 0.f || !(by_count || by_weight)) return;
  const Extremes e = row_extremes(p, row);
  if (e.id < 0) return;
  __syncthreads();
  const Binning bin(e, state.inverse_temperature);
  // A block takes several slices: each one's bins cost as much to hand over as a slice does to count.
  const int slices = ceil_div(p.slices, static_cast<int>(gridDim.x));
  const int begin = blockIdx.x * slices * p.slice, end = min(p.vocab, begin + slices * p.slice);
  for_slice(static_cast<const T*>(p.a.logits) + int64_t{row} * p.vocab, begin, end, rows_vectorise<T>(p),
            [&](float v, int) {
              if (!(v > -INFINITY)) return;
              const int at = bin(v);
              if (by_count) {
                atomicAdd(count + at, 1u);
                return;
              }
              const uint32_t w = fixed(weight_of(v, e.best, state.inverse_temperature));
              if (w >> 16) atomicAdd(high + at, w >> 16);
              if (w & 0xffff) atomicAdd(low + at, w & 0xffff);
            });
  __syncthreads();
  for (int i = threadIdx.x; i < kBins; i += kThreads)
    if (count[i] > 0 || high[i] > 0 || low[i] > 0) {
      if (by_count) atomicAdd(p.counts + int64_t{row} * kBins + i, count[i]);
      const unsigned long long w = (static_cast<unsigned long long>(high[i]) << 16) + low[i];
      if (w > 0) atomicAdd(p.weights + int64_t{row} * kBins + i, w);
    }
  if (!is_last(&p.rows[row].histogram_arrivals, gridDim.x)) return;
  const unsigned* const counts = p.counts + int64_t{row} * kBins;
  const unsigned long long* const weights = p.weights + int64_t{row} * kBins;
  const auto count_at = [&](int i) { return static_cast<unsigned long long>(__ldcg(counts + i)); };
  const auto weight_at = [&](int i) { return __ldcg(weights + i); };
  Pair before, all;
  int at = find_bin(count_at, weight_at, by_count ? static_cast<unsigned long long>(state.top_k) : 1,
                    by_weight, &before, &all);
  unsigned long long target = static_cast<unsigned long long>(state.top_k);
  if (by_weight) {
    target = share_of(all.weight, state.top_p);
    at = find_bin(count_at, weight_at, target, true, &before, &all);
  } else if (at == kBins - 1 && bin.clamped) {
    // Fewer than k have any weight. The others would never be drawn, and sorting them out would take long.
    target = before.count;
    at = find_bin(count_at, weight_at, target, false, &before, &all);
  }
  if (threadIdx.x == 0) {
    const bool whole = by_count && before.count + count_at(at) <= kBins;
    p.rows[row].cut = {1, at, whole, before.count, before.weight, target};
  }
}

// -log(1 - u) of a random number: by its series where 1 - u would lose what distinguishes the small ones.
__device__ __forceinline__ float exponential_of(uint32_t random) {
  const float u = open_unit(random);
  return u < 0.0078125f ? u * (1.f + u * (0.5f + u * (0.33333334f + u * 0.25f))) : -__logf(1.f - u);
}

__device__ __forceinline__ void keep_better(float* cost, int* id, float other_cost, int other_id) {
  if (other_cost < *cost ||
      (other_cost == *cost && static_cast<unsigned>(other_id) < static_cast<unsigned>(*id))) {
    *cost = other_cost;
    *id = other_id;
  }
}

__device__ __forceinline__ float value_of(unsigned long long composite) {
  const auto key = static_cast<uint32_t>(composite >> 32);
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// The list's composites, falling: a bitonic sort of the next power of two in shared memory. All threads of a
// block.
template <typename T>
__device__ inline void sort_list(const Problem& p, int row, int size, unsigned long long* sorted) {
  const T* const logits = static_cast<const T*>(p.a.logits) + int64_t{row} * p.vocab;
  int padded = 32;
  while (padded < size) padded *= 2;
  for (int i = threadIdx.x; i < padded; i += kThreads) {
    sorted[i] = 0;
    if (i < size) {
      const int id = __ldcg(p.lists + int64_t{row} * kList + i);
      sorted[i] = composite(to_float(logits[id]), id);
    }
  }
  for (int width = 2; width <= padded; width *= 2)
    for (int step = width / 2; step > 0; step /= 2) {
      __syncthreads();
      for (int i = threadIdx.x; i < padded / 2; i += kThreads) {
        const int low = 2 * i - (i & (step - 1)), high = low + step;
        const bool falling = (low & width) == 0;
        const unsigned long long a = sorted[low], b = sorted[high];
        if ((a < b) == falling) {
          sorted[low] = b;
          sorted[high] = a;
        }
      }
    }
  __syncthreads();
}

// The composite at which the elements `visit` goes through reach `target`, by count or by weight, from
// `above` on: the interval that holds it shrinks to one element in a few rounds of a histogram. All threads
// of a block.
template <typename Visit>
__device__ inline unsigned long long narrow(Visit&& visit, unsigned long long* bin_count,
                                            unsigned long long* bin_weight, Pair above,
                                            unsigned long long target, bool by_weight, float best,
                                            float inverse_temperature, unsigned long long low) {
  __shared__ unsigned long long least, most;
  unsigned long long high = ~0ull;
  for (;;) {
    __syncthreads();
    if (threadIdx.x == 0) {
      least = ~0ull;
      most = 0;
    }
    for (int i = threadIdx.x; i < kBins; i += kThreads) bin_count[i] = bin_weight[i] = 0;
    __syncthreads();
    unsigned long long my_least = ~0ull, my_most = 0;
    visit([&](float v, int id) {
      const unsigned long long c = composite(v, id);
      if (c < low || c > high) return;
      my_least = min(my_least, c);
      my_most = max(my_most, c);
    });
    if (my_least <= my_most) {
      atomicMin(&least, my_least);
      atomicMax(&most, my_most);
    }
    __syncthreads();
    low = least;
    high = most;
    if (low >= high) return low;
    const int shift = max(0, 64 - __clzll(static_cast<long long>(high - low)) - 11);
    visit([&](float v, int id) {
      const unsigned long long c = composite(v, id);
      if (c < low || c > high) return;
      const auto at = static_cast<int>((high - c) >> shift);
      atomicAdd(bin_count + at, 1ull);
      atomicAdd(bin_weight + at,
                static_cast<unsigned long long>(fixed(weight_of(v, best, inverse_temperature))));
    });
    __syncthreads();
    Pair before, all;
    const unsigned long long done = by_weight ? above.weight : above.count;
    const int at = find_bin([&](int i) { return bin_count[i]; }, [&](int i) { return bin_weight[i]; },
                            target > done ? target - done : 1, by_weight, &before, &all);
    if (at < 0) return low;  // no weight is left: everything is kept
    above = {above.count + before.count, above.weight + before.weight};
    const unsigned long long next_high = high - (static_cast<unsigned long long>(at) << shift);
    low = max(low, next_high - ((1ull << shift) - 1));
    high = next_high;
  }
}

// Draws a row's token from the `kept` best, which are in order. All threads of a block.
__device__ inline void choose_from_list(const Problem& p, int row, const unsigned long long* sorted, int kept,
                                        float best, float inverse_temperature) {
  const uint64_t seed = p.a.seeds != nullptr ? p.a.seeds[row] : 0;
  const int64_t position = p.a.positions != nullptr ? p.a.positions[row] : 0;
  const float min_p = p.rows[row].min_p;
  float cost = INFINITY;
  int id = -1;
  for (int i = threadIdx.x; i < kept; i += kThreads) {
    const float v = value_of(sorted[i]);
    if (weight_of(v, best, inverse_temperature) < min_p) continue;
    const int token = static_cast<int>(~static_cast<uint32_t>(sorted[i]));
    const Random4 random = token_random(seed, position, 0, token);
    const float drawn = exponential_of(word_of(random, token));
    keep_better(&cost, &id, drawn * fast_exp2((best - v) * inverse_temperature * kLog2e), token);
  }
  __shared__ float costs[kThreads / 32];
  __shared__ int ids[kThreads / 32];
  for (int o = 16; o > 0; o /= 2) {
    const float other = __shfl_xor_sync(~0u, cost, o);
    const int other_id = __shfl_xor_sync(~0u, id, o);
    keep_better(&cost, &id, other, other_id);
  }
  if (threadIdx.x % 32 == 0) {
    costs[threadIdx.x / 32] = cost;
    ids[threadIdx.x / 32] = id;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < kThreads / 32; ++w) keep_better(&cost, &id, costs[w], ids[w]);
    p.a.next_token[row] = id >= 0 ? id : static_cast<int>(~static_cast<uint32_t>(sorted[0]));
    p.rows[row].done = 1;
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads) refine(const Problem p) {
  let_next_start();
  wait_for_previous();
  const int row = blockIdx.y, slice = blockIdx.x;
  Row* const state_at = p.rows + row;
  const Cut cut = state_at->cut;
  if (!cut.active) return;
  const float inverse_temperature = state_at->inverse_temperature;
  const Extremes e = row_extremes(p, row);
  const Binning bin(e, inverse_temperature);
  const T* const logits = static_cast<const T*>(p.a.logits) + int64_t{row} * p.vocab;
  const int begin = slice * p.slice, end = min(p.vocab, begin + p.slice);
  for_slice(logits, begin, end, rows_vectorise<T>(p), [&](float v, int id) {
    if (!(v > -INFINITY)) return;
    const int at = bin(v);
    if (at == cut.bin || (cut.whole && at < cut.bin)) {
      const int place = atomicAdd(&state_at->list_size, 1);
      if (place < kList) p.lists[int64_t{row} * kList + place] = id;
    }
  });
  if (!is_last(&state_at->refine_arrivals, p.slices)) return;

  __shared__ unsigned long long bin_count[kBins], bin_weight[kBins];
  const int size = __ldcg(&state_at->list_size), top_k = state_at->top_k;
  const float top_p = state_at->top_p;
  const auto row_elements = [&](auto&& body) {
    for_slice(logits, 0, p.vocab, rows_vectorise<T>(p), [&](float v, int id) {
      if (v > -INFINITY) body(v, id);
    });
  };
  const auto bin_elements = [&](auto&& body) {
    const auto of_bin = [&](float v, int id) {
      if (bin(v) == cut.bin) body(v, id);
    };
    if (size > kList) return row_elements(of_bin);
    for (int i = threadIdx.x; i < size; i += kThreads) {
      const int id = __ldcg(p.lists + int64_t{row} * kList + i);
      of_bin(to_float(logits[id]), id);
    }
  };
  unsigned long long last;
  if (size > 0 && size <= kBins) {
    // Few elements: in order, so that each is a bin of its own.
    unsigned long long* const sorted = bin_count;
    sort_list<T>(p, row, size, sorted);
    const int left = static_cast<int>(cut.target - cut.count_before);
    const int kept = top_k == 0 ? size : min(size, cut.whole ? top_k : left);
    Pair before, all;
    const auto count = [&](int i) { return i < kept ? 1ull : 0ull; };
    const auto weight = [&](int i) {
      return i < kept ? static_cast<unsigned long long>(
                            fixed(weight_of(value_of(sorted[i]), e.best, inverse_temperature)))
                      : 0ull;
    };
    int at = kept - 1;
    bool found_weight = false;  // `before` is the weight of what is better than `at`
    if (top_k == 0) {
      const unsigned long long rest = cut.target > cut.weight_before ? cut.target - cut.weight_before : 1;
      const int found = find_bin(count, weight, rest, true, &before, &all);
      if (found >= 0) at = found;
      found_weight = found >= 0;
    } else if (cut.whole && top_p < 1.f) {
      find_bin(count, weight, 1, true, &before, &all);
      at = find_bin(count, weight, share_of(all.weight, top_p), true, &before, &all);
      found_weight = true;
    }
    last = sorted[at];
    if (threadIdx.x == 0 && found_weight && state_at->min_p <= 0.f) {
      const unsigned long long kept_weight =
          (top_k == 0 ? cut.weight_before : 0) + before.weight + weight(at);
      state_at->total = static_cast<float>(static_cast<double>(kept_weight) * 0x1p-31);
    }
    if (p.a.row_start == nullptr && top_k > 0 && cut.whole)
      choose_from_list(p, row, sorted, at + 1, e.best, inverse_temperature);
  } else {
    last = narrow(bin_elements, bin_count, bin_weight, {cut.count_before, cut.weight_before}, cut.target,
                  top_k == 0, e.best, inverse_temperature, 0);
  }
  if (top_k > 0 && top_p < 1.f && !(cut.whole && size <= kBins)) {
    // More ties than the list holds: top-p's share of what top-k keeps, from the row itself.
    __shared__ unsigned long long total;
    __syncthreads();
    if (threadIdx.x == 0) total = 0;
    __syncthreads();
    unsigned long long mine = 0;
    row_elements([&](float v, int id) {
      if (composite(v, id) >= last) mine += fixed(weight_of(v, e.best, inverse_temperature));
    });
    atomicAdd(&total, mine);
    __syncthreads();
    last = narrow(row_elements, bin_count, bin_weight, {0, 0}, share_of(total, top_p), true, e.best,
                  inverse_temperature, last);
  }
  if (threadIdx.x == 0) {
    state_at->last = last;
    state_at->listed = cut.whole && size <= kBins ? size : 0;
  }
}

}  // namespace enginebay::cuda::spec

#endif
