// y = x.W^T for rows of x sorted by whose weights they meet, any weight format, any device from sm_80 on: the
// products of QuantMoE that int4_stream and int4_gemm do not do.
//
// A block computes 64 rows of W by MT rows of x; K passes through a ring of shared memory, 64 columns a
// stage. W is the A operand of mma, in the dtype of x: 16-bit weights as they are, FP8 and INT4 turned into
// it as fragments are read. Scales of FP8 rows multiply the sums.
#ifndef ENGINEBAY_CUDA_GROUPED_CUH
#define ENGINEBAY_CUDA_GROUPED_CUH

#include <cuda_fp8.h>

#include "int4.cuh"

namespace enginebay::cuda::grouped {

constexpr int kWarps = 4, kThreads = kWarps * 32, kRows = kWarps * 16, kColumns = 64, kStages = 4;
constexpr int kPitch = kColumns * 2 + 16;  // bytes of a row of 16-bit values, without bank conflicts

// Weights of one group: [n, k] row by row. `fetch` starts the copies of a stage, `fragment` reads the warp's
// A fragment of 16 columns, `scale` is what a row's sums are multiplied by.
template <typename T>
struct Wide {
  static constexpr int stage_bytes = kRows * kPitch;
  const T* w;
  int n, k;
  __device__ Wide(const uint8_t* packed, const Int4Problem& p)
      : w(reinterpret_cast<const T*>(packed)), n(p.n), k(p.k) {}
  __device__ __forceinline__ void fetch(uint32_t to, int row0, int column0) const {
#pragma unroll
    for (int i = threadIdx.x; i < kRows * 8; i += kThreads) {
      const int row = i / 8, column = column0 + i % 8 * 8;
      copy_async16(to + row * kPitch + i % 8 * 16,
                   w + int64_t{min(row0 + row, n - 1)} * k + min(column, k - 8), column < k ? 16 : 0);
    }
  }
  __device__ __forceinline__ void fragment(const uint8_t* stage, int, int, int step, uint32_t (&a)[4]) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    load_matrix4(a, shared_address(stage) + (warp * 16 + lane % 16) * kPitch + (step * 2 + lane / 16) * 16);
  }
  __device__ __forceinline__ float scale(int) const { return 1.f; }
};

template <typename T>
struct Eight {
  static constexpr int pitch = kColumns + 16, stage_bytes = kRows * pitch;
  const uint8_t* w;
  const float* scales;
  int n, k;
  __device__ Eight(const uint8_t* packed, const Int4Problem& p)
      : w(packed),
        scales(reinterpret_cast<const float*>(packed + ceil_div<int64_t>(int64_t{p.n} * p.k, 256) * 256)),
        n(p.n),
        k(p.k) {}
  __device__ __forceinline__ void fetch(uint32_t to, int row0, int column0) const {
#pragma unroll
    for (int i = threadIdx.x; i < kRows * 4; i += kThreads) {
      const int row = i / 4, column = column0 + i % 4 * 16;
      copy_async16(to + row * pitch + i % 4 * 16,
                   w + int64_t{min(row0 + row, n - 1)} * k + min(column, k - 16), column < k ? 16 : 0);
    }
  }
  __device__ __forceinline__ void fragment(const uint8_t* stage, int, int, int step, uint32_t (&a)[4]) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint8_t* const at = stage + (warp * 16 + lane / 4) * pitch + step * 16 + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const auto codes = *reinterpret_cast<const __nv_fp8x2_storage_t*>(at + i % 2 * 8 * pitch + i / 2 * 8);
      const half2 pair = __nv_cvt_fp8x2_to_halfraw2(codes, __NV_E4M3);
      if constexpr (std::is_same_v<T, half>) {
        a[i] = bits(pair);
      } else {
        const float2 v = __half22float2(pair);
        a[i] = bits(Half16<T>::pair(v.x, v.y));
      }
    }
  }
  __device__ __forceinline__ float scale(int row) const { return scales[min(row, n - 1)]; }
};

