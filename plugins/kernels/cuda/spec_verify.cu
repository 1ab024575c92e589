// SpecVerify and Sample. Several blocks share a row of logits; between kernels a row's state lies in the
// workspace.
//
//   penalise   edits the few logits that penalties name
//   extremes   maximum, its lowest id and minimum of every slice
//   histogram  counts and weights by distance from the maximum, then the bins where top-k and top-p end
//   refine     twice: the elements of such a bin, and in the row's last block the exact element where the set
//   ends totals     weights of what is left (only where drafts wait for an answer) accept     walks the
//   drafts of each sequence choose     draws the next token: argmin of an exponential variable over the
//   weight
//
// Weights exp((logit - max)/temperature) are summed as integers of 2^-31, so no sum depends on an order.
#include "../philox.h"
#include "device.cuh"
#include "enginebay/spec_verify.h"

namespace enginebay::cuda {
namespace {

constexpr int kThreads = 256, kBins = 2048, kMostSlices = 32, kList = 4096, kSlice = 8192;
constexpr float kLog2e = 1.4426950408889634f;
// A block's histogram counts in 32 bits: 2^31 over the 2^15 of a weight's upper half.
constexpr int kMostCounted = 32768;
constexpr float kRangeNats = 40.f;  // what lies further below the maximum has no weight

struct Extremes {
  float best, least;
  int id;   // of best, the lowest; -1: no finite logit
  int bad;  // NaN or +infinity
};

// Where the set of the best ends: in `bin`, once `target` is reached by counting (top-k) or weighing (top-p
// alone).
struct Cut {
  int active, bin;
  int whole;                         // the list takes the better bins too
  unsigned long long count_before;   // elements in better bins
  unsigned long long weight_before;  // and their weight
  unsigned long long target;
};

struct Row {
  int sequence;               // -1: padding
  float inverse_temperature;  // 0: greedy
  int top_k;
  float top_p, min_p;
  Cut cut;
  unsigned long long last;  // the least composite kept; 0: all
  unsigned histogram_arrivals, refine_arrivals;
  int list_size;
};

struct Final {
  int row;    // where the walk ended, in the whole batch
  int tried;  // its children were refused: they are taken out
  unsigned arrivals;
};

struct Best {
  float cost, spare_cost;  // spare: had no draft been refused
  int id, spare_id;
};

struct Problem {
  eb_spec_verify_args a;
  int vocab, depth, slices, slice;
  // In the workspace:
  Row* rows;
  Extremes* extremes;           // [R, slices]
  unsigned* counts;             // [R, kBins]
  unsigned long long* weights;  // [R, kBins]
  int* lists;                   // [R, kList]
  float* totals;                // [R, slices]
  float* norms;                 // [R]: sum of (p - q)+ where draft r was refused
  Final* finals;                // [B]
  Best* bests;                  // [B, slices]
};

struct Layout {
  size_t rows, extremes, counts, weights, lists, totals, norms, finals, bests, total;
  int slices, slice;

