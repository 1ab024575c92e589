// y = x.W^T for more rows of x than int4_decode takes (sm_90a): W is the A operand of wgmma, dequantised in
// registers.
//
// A block computes 128 rows of W (two warpgroups of 64) by MT rows of x over a slice of K. W goes from global
// memory to registers, each warp its own row tile, several tiles of 64 columns ahead; x through a ring of
// shared memory that the bulk copy engine fills, swizzled as wgmma reads it. Where row tiles alone would
// leave multiprocessors idle, K is split, each slice leaves fp32 partial sums and a second kernel adds them
// in order.
#ifndef ENGINEBAY_CUDA_INT4_GEMM_CUH
#define ENGINEBAY_CUDA_INT4_GEMM_CUH

#include "bulk_copy.cuh"
#include "int4_decode.cuh"
#include "wgmma.cuh"

namespace enginebay::cuda::int4_gemm {

constexpr int kRows = 128;

// MT: rows of x a block takes. Up to 128 of them two pairs of warpgroups share a block, each pair with every
// other tile of K, because one pair alone would wait for its own latencies.
// Grouped products have blocks enough: there two of them share a multiprocessor instead.
template <int MT, bool Grouped>
struct Shape {
  static constexpr bool pairs = Grouped && MT <= 64;  // two blocks a multiprocessor
  static constexpr int k_groups = MT >= 256 || pairs ? 1 : 2;
  static constexpr int threads = 256 * k_groups;
  static constexpr int stages = MT >= 128 ? 6 : 8;
  static constexpr int ahead = MT == 128 ? 2 : 4;  // column tiles of W in registers
  static constexpr int fragments =
      MT == 128 || MT == 64 ? 1 : 2;  // sets of A fragments: with two, one is made while one is read
  static constexpr int tile_bytes = MT * 128;
  static constexpr int stage_bytes = k_groups * tile_bytes;
  static constexpr int staged_y_bytes = MT * (kRows * 2 + 16);
  static constexpr int sums_bytes = k_groups > 1 ? MT * kRows * 4 : 0;
  static constexpr int most(int a, int b) { return a > b ? a : b; }
  static constexpr int shared = 1024 + most(stages * stage_bytes, most(staged_y_bytes, sums_bytes));
};

template <typename T, int MT, int BlockTiles, bool Symmetric, bool Grouped>
__global__ void __launch_bounds__(Shape<MT, Grouped>::threads, Shape<MT, Grouped>::pairs ? 2 : 1)
    kernel(const Int4Problem p, const Int4Groups groups, float* const partial,
           const __grid_constant__ CUtensorMap x_map) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Pair = typename Half16<T>::Pair;
  using S = Shape<MT, Grouped>;
  constexpr int kAhead = S::ahead, kStages = S::stages, kGroups = S::k_groups, kThreads = S::threads;
  extern __shared__ uint8_t raw[];
  const uint32_t base = (shared_address(raw) + 1023) & ~1023u;
  uint8_t* const ring = raw + (base - shared_address(raw));

  const int k_group = threadIdx.x / 256, warp = threadIdx.x / 32 % 8, lane = threadIdx.x % 32;
  const Int4Layout layout(p.k, p.n, p.block_size, Symmetric);
  const int tile0 = blockIdx.y * (kRows / 16);
  int m0 = blockIdx.x * MT, m_end = p.m;
  const uint8_t* packed = p.packed;
  if constexpr (Grouped) {
    let_next_start();
    wait_for_previous();
    if (static_cast<int>(blockIdx.x) >= *groups.count) return;
    const int4 group = groups.tiles[blockIdx.x];
    packed += group.x * groups.stride;
    m0 = group.y;
    m_end = group.z;
  }
  const int begin = layout.blocks * static_cast<int>(blockIdx.z) / static_cast<int>(gridDim.z) * BlockTiles;
  const int end = layout.blocks * static_cast<int>(blockIdx.z + 1) / static_cast<int>(gridDim.z) * BlockTiles;
  const int64_t tile = min(tile0 + warp, layout.row_tiles - 1);
  const uint8_t* const values = packed + tile * layout.k_tiles * 512 + lane * 16;
  const uint8_t* const scale_row = packed + layout.value_bytes + tile * layout.blocks * layout.scale_bytes;

  uint4 words[kAhead] = {};
  Int4Scales<T, Symmetric> scales[kAhead] = {};
  const auto fetch = [&](int slot, int kt) {
    if (kt >= end) return;  // what is left in the slot meets zeros of x
    words[slot] = load_stream16(values + int64_t{kt} * 512);
    scales[slot].load(scale_row + kt / BlockTiles * layout.scale_bytes);
  };
#pragma unroll
  for (int i = 0; i < kAhead; ++i) fetch(i, begin + i * kGroups + k_group);
  if constexpr (!Grouped) {
    let_next_start();
    wait_for_previous();
  }

