// What the kernels of SpecVerify share: a row's state in the workspace, orders and weights of logits.
//
// Weights exp((logit - max)/temperature) are summed as integers of 2^-31, so no sum depends on an order.
#ifndef ENGINEBAY_CUDA_SPEC_STATE_CUH
#define ENGINEBAY_CUDA_SPEC_STATE_CUH

#include "../philox.h"
#include "device.cuh"
#include "enginebay/spec_verify.h"

namespace enginebay::cuda::spec {

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
  float total;              // weight of what is kept, where refine came to know it; else 0
  int done;                 // refine has already chosen
  unsigned histogram_arrivals, refine_arrivals;
  int list_size;
  int listed;  // of the list, where it holds all that is kept; else 0
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
  const uint32_t b = __float_as_uint(v + 0.f);  // -0 becomes 0, its equal
  return b & 0x80000000u ? ~b : b | 0x80000000u;
}
__device__ __forceinline__ unsigned long long composite(float v, int id) {
  return static_cast<unsigned long long>(order_key(v)) << 32 | static_cast<uint32_t>(~id);
}

__device__ __forceinline__ float weight_of(float v, float best, float inverse_temperature) {
  return fast_exp2((v - best) * inverse_temperature * kLog2e);
}
__device__ __forceinline__ uint32_t fixed(float weight) { return __float2uint_rn(weight * 2147483648.f); }

// The word of a group's random numbers that belongs to token `id`, without an index into registers.
__device__ __forceinline__ uint32_t word_of(const Random4& random, int id) {
  const int at = id % 4;
  return at == 0 ? random.value[0] : at == 1 ? random.value[1] : at == 2 ? random.value[2] : random.value[3];
}

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

// The better maximum, its lower id among equals, and the lesser minimum.
__device__ __forceinline__ Extremes join_extremes(Extremes a, const Extremes& b) {
  if (b.best > a.best || (b.best == a.best && static_cast<unsigned>(b.id) < static_cast<unsigned>(a.id))) {
    a.best = b.best;
    a.id = b.id;
  }
  a.least = fminf(a.least, b.least);
  a.bad |= b.bad;
  return a;
}
// Of a warp, all of whose lanes call it.
__device__ __forceinline__ Extremes warp_extremes(Extremes mine) {
  for (int o = 16; o > 0; o /= 2)
    mine =
        join_extremes(mine, Extremes{__shfl_xor_sync(~0u, mine.best, o), __shfl_xor_sync(~0u, mine.least, o),
                                     __shfl_xor_sync(~0u, mine.id, o), __shfl_xor_sync(~0u, mine.bad, o)});
  return mine;
}

// Each warp of a block reads for itself, a slice a lane: one after the other they would take a while.
__device__ inline Extremes row_extremes(const Problem& p, int row) {
  static_assert(kMostSlices <= 32);
  const int lane = threadIdx.x % 32;
  Extremes all{-INFINITY, INFINITY, -1, 0};
  if (lane < p.slices) all = p.extremes[int64_t{row} * p.slices + lane];
  all = warp_extremes(all);
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

}  // namespace enginebay::cuda::spec

#endif