  Layout(int vocab, int64_t sequences, int64_t row_count) {
    slices = ceil_div(vocab, kSlice);
    slices = slices < kMostSlices ? slices : kMostSlices;
    slice = ceil_div(ceil_div(vocab, slices), 8) * 8;
    slices = ceil_div(vocab, slice);
    const auto r = static_cast<size_t>(row_count), b = static_cast<size_t>(sequences),
               s = static_cast<size_t>(slices);
    size_t at = 0;
    const auto take = [&](size_t bytes) {
      const size_t here = at;
      at += (bytes + 255) / 256 * 256;
      return here;
    };
    rows = take(r * sizeof(Row));
    extremes = take(r * s * sizeof(Extremes));
    counts = take(r * kBins * sizeof(unsigned));
    weights = take(r * kBins * sizeof(unsigned long long));
    lists = take(r * kList * sizeof(int));
    totals = take(r * s * sizeof(float));
    norms = take(r * sizeof(float));
    finals = take(b * sizeof(Final));
    bests = take(b * s * sizeof(Best));
    total = at;
  }
};

// Order of floats as unsigned integers; a composite breaks ties by id, lower ids first.
__device__ __forceinline__ uint32_t order_key(float v) {
  const uint32_t b = __float_as_uint(v);
  return b & 0x80000000u ? ~b : b | 0x80000000u;
}
__device__ __forceinline__ unsigned long long composite(float v, int id) {
  return static_cast<unsigned long long>(order_key(v)) << 32 | static_cast<uint32_t>(~id);
}

__device__ __forceinline__ float weight_of(float v, float best, float inverse_temperature) {
  return fast_exp2((v - best) * inverse_temperature * kLog2e);
}
__device__ __forceinline__ uint32_t fixed(float weight) { return __float2uint_rn(weight * 2147483648.f); }

// body(value, id) for ids [begin, end) of a row, 16 bytes at a time where rows allow it; end excluded by the
// caller's range.
template <typename T, typename Body>
__device__ __forceinline__ void for_slice(const T* row, int begin, int end, bool vectors, Body&& body) {
  constexpr int kPer = 16 / sizeof(T);
  if (vectors) {
    for (int i = begin + threadIdx.x * kPer; i < end; i += kThreads * kPer) {
      const uint4 raw = *reinterpret_cast<const uint4*>(row + i);
      T v[kPer];
      memcpy(v, &raw, 16);
#pragma unroll
      for (int j = 0; j < kPer; ++j) body(to_float(v[j]), i + j);
    }
  } else {
    for (int i = begin + threadIdx.x; i < end; i += kThreads) body(to_float(row[i]), i);
  }
}

template <typename T>
__device__ __forceinline__ bool rows_vectorise(const Problem& p) {
  return p.vocab % (16 / static_cast<int>(sizeof(T))) == 0 &&
         reinterpret_cast<uintptr_t>(p.a.logits) % 16 == 0;
}

__device__ inline Extremes row_extremes(const Problem& p, int row) {
  Extremes all{-INFINITY, INFINITY, -1, 0};
  for (int s = 0; s < p.slices; ++s) {
    const Extremes e = p.extremes[int64_t{row} * p.slices + s];
    if (e.best > all.best) {
      all.best = e.best;
      all.id = e.id;
    }
    all.least = fminf(all.least, e.least);
    all.bad |= e.bad;
  }
  if (all.bad) all.id = -1;
  return all;
}

__device__ inline int sequence_of(const Problem& p, int row) {
  if (p.a.row_start == nullptr) return row;
  int low = 0, high = static_cast<int>(p.a.sequences);
  if (high == 0 || row < p.a.row_start[0] || row >= p.a.row_start[high]) return -1;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (p.a.row_start[middle] <= row ? low : high) = middle;
  }
  return row < p.a.row_start[low + 1] ? low : -1;
}

template <typename T>
__global__ void penalise(const Problem p) {
  let_next_start();
  wait_for_previous();
  const int row = blockIdx.x, b = sequence_of(p, row);
  if (b < 0) return;
  const float repetition = p.a.repetition != nullptr ? p.a.repetition[b] : 1.f;
  const float presence = p.a.presence != nullptr ? p.a.presence[b] : 0.f;
  const float frequency = p.a.frequency != nullptr ? p.a.frequency[b] : 0.f;
  T* const logits = static_cast<T*>(p.a.logits) + int64_t{row} * p.vocab;
  for (int i = p.a.penalty_start[row] + threadIdx.x; i < p.a.penalty_start[row + 1]; i += blockDim.x) {
    const int token = p.a.penalty_tokens[i], count = p.a.penalty_counts[i];
    if (token < 0 || token >= p.vocab) continue;
    float v = to_float(logits[token]);
    v = v > 0.f ? v / repetition : v * repetition;
    if (count > 0) v -= presence + frequency * static_cast<float>(count);
    logits[token] = from_float<T>(v);
  }
}

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
  const auto join = [](Extremes a, const Extremes& b) {
    if (b.best > a.best || (b.best == a.best && static_cast<unsigned>(b.id) < static_cast<unsigned>(a.id))) {
      a.best = b.best;
      a.id = b.id;
    }
    a.least = fminf(a.least, b.least);
    a.bad |= b.bad;
    return a;
  };
  for (int o = 16; o > 0; o /= 2)
    mine = join(mine, Extremes{__shfl_xor_sync(~0u, mine.best, o), __shfl_xor_sync(~0u, mine.least, o),
                               __shfl_xor_sync(~0u, mine.id, o), __shfl_xor_sync(~0u, mine.bad, o)});
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = mine;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < kThreads / 32; ++w) mine = join(mine, warps[w]);
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
  __device__ __forceinline__ Binning(const Extremes& e, float inverse_temperature) : best(e.best) {
    const float range = fminf(e.best - e.least, kRangeNats / inverse_temperature);
    scale = range > 0.f ? (kBins - 1) / range : 0.f;
  }
  __device__ __forceinline__ int operator()(float v) const {
    return static_cast<int>(fminf((best - v) * scale, static_cast<float>(kBins - 1)));
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
  }
  if (threadIdx.x == 0) {
    const bool whole = by_count && before.count + count_at(at) <= kBins;
    p.rows[row].cut = {1, at, whole, before.count, before.weight, target};
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
    for (int i = threadIdx.x; i < p.vocab; i += kThreads) {
      const float v = to_float(logits[i]);
      if (v > -INFINITY) body(v, i);
    }
  };
  const auto bin_elements = [&](auto&& body) {
    row_elements([&](float v, int id) {
      if (bin(v) == cut.bin) body(v, id);
    });
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
    if (top_k == 0) {
      const unsigned long long rest = cut.target > cut.weight_before ? cut.target - cut.weight_before : 1;
      const int found = find_bin(count, weight, rest, true, &before, &all);
      if (found >= 0) at = found;
    } else if (cut.whole && top_p < 1.f) {
      find_bin(count, weight, 1, true, &before, &all);
      at = find_bin(count, weight, share_of(all.weight, top_p), true, &before, &all);
    }
    last = sorted[at];
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
  if (threadIdx.x == 0) state_at->last = last;
}