  __shared__ __align__(8) uint64_t barriers[2 * kStages];
  const uint32_t full = shared_address(barriers), empty = full + 8 * kStages;
  const int rounds = ceil_div(end - begin, kGroups);
  // Columns past the end of the slice meet columns of W that were not fetched: W's slot then holds an older
  // tile and x must be zero, which a column past K is.
  const auto fill = [&](int round) {
    if (round >= rounds) return;
    const int stage = round % kStages;
    barrier_expect(full + 8 * stage, S::stage_bytes);
    for (int group = 0; group < kGroups; ++group) {
      const int kt = begin + round * kGroups + group;
      copy_tile(base + stage * S::stage_bytes + group * S::tile_bytes, &x_map, kt < end ? kt * 64 : p.k, m0,
                full + 8 * stage);
    }
  };
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(full + 8 * i, 1);
      barrier_init(empty + 8 * i, kThreads / 32);
    }
    barrier_init_done();
    for (int i = 0; i < kStages - 2; ++i) fill(i);
  }
  __syncthreads();

  float d[MT / 2];
#pragma unroll
  for (int i = 0; i < MT / 2; ++i) d[i] = 0.f;
  uint32_t a[S::fragments][4][4];

  for (int round0 = 0; round0 < rounds; round0 += kAhead) {
#pragma unroll
    for (int slot = 0; slot < kAhead; ++slot) {
      const int round = round0 + slot;
      if (round < rounds) {
        // The stage of two rounds ago is filled again once every warp is through with it.
        if (threadIdx.x == 0) {
          if (round >= 2) barrier_wait(empty + 8 * ((round - 2) % kStages), (round - 2) / kStages % 2);
          fill(round - 2 + kStages);
        }
        __syncwarp();
        const uint64_t descriptor =
            wgmma_descriptor(base + round % kStages * S::stage_bytes + k_group * S::tile_bytes);
        const uint32_t word[4] = {words[slot].x, words[slot].y, words[slot].z, words[slot].w};
        const Pair scale = Int4Scales<T, Symmetric>::view(scales[slot].scale);
        const Pair centre = Int4Scales<T, Symmetric>::view(scales[slot].centre);
        const Pair low = {scale.x, scale.x}, high = {scale.y, scale.y};
        const Pair low_centre = {centre.x, centre.x}, high_centre = {centre.y, centre.y};
        auto& fragment = a[slot % S::fragments];
        if constexpr (S::fragments == 1) {
          wgmma_wait<0>();
          if (lane == 0 && round > 0) barrier_arrive(empty + 8 * ((round - 1) % kStages));
        }
#pragma unroll
        for (int step = 0; step < 4; ++step) {
          Pair pairs[4];
          int4_fragment<T>(word[step], pairs);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const Pair w = Symmetric
                               ? __hmul2(pairs[i], i % 2 ? high : low)
                               : __hfma2(pairs[i], i % 2 ? high : low, i % 2 ? high_centre : low_centre);
            fragment[step][i] = bits(w);
          }
        }
        fetch(slot, begin + (round + kAhead) * kGroups + k_group);
        barrier_wait(full + 8 * (round % kStages), round / kStages % 2);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step)
          WgmmaRegisterA<T, MT>::run(d, fragment[step], descriptor + 2 * step);
        wgmma_commit();
        if constexpr (S::fragments == 2) {
          wgmma_wait<1>();  // the other set of fragments is free
          if (lane == 0 && round > 0) barrier_arrive(empty + 8 * ((round - 1) % kStages));
        }
      }
    }
  }
  wgmma_wait<0>();
  wgmma_touch(d);
  __syncthreads();  // the ring is free
  if constexpr (kGroups > 1) {
    float* const sums = reinterpret_cast<float*>(ring);  // [accumulator][thread of the pair]
    if (k_group == 1)
#pragma unroll
      for (int i = 0; i < MT / 2; ++i) sums[i * 256 + threadIdx.x % 256] = d[i];
    __syncthreads();
    if (k_group == 0)
#pragma unroll
      for (int i = 0; i < MT / 2; ++i) d[i] += sums[i * 256 + threadIdx.x];
    __syncthreads();
  }
  const bool writes = k_group == 0;

  if (partial != nullptr) {
    float* const out = partial + int64_t{blockIdx.z} * p.m * p.n;
#pragma unroll
    for (int j = 0; j < MT / 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = m0 + j * 8 + (lane % 4) * 2 + i % 2;
        const int n = (tile0 + warp) * 16 + lane / 4 + 8 * (i / 2);
        if (writes && row < m_end && n < p.n) out[int64_t{row} * p.n + n] = d[4 * j + i];
      }
    return;
  }
  // Through shared memory, so that rows of y are written in whole pieces.
  constexpr int kPitch = kRows + 8;
  T* const staged = reinterpret_cast<T*>(ring);
  if (writes)