template <typename T, bool Symmetric>
struct Four {
  static constexpr int stage_bytes = kWarps * 512;
  using Pair = typename Half16<T>::Pair;
  const uint8_t* packed;
  Int4Layout layout;
  int block_size;
  __device__ Four(const uint8_t* packed, const Int4Problem& p)
      : packed(packed), layout(p.k, p.n, p.block_size, Symmetric), block_size(p.block_size) {}
  __device__ __forceinline__ int64_t tile(int row0) const {
    return min(row0 / 16 + static_cast<int>(threadIdx.x / 32), layout.row_tiles - 1);
  }
  __device__ __forceinline__ void fetch(uint32_t to, int row0, int column0) const {
    copy_async16(to + threadIdx.x * 16,
                 packed + (tile(row0) * layout.k_tiles + column0 / 64) * 512 + threadIdx.x % 32 * 16);
  }
  __device__ __forceinline__ void fragment(const uint8_t* stage, int row0, int column0, int step,
                                           uint32_t (&a)[4]) const {
    Int4Scales<T, Symmetric> scales;
    scales.load(packed + layout.value_bytes +
                (tile(row0) * layout.blocks + (column0 + step * 16) / block_size) * layout.scale_bytes);
    const Pair s = scales.view(scales.scale), c = scales.view(scales.centre);
    Pair q[4];
    int4_fragment<T>(reinterpret_cast<const uint32_t*>(stage)[threadIdx.x * 4 + step], q);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Pair scale = i % 2 ? Pair{s.y, s.y} : Pair{s.x, s.x};
      const Pair centre = i % 2 ? Pair{c.y, c.y} : Pair{c.x, c.x};
      a[i] = bits(Symmetric ? __hmul2(q[i], scale) : __hfma2(q[i], scale, centre));
    }
  }
  __device__ __forceinline__ float scale(int) const { return 1.f; }
};

template <typename Weights, int MT>
constexpr int kShared = kStages * (Weights::stage_bytes + MT * kPitch);

template <typename T, typename Weights, int MT>
__global__ void __launch_bounds__(kThreads) kernel(const Int4Problem p, const Int4Groups groups) {
  extern __shared__ __align__(128) uint8_t ring[];
  constexpr int kStage = Weights::stage_bytes + MT * kPitch;
  let_next_start();
  wait_for_previous();
  if (static_cast<int>(blockIdx.x) >= *groups.count) return;
  const int4 group = groups.tiles[blockIdx.x];
  const Weights weights(p.packed + group.x * groups.stride, p);
  const int row0 = blockIdx.y * kRows, m0 = group.y, rows = min(MT, group.z - m0);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const T* const x = static_cast<const T*>(p.x);
  const int steps = ceil_div(p.k, kColumns);
  const auto fetch = [&](int step) {
    if (step < steps) {
      const uint32_t stage = shared_address(ring) + step % kStages * kStage;
      weights.fetch(stage, row0, step * kColumns);
#pragma unroll
      for (int i = threadIdx.x; i < MT * 8; i += kThreads) {
        const int row = i / 8, column = step * kColumns + i % 8 * 8;
        copy_async16(stage + Weights::stage_bytes + row * kPitch + i % 8 * 16,
                     x + int64_t{m0 + min(row, rows - 1)} * p.k + min(column, p.k - 8),
                     row < rows && column < p.k ? 16 : 0);
      }
    }
    copy_commit();
  };
  for (int i = 0; i < kStages - 1; ++i) fetch(i);
  float d[MT / 8][4] = {};
  for (int step = 0; step < steps; ++step) {
    copy_wait<kStages - 2>();
    __syncthreads();  // the stage is there, and the one before is free
    fetch(step + kStages - 1);
    const uint8_t* const stage = ring + step % kStages * kStage;
    const uint32_t x_at = shared_address(stage) + Weights::stage_bytes + (lane % 8 + lane / 16 * 8) * kPitch +
                          lane / 8 % 2 * 16;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t a[4];
      weights.fragment(stage, row0, step * kColumns, i, a);
#pragma unroll
      for (int n = 0; n < MT / 8; n += 2) {
        uint32_t b[4];
        load_matrix4(b, x_at + n * 8 * kPitch + i * 32);
        mma16816<T>(d[n], a, b[0], b[1]);
        mma16816<T>(d[n + 1], a, b[2], b[3]);
      }
    }
  }
  copy_wait<0>();
  __syncthreads();
  // Through shared memory, so that rows of y are written in whole pieces.
  constexpr int kWidth = kRows + 8;
  T* const staged = reinterpret_cast<T*>(ring);
  const int at = warp * 16 + lane / 4;
  const float low = weights.scale(row0 + at), high = weights.scale(row0 + at + 8);
#pragma unroll
  for (int n = 0; n < MT / 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      staged[(n * 8 + lane % 4 * 2 + i % 2) * kWidth + at + i / 2 * 8] =
          from_float<T>(d[n][i] * (i < 2 ? low : high));
  __syncthreads();
  T* const y = static_cast<T*>(p.y);
  for (int i = threadIdx.x; i < rows * (kRows / 8); i += kThreads) {
    const int row = i / (kRows / 8), column = i % (kRows / 8) * 8;
    if (row0 + column < p.n)
      *reinterpret_cast<uint4*>(y + int64_t{m0 + row} * p.n + row0 + column) =
          *reinterpret_cast<const uint4*>(staged + row * kWidth + column);
  }
}

// In tiles of `rows` rows, 16 or 64, at most `most_tiles` of them; n is a multiple of 8 (grouped.cu).
eb_status run(const eb_context* context, const Device& device, eb_dtype format, eb_dtype io,
              const Int4Problem& p, bool symmetric, const Int4Groups& groups, int most_tiles, int rows);

}  // namespace enginebay::cuda::grouped

#endif