// Weight of a logit in the row's filtered distribution, unnormalised.
struct Filter {
  float best, inverse_temperature, min_p;
  unsigned long long last;
  __device__ __forceinline__ Filter(const Row& state, const Extremes& e)
      : best(e.best), inverse_temperature(state.inverse_temperature), min_p(state.min_p), last(state.last) {}
  __device__ __forceinline__ float operator()(float v, int id) const {
    if (!(v > -INFINITY) || composite(v, id) < last) return 0.f;
    const float w = weight_of(v, best, inverse_temperature);
    return w >= min_p ? w : 0.f;
  }
};

__device__ inline float block_sum(float v) {
  __shared__ float warps[kThreads / 32];
  for (int o = 16; o > 0; o /= 2) v += __shfl_xor_sync(~0u, v, o);
  __syncthreads();
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = v;
  __syncthreads();
  float sum = 0.f;
  for (int w = 0; w < kThreads / 32; ++w) sum += warps[w];
  return sum;
}

template <typename T>
__global__ void __launch_bounds__(kThreads) totals(const Problem p) {
  let_next_start();
  wait_for_previous();
  const int row = blockIdx.y, slice = blockIdx.x;
  const Row state = p.rows[row];
  if (state.sequence < 0 || state.inverse_temperature == 0.f) return;
  const Extremes e = row_extremes(p, row);
  const Filter filter(state, e);
  float sum = 0.f;
  const int begin = slice * p.slice, end = min(p.vocab, begin + p.slice);
  for_slice(static_cast<const T*>(p.a.logits) + int64_t{row} * p.vocab, begin, end, rows_vectorise<T>(p),
            [&](float v, int id) { sum += filter(v, id); });
  sum = block_sum(sum);
  if (threadIdx.x == 0) p.totals[int64_t{row} * p.slices + slice] = sum;
}

__device__ inline float row_total(const Problem& p, int row) {
  float sum = 0.f;
  for (int s = 0; s < p.slices; ++s) sum += p.totals[int64_t{row} * p.slices + s];
  return sum;
}

__device__ __forceinline__ int parent_of(const Problem& p, int first, int node) {
  return p.a.parents != nullptr ? p.a.parents[first + node] : node - 1;
}