#pragma unroll
    for (int j = 0; j < MT / 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = j * 8 + (lane % 4) * 2 + i % 2, at = warp * 16 + lane / 4 + 8 * (i / 2);
        const int n = tile0 * 16 + at;
        const float bias = p.bias != nullptr && n < p.n ? __ldg(p.bias + n) : 0.f;
        staged[row * kPitch + at] = from_float<T>(d[4 * j + i] + bias);
      }
  __syncthreads();
  T* const y = static_cast<T*>(p.y);
  const int columns = min(kRows, p.n - tile0 * 16), rows = min(MT, m_end - m0);
  if (p.n % 8 == 0) {
    for (int i = threadIdx.x; i < rows * (kRows / 8); i += kThreads) {
      const int row = i / (kRows / 8), at = i % (kRows / 8) * 8;
      if (at < columns)
        *reinterpret_cast<uint4*>(y + int64_t{m0 + row} * p.n + tile0 * 16 + at) =
            *reinterpret_cast<const uint4*>(staged + row * kPitch + at);
    }
  } else {
    for (int i = threadIdx.x; i < rows * kRows; i += kThreads) {
      const int row = i / kRows, at = i % kRows;
      if (at < columns) y[int64_t{m0 + row} * p.n + tile0 * 16 + at] = staged[row * kPitch + at];
    }
  }
#endif
}

template <typename T>
__global__ void add_partials(const float* partial, int splits, int64_t count, const float* bias, int n,
                             T* y) {
  let_next_start();
  wait_for_previous();
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    float sum = bias != nullptr ? bias[i % n] : 0.f;
    for (int s = 0; s < splits; ++s) sum += partial[s * count + i];
    y[i] = from_float<T>(sum);
  }
}

inline int rows_per_block(int64_t m) { return m <= 32 ? 32 : m <= 64 ? 64 : m <= 128 ? 128 : 256; }

// Slices of K: enough to fill the device where row tiles alone would not, each at least eight column tiles.
inline int splits(int multiprocessors, int64_t m, int n, int k) {
  const int64_t blocks = ceil_div<int64_t>(m, rows_per_block(m)) * ceil_div(n, kRows);
  if (blocks * 3 > multiprocessors * 2) return 1;
  const int64_t most = k / 512;
  return static_cast<int>(max(int64_t{1}, min(int64_t{16}, min(multiprocessors / blocks, most))));
}

template <typename T, int MT, int BlockTiles, bool Symmetric>
eb_status run_groups(const eb_context* context, const Device& device, const Int4Problem& p,
                     const Int4Groups& groups, int most_tiles) {
  const auto function = kernel<T, MT, BlockTiles, Symmetric, true>;
  EB_RETURN_IF_CUDA(context, cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                  Shape<MT, true>::shared));
  CUtensorMap x_map;
  EB_RETURN_IF_ERROR(map_rows(
      context, std::is_same_v<T, half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
      p.x, p.m, p.k, MT, &x_map));
  float* const no_partial = nullptr;
  const dim3 grid(static_cast<unsigned>(most_tiles), static_cast<unsigned>(ceil_div(p.n, kRows)));
  EB_RETURN_IF_CUDA(context, launch(device, stream_of(context), grid, dim3(Shape<MT, true>::threads),
                                    Shape<MT, true>::shared, 1, function, p, groups, no_partial, x_map));
  return EB_OK;
}

template <typename T, int MT, int BlockTiles, bool Symmetric>
eb_status run(const eb_context* context, const Device& device, const Int4Problem& p, float* workspace) {
  const auto function = kernel<T, MT, BlockTiles, Symmetric, false>;
  const int slices = splits(device.multiprocessors, p.m, p.n, p.k);
  float* const partial = slices > 1 ? workspace : nullptr;
  EB_RETURN_IF_CUDA(context, cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                  Shape<MT, false>::shared));
  const dim3 grid(ceil_div(p.m, MT), ceil_div(p.n, kRows), slices);
  CUtensorMap x_map;
  EB_RETURN_IF_ERROR(map_rows(
      context, std::is_same_v<T, half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
      p.x, p.m, p.k, MT, &x_map));
  EB_RETURN_IF_CUDA(context, launch(device, stream_of(context), grid, dim3(Shape<MT, false>::threads),
                                    Shape<MT, false>::shared, 1, function, p, Int4Groups{}, partial, x_map));
  if (slices > 1) {
    const int64_t count = int64_t{p.m} * p.n;
    const int blocks =
        static_cast<int>(min(ceil_div<int64_t>(count, 256), int64_t{device.multiprocessors} * 8));
    EB_RETURN_IF_CUDA(
        context, launch(device, stream_of(context), dim3(blocks), dim3(256), 0, 1, add_partials<T>, partial,
                        slices, count, p.bias, p.n, static_cast<T*>(p.y)));
  }
  return EB_OK;
}

}  // namespace enginebay::cuda::int4_gemm

namespace enginebay::cuda {

// Grouped products in tiles of `rows` rows (int4_gemm::rows_per_block), at most `most_tiles` of them
// (int4_linear.cu).
eb_status int4_run_groups(const eb_context* context, const Device& device, eb_dtype io, const Int4Problem& p,
                          bool symmetric, const Int4Groups& groups, int most_tiles, int rows);

}  // namespace enginebay::cuda

#endif