// p after the refusals so far at node `at`: those of its children that stand before `until`.
template <typename T>
__device__ inline float left_over(const Problem& p, const Filter& filter, float inverse_total, int first,
                                  int nodes, int at, int until, int token) {
  const int row = first + at;
  float w = filter(to_float(static_cast<const T*>(p.a.logits)[int64_t{row} * p.vocab + token]), token) *
            inverse_total;
  for (int child = at + 1; child < until && child < nodes && w > 0.f; ++child) {
    if (parent_of(p, first, child) != at) continue;
    if (p.a.draft_probs == nullptr)
      w = p.a.draft_tokens[first + child] == token ? 0.f : w;
    else
      w = fmaxf(w - p.a.draft_probs[int64_t{first + child} * p.vocab + token], 0.f) / p.norms[first + child];
  }
  return w;
}

// One block a sequence: all threads walk alike, and share only the sums over the vocabulary.
template <typename T>
__global__ void __launch_bounds__(kThreads) accept(const Problem p) {
  let_next_start();
  wait_for_previous();
  const int b = blockIdx.x, first = p.a.row_start[b], nodes = p.a.row_start[b + 1] - first;
  int at = 0, accepted = 0, tried = 1;
  if (nodes > 0 && first >= 0 && first + nodes <= p.a.rows) {
    const float t = p.a.temperature != nullptr ? p.a.temperature[b] : 0.f;
    const uint64_t seed = p.a.seeds != nullptr ? p.a.seeds[b] : 0;
    const int64_t position = p.a.positions != nullptr ? p.a.positions[b] : 0;
    for (;;) {
      if (accepted >= p.depth) {
        tried = 0;
        break;
      }
      const int row = first + at;
      const Extremes e = row_extremes(p, row);
      if (e.id < 0) break;
      const Row state = p.rows[row];
      const Filter filter(state, e);
      const float inverse_total = t > 0.f ? 1.f / row_total(p, row) : 0.f;
      float refused = 0.f;  // one-hot drafts: probability taken out so far
      int next = -1;
      for (int child = at + 1; child < nodes && next < 0; ++child) {
        if (parent_of(p, first, child) != at) continue;
        const int token = p.a.draft_tokens[first + child];
        const bool known = token >= 0 && token < p.vocab;
        if (!(t > 0.f)) {
          if (token == e.id) next = child;
          continue;
        }
        const float u = accept_random(seed, position, child);
        if (p.a.draft_probs == nullptr) {
          const float w =
              known ? left_over<T>(p, filter, inverse_total, first, nodes, at, child, token) : 0.f;
          if (w > 0.f && u * (1.f - refused) < w)
            next = child;
          else
            refused += w;
          continue;
        }
        const float* const q = p.a.draft_probs + int64_t{first + child} * p.vocab;
        const float w = known ? left_over<T>(p, filter, inverse_total, first, nodes, at, child, token) : 0.f;
        if (w > 0.f && u * q[token] < w) {
          next = child;
          continue;
        }
        // A later child is weighed against the residual's norm; the final choice needs none.
        bool more = false;
        for (int later = child + 1; later < nodes && !more; ++later) more = parent_of(p, first, later) == at;
        float sum = more ? 0.f : 1.f;
        if (more) {
          for (int i = threadIdx.x; i < p.vocab; i += kThreads)
            sum += fmaxf(left_over<T>(p, filter, inverse_total, first, nodes, at, child, i) - q[i], 0.f);
          sum = block_sum(sum);
        }
        if (threadIdx.x == 0) p.norms[first + child] = sum > 0.f ? sum : 1.f;
        __threadfence_block();
        __syncthreads();
      }
      if (next < 0) break;
      if (threadIdx.x == 0 && p.a.path != nullptr) p.a.path[int64_t{b} * p.depth + accepted] = next;
      at = next;
      ++accepted;
    }
  }
  if (threadIdx.x == 0) {
    if (p.a.path != nullptr)
      for (int i = accepted; i < p.depth; ++i) p.a.path[int64_t{b} * p.depth + i] = -1;
    if (p.a.accepted != nullptr) p.a.accepted[b] = accepted;
    const bool there = nodes > 0 && first >= 0 && first + nodes <= p.a.rows;
    p.finals[b] = {there ? first + at : -1, tried, 0};
  }
}

__global__ void start_finals(const Problem p) {
  let_next_start();
  wait_for_previous();
  const int b = blockIdx.x * blockDim.x + threadIdx.x;
  if (b < p.a.sequences) {
    p.finals[b] = {b, 0, 0};
    if (p.a.accepted != nullptr) p.a.accepted[b] = 0;
    if (p.a.path != nullptr)
      for (int i = 0; i < p.depth; ++i) p.a.path[int64_t{b} * p.depth + i] = -1;
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

template <typename T>
__global__ void __launch_bounds__(kThreads) choose(const Problem p) {
  let_next_start();
  wait_for_previous();
  const int b = blockIdx.y, slice = blockIdx.x;
  const Final end_of_walk = p.finals[b];
  const int row = end_of_walk.row;
  if (row < 0) {
    if (slice == 0 && threadIdx.x == 0) p.a.next_token[b] = -1;
    return;
  }
  const Extremes e = row_extremes(p, row);
  const Row state = p.rows[row];
  if (e.id < 0 || state.inverse_temperature == 0.f) {
    if (slice == 0 && threadIdx.x == 0) p.a.next_token[b] = e.id;
    return;
  }
  const int first = p.a.row_start != nullptr ? p.a.row_start[b] : b;
  const int nodes = p.a.row_start != nullptr ? p.a.row_start[b + 1] - first : 1, node = row - first;
  const bool refusals = end_of_walk.tried && nodes > node + 1;
  const Filter filter(state, e);
  const float inverse_total = refusals ? 1.f / row_total(p, row) : 1.f;
  const uint64_t seed = p.a.seeds != nullptr ? p.a.seeds[b] : 0;
  const int64_t position = p.a.positions != nullptr ? p.a.positions[b] : 0;

  Best best{INFINITY, INFINITY, -1, -1};
  Random4 random{};
  const int begin = slice * p.slice, end = min(p.vocab, begin + p.slice);
  const T* const logits = static_cast<const T*>(p.a.logits) + int64_t{row} * p.vocab;
  const bool vectors = rows_vectorise<T>(p);
  const float exponent_scale = state.inverse_temperature * kLog2e;
  const auto random_of = [&](int id) {
    const int at = id % 4;
    return at == 0   ? random.value[0]
           : at == 1 ? random.value[1]
           : at == 2 ? random.value[2]
                     : random.value[3];
  };
  const auto draw = [&](int id) {
    // Ids rise by one inside a vector, which holds whole groups of four.
    if (!vectors || id % 4 == 0) random = token_random(seed, position, node, id);
    return random_of(id);
  };
  if (!refusals) {
    // The exponential over the weight, without a division: weight is 2^x.
    const auto weigh = [&](float v, int id, uint32_t drawn) {
      const float cost = exponential_of(drawn) * fast_exp2((e.best - v) * exponent_scale);
      if (cost < best.cost) {
        best.cost = cost;
        best.id = id;
      }
    };
    if (state.last == 0 && state.min_p <= 0.f) {
      for_slice(logits, begin, end, vectors, [&](float v, int id) { weigh(v, id, draw(id)); });
    } else {
      const auto least_key = static_cast<uint32_t>(state.last >> 32);
      for_slice(logits, begin, end, vectors, [&](float v, int id) {
        if (order_key(v) < least_key || !(filter(v, id) > 0.f)) return;
        random = token_random(seed, position, node, id);
        weigh(v, id, random_of(id));
      });
    }
  } else {
    for_slice(logits, begin, end, vectors, [&](float v, int id) {
      const uint32_t drawn = draw(id);
      const float whole = filter(v, id);
      if (!(whole > 0.f)) return;
      const float exponential = exponential_of(drawn);
      const float weight = left_over<T>(p, filter, inverse_total, first, nodes, node, nodes, id);
      if (weight > 0.f) keep_better(&best.cost, &best.id, exponential / weight, id);
      keep_better(&best.spare_cost, &best.spare_id, exponential / whole, id);
    });
  }
  const auto join = [](Best a, const Best& o) {
    keep_better(&a.cost, &a.id, o.cost, o.id);
    keep_better(&a.spare_cost, &a.spare_id, o.spare_cost, o.spare_id);
    return a;
  };
  for (int o = 16; o > 0; o /= 2)
    best = join(best, Best{__shfl_xor_sync(~0u, best.cost, o), __shfl_xor_sync(~0u, best.spare_cost, o),
                           __shfl_xor_sync(~0u, best.id, o), __shfl_xor_sync(~0u, best.spare_id, o)});
  __shared__ Best warps[kThreads / 32];
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = best;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < kThreads / 32; ++w) best = join(best, warps[w]);
    p.bests[int64_t{b} * p.slices + slice] = best;
  }
  if (!is_last(&p.finals[b].arrivals, p.slices)) return;
  if (threadIdx.x == 0) {
    best = Best{INFINITY, INFINITY, -1, -1};
    for (int s = 0; s < p.slices; ++s) {
      const Best* const o = p.bests + int64_t{b} * p.slices + s;
      best = join(best, Best{__ldcg(&o->cost), __ldcg(&o->spare_cost), __ldcg(&o->id), __ldcg(&o->spare_id)});
    }
    // Nothing left means that p and q agree to the last bit: then p itself is as good.
    p.a.next_token[b] = best.id >= 0 ? best.id : best.spare_id >= 0 ? best.spare_id : e.id;
  }
}

template <typename T>
eb_status run(const eb_context* context, const Device& device, const Problem& p) {
  const cudaStream_t stream = stream_of(context);
  const auto rows = static_cast<unsigned>(p.a.rows), sequences = static_cast<unsigned>(p.a.sequences);
  const dim3 by_row(static_cast<unsigned>(p.slices), rows),
      by_sequence(static_cast<unsigned>(p.slices), sequences);
  const dim3 threads(kThreads);
  const unsigned fill = ceil_div(4u * static_cast<unsigned>(device.multiprocessors), rows);
  const dim3 by_few(min(static_cast<unsigned>(p.slices),
                        max(static_cast<unsigned>(ceil_div(p.vocab, kMostCounted)), max(2u, fill))),
                    rows);
  const bool drafts = p.a.row_start != nullptr;
  if (p.a.penalty_start != nullptr)
    EB_RETURN_IF_CUDA(context, launch(device, stream, dim3(rows), threads, 0, 1, penalise<T>, p));
  EB_RETURN_IF_CUDA(context, launch(device, stream, by_row, threads, 0, 1, extremes<T>, p));
  if (p.a.temperature != nullptr && (p.a.top_k != nullptr || p.a.top_p != nullptr)) {
    EB_RETURN_IF_CUDA(context, launch(device, stream, by_few, threads, 0, 1, histogram<T>, p));
    EB_RETURN_IF_CUDA(context, launch(device, stream, by_row, threads, 0, 1, refine<T>, p));
  }
  if (drafts) {
    if (p.a.temperature != nullptr)
      EB_RETURN_IF_CUDA(context, launch(device, stream, by_row, threads, 0, 1, totals<T>, p));
    EB_RETURN_IF_CUDA(context, launch(device, stream, dim3(sequences), threads, 0, 1, accept<T>, p));
  } else {
    EB_RETURN_IF_CUDA(
        context, launch(device, stream, dim3(ceil_div(sequences, 256u)), threads, 0, 1, start_finals, p));
  }
  EB_RETURN_IF_CUDA(context, launch(device, stream, by_sequence, threads, 0, 1, choose<T>, p));
  return EB_OK;
}

eb_status check(const eb_context* context, const eb_spec_verify_desc* d, int64_t sequences, int64_t rows) {
  EB_RETURN_IF_ERROR(check_context(context));
  if (d == nullptr) return fail(context, EB_INVALID_ARGUMENT, "SpecVerify: desc is NULL");
  if (d->vocab <= 0 || d->max_depth < 0)
    return fail(context, EB_INVALID_ARGUMENT,
                "SpecVerify: vocab %d must be positive, max_depth %d not negative", d->vocab, d->max_depth);
  if (d->dtype != EB_F32 && d->dtype != EB_F16 && d->dtype != EB_BF16)
    return fail(context, EB_UNSUPPORTED, "SpecVerify: logits %s; it has float32, float16 and bfloat16",
                dtype_name(d->dtype));
  if (sequences < 0 || rows < sequences || rows > 65535)
    return fail(context, EB_INVALID_ARGUMENT,
                "SpecVerify: %lld sequences, %lld rows; at least one a sequence, at most 65535",
                static_cast<long long>(sequences), static_cast<long long>(rows));
  return EB_OK;
}

}  // namespace
}  // namespace enginebay::cuda

extern "C" {

using namespace enginebay;
using namespace enginebay::cuda;

eb_status eb_spec_verify_workspace_size(const eb_context* context, const eb_spec_verify_desc* desc,
                                        int64_t sequences, int64_t rows, size_t* workspace_bytes) {
  EB_RETURN_IF_ERROR(check(context, desc, sequences, rows));
  if (workspace_bytes == nullptr)
    return fail(context, EB_INVALID_ARGUMENT, "SpecVerify: workspace_bytes is NULL");
  *workspace_bytes = Layout(desc->vocab, sequences, rows).total;
  return EB_OK;
}

eb_status eb_spec_verify_run(const eb_context* context, const eb_spec_verify_desc* desc,
                             const eb_spec_verify_args* args, void* workspace, size_t workspace_bytes) {
  EB_RETURN_IF_ERROR(check_context(context));
  if (args == nullptr) return fail(context, EB_INVALID_ARGUMENT, "SpecVerify: args is NULL");
  EB_RETURN_IF_ERROR(check(context, desc, args->sequences, args->rows));
  if (args->sequences == 0) return EB_OK;
  if (args->logits == nullptr || args->next_token == nullptr)
    return fail(context, EB_INVALID_ARGUMENT, "SpecVerify: logits %p, next_token %p; neither may be NULL",
                args->logits, static_cast<void*>(args->next_token));
  if (args->row_start == nullptr && args->rows != args->sequences)
    return fail(context, EB_INVALID_ARGUMENT, "SpecVerify: %lld rows of %lld sequences without row_start",
                static_cast<long long>(args->rows), static_cast<long long>(args->sequences));
  if (args->row_start != nullptr && (args->draft_tokens == nullptr || args->accepted == nullptr))
    return fail(context, EB_INVALID_ARGUMENT, "SpecVerify: row_start without draft_tokens or accepted");
  const int penalties = (args->penalty_start != nullptr) + (args->penalty_tokens != nullptr) +
                        (args->penalty_counts != nullptr);
  if (penalties != 0 && penalties != 3)
    return fail(context, EB_INVALID_ARGUMENT,
                "SpecVerify: penalty_start, penalty_tokens and penalty_counts go together");
  const Layout layout(desc->vocab, args->sequences, args->rows);
  if (workspace == nullptr || reinterpret_cast<uintptr_t>(workspace) % 256 != 0 ||
      workspace_bytes < layout.total)
    return fail(context, EB_INVALID_ARGUMENT,
                "SpecVerify: workspace %p of %zu bytes; it takes %zu, aligned to 256 bytes", workspace,
                workspace_bytes, layout.total);
  Device device;
  EB_RETURN_IF_ERROR(current_device(context, &device));
  auto* const base = static_cast<uint8_t*>(workspace);
  const Problem problem{*args,
                        desc->vocab,
                        desc->max_depth,
                        layout.slices,
                        layout.slice,
                        reinterpret_cast<Row*>(base + layout.rows),
                        reinterpret_cast<Extremes*>(base + layout.extremes),
                        reinterpret_cast<unsigned*>(base + layout.counts),
                        reinterpret_cast<unsigned long long*>(base + layout.weights),
                        reinterpret_cast<int*>(base + layout.lists),
                        reinterpret_cast<float*>(base + layout.totals),
                        reinterpret_cast<float*>(base + layout.norms),
                        reinterpret_cast<Final*>(base + layout.finals),
                        reinterpret_cast<Best*>(base + layout.bests)};
  switch (desc->dtype) {
    case EB_F32:
      return run<float>(context, device, problem);
    case EB_F16:
      return run<half>(context, device, problem);
    default:
      return run<__nv_bfloat16>(context, device, problem);
  }
}

}  // extern "C"
