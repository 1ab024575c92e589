// y = x.W^T for up to 16 rows of x: bound by the bytes of W.
//
// A cluster of S thread blocks owns some row tiles of W; each block of it a slice of K, each of its 16 warps
// two tiles of 64 columns at a time. A warp keeps its part of x in registers as B fragments and streams W
// past it through its own ring of shared memory, filled by cp.async: every lane reads back only what it
// copied, so the stream needs no barrier. A warp's sums for each row tile stay in shared memory until the
// block has gone through K; then they are added up, warp after warp, block after block of the cluster, always
// in the same order. The first tiles of W are under way before the previous kernel has ended. The loop over
// tiles is kept small: it must stay in the instruction cache.
#ifndef ENGINEBAY_CUDA_INT4_DECODE_CUH
#define ENGINEBAY_CUDA_INT4_DECODE_CUH

#include <cooperative_groups.h>

#include "int4.cuh"

namespace enginebay::cuda {

namespace int4_decode {
constexpr int kWarps = 16, kThreads = kWarps * 32;
// Tiles of 64 columns a warp takes at a time: as many as x's fragments leave registers for.
constexpr int column_tiles(int) { return 4; }
constexpr int ring_stages(int n8) { return n8 == 1 ? 3 : 2; }

// Bytes of a warp's stage: its tiles of values, then each lane's scales, one a tile at most.
constexpr int stage_bytes(int n8, bool symmetric) {
  return column_tiles(n8) * (512 + 32 * (symmetric ? 4 : 8));
}
constexpr size_t ring_bytes(int n8, bool symmetric) {
  return size_t{kWarps} * static_cast<size_t>(ring_stages(n8) * stage_bytes(n8, symmetric));
}
// Bytes of one row tile's sums, of every warp and of the block.
constexpr size_t tile_bytes(int n8) { return size_t{kWarps + 1} * n8 * 128 * sizeof(float); }

template <int Bytes>
__device__ __forceinline__ void copy_async_small(uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;\n" ::"r"(to), "l"(from), "n"(Bytes) : "memory");
}

// Four lanes t = 0..3 hold (x, y, z, w): afterwards lane t's q-th value is what lane q's t-th was.
__device__ __forceinline__ void transpose_quad(uint4& v) {
  const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
  const uint32_t a = __shfl_xor_sync(~0u, odd ? v.x : v.y, 1), b = __shfl_xor_sync(~0u, odd ? v.z : v.w, 1);
  if (odd) {
    v.x = a;
    v.z = b;
  } else {
    v.y = a;
    v.w = b;
  }
  const uint32_t c = __shfl_xor_sync(~0u, upper ? v.x : v.z, 2),
                 d = __shfl_xor_sync(~0u, upper ? v.y : v.w, 2);
  if (upper) {
    v.x = c;
    v.y = d;
  } else {
    v.z = c;
    v.w = d;
  }
}

// T: dtype of x, y and scales. N8: groups of 8 rows of x. BlockTiles: tiles of 64 columns that share a scale.
// chunk: row tiles whose sums fit into shared memory at a time.
template <typename T, int N8, int BlockTiles, bool Symmetric>
__global__ void __launch_bounds__(kThreads, 1) kernel(const Int4Problem p, const int chunk) {
  using Pair = typename Half16<T>::Pair;
  constexpr int kColumnTiles = column_tiles(N8), kStages = ring_stages(N8);
  constexpr int kBlocks = kColumnTiles / BlockTiles;  // scales a row tile needs at a time
  constexpr int kScaleBytes = Symmetric ? 4 : 8, kStage = stage_bytes(N8, Symmetric);
  constexpr int kTile = N8 * 128;  // sums of a row tile: [n8][16 rows of W][8 rows of x]

  extern __shared__ __align__(16) uint8_t shared[];
  float* const partials =
      reinterpret_cast<float*>(shared + ring_bytes(N8, Symmetric));  // [warp][tile of the chunk]
  float* const sums = partials + size_t{kWarps} * chunk * kTile;     // [tile of the chunk]

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int cluster_size = 1, rank = 0;
#if __CUDA_ARCH__ >= 900
  const auto cluster = cooperative_groups::this_cluster();
  cluster_size = static_cast<int>(cluster.num_blocks());
  rank = static_cast<int>(cluster.block_rank());
#endif
  const int clusters = gridDim.x / cluster_size, cluster_id = blockIdx.x / cluster_size;
  const Int4Layout layout(p.k, p.n, p.block_size, Symmetric);
  const uint8_t* const scale_base = p.packed + layout.value_bytes;

  const int tile_begin = static_cast<int>(int64_t{layout.row_tiles} * cluster_id / clusters);
  const int tiles = static_cast<int>(int64_t{layout.row_tiles} * (cluster_id + 1) / clusters) - tile_begin;
  const int slice_begin = layout.blocks * rank / cluster_size * BlockTiles;
  const int slice_end = layout.blocks * (rank + 1) / cluster_size * BlockTiles;
  const int first_column = slice_begin + warp * kColumnTiles;
  // This warp's passes over the rows: its columns are first_column, first_column + 32, ...
  const int passes = max(0, ceil_div(slice_end - first_column, kWarps * kColumnTiles));

  const uint32_t ring = shared_address(shared) + warp * kStages * kStage;
  const int g = lane / 4, t = lane % 4;

  // The stream: for each chunk of row tiles, for each pass over the columns, for each tile.
  struct {
    int chunk_tile = 0, pass = 0, left = 0;  // tiles left in the pass
    const uint8_t *values = nullptr, *scales = nullptr;
    int stage = 0;
  } ahead;
  const auto start_pass = [&] {
    const int column = first_column + ahead.pass * kWarps * kColumnTiles;
    const int64_t tile = tile_begin + ahead.chunk_tile;
    ahead.left = min(chunk, tiles - ahead.chunk_tile);
    ahead.values = p.packed + (tile * layout.k_tiles + column) * 512 + lane * 16;
    ahead.scales =
        scale_base + (tile * layout.blocks + column / BlockTiles) * layout.scale_bytes + g * kScaleBytes;
  };
  if (passes > 0 && tiles > 0) start_pass();
  const int64_t values_pitch = int64_t{layout.k_tiles} * 512,
                scales_pitch = int64_t{layout.blocks} * layout.scale_bytes;
  const auto fetch = [&] {
    if (ahead.left > 0) {
      const int columns = layout.k_tiles - (first_column + ahead.pass * kWarps * kColumnTiles);
      const uint32_t stage = ring + ahead.stage * kStage;
      // Past the last column tile stands the last one again; x is zero there.
#pragma unroll
      for (int c = 0; c < kColumnTiles; ++c)
        copy_async16_stream(stage + c * 512 + lane * 16, ahead.values + min(c, columns - 1) * 512);
#pragma unroll
      for (int b = 0; b < kBlocks; ++b)
        copy_async_small<kScaleBytes>(stage + kColumnTiles * 512 + (b * 32 + lane) * kScaleBytes,
                                      ahead.scales + min(b, (columns - 1) / BlockTiles) * layout.scale_bytes);
      ahead.values += values_pitch;
      ahead.scales += scales_pitch;
      ahead.stage = ahead.stage + 1 == kStages ? 0 : ahead.stage + 1;
      if (--ahead.left == 0) {
        if (++ahead.pass == passes) {
          ahead.pass = 0;
          ahead.chunk_tile += chunk;
        }
        if (ahead.chunk_tile < tiles) start_pass();
      }
    }
    copy_commit();
  };
#pragma unroll 1
  for (int i = 0; i < kStages - 1; ++i) fetch();
  let_next_start();
  wait_for_previous();

  const T* const x = static_cast<const T*>(p.x);
  T* const y = static_cast<T*>(p.y);
  uint4 x_next[kColumnTiles][2][N8];  // of the next pass, on its way while this one works
  const auto read_x = [&](int pass) {
    const int k0 = first_column + pass * kWarps * kColumnTiles;
#pragma unroll
    for (int c = 0; c < kColumnTiles; ++c)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int n = 0; n < N8; ++n) {
          const int row = n * 8 + g, column = (k0 + c) * 64 + half * 32 + t * 8;
          x_next[c][half][n] = make_uint4(0, 0, 0, 0);
          if (row < p.m && k0 + c < slice_end)
            x_next[c][half][n] = *reinterpret_cast<const uint4*>(x + int64_t{row} * p.k + column);
        }
  };
  if constexpr (N8 == 1) read_x(0);
  int stage_index = 0;
  for (int chunk_tile = 0; chunk_tile < tiles; chunk_tile += chunk) {
    const int chunk_tiles = min(chunk, tiles - chunk_tile);
    float* const mine = partials + static_cast<size_t>(warp) * chunk * kTile + g * 8 + t * 2;
    if (passes == 0)
      for (int i = lane; i < chunk_tiles * kTile; i += 32)
        partials[static_cast<size_t>(warp) * chunk * kTile + i] = 0.f;
    for (int pass = 0; pass < passes; ++pass) {
      if constexpr (N8 == 2) read_x(pass);
      // A lane reads 16 bytes of a row, and the four lanes of the row exchange what their fragments hold.
      uint32_t xs[kColumnTiles][4][N8][2];
#pragma unroll
      for (int c = 0; c < kColumnTiles; ++c)
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
          for (int n = 0; n < N8; ++n) {
            uint4 v = x_next[c][half][n];
            transpose_quad(v);
            xs[c][2 * half][n][0] = v.x;
            xs[c][2 * half][n][1] = v.y;
            xs[c][2 * half + 1][n][0] = v.z;
            xs[c][2 * half + 1][n][1] = v.w;
          }
      if constexpr (N8 == 1) read_x(pass + 1 < passes ? pass + 1 : 0);

#pragma unroll 1
      for (int tile = 0; tile < chunk_tiles; ++tile) {
        fetch();
        copy_wait<kStages - 1>();
        const uint8_t* const stage = shared + (warp * kStages + stage_index) * kStage;
        stage_index = stage_index + 1 == kStages ? 0 : stage_index + 1;
        float total[N8][4] = {};
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
          float block_sum[N8][4] = {};
          [[maybe_unused]] float ones_sum[N8][4] = {};
#pragma unroll
          for (int c = b * BlockTiles; c < (b + 1) * BlockTiles; ++c) {
            const uint4 w = *reinterpret_cast<const uint4*>(stage + c * 512 + lane * 16);
            const uint32_t word[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
            for (int step = 0; step < 4; ++step) {
              Pair pairs[4];
              int4_fragment<T>(word[step], pairs);
              const uint32_t a[4] = {bits(pairs[0]), bits(pairs[1]), bits(pairs[2]), bits(pairs[3])};
#pragma unroll
              for (int n = 0; n < N8; ++n) {
                mma16816<T>(block_sum[n], a, xs[c][step][n][0], xs[c][step][n][1]);
                if constexpr (!Symmetric) {
                  const uint32_t one = bits(Half16<T>::pair(1.f, 1.f));
                  const uint32_t ones[4] = {one, one, one, one};
                  mma16816<T>(ones_sum[n], ones, xs[c][step][n][0], xs[c][step][n][1]);
                }
              }
            }
          }
          const auto* const scale =
              reinterpret_cast<const uint32_t*>(stage + kColumnTiles * 512 + (b * 32 + lane) * kScaleBytes);
          const float2 s = Half16<T>::floats(Int4Scales<T, Symmetric>::view(scale[0]));
#pragma unroll
          for (int n = 0; n < N8; ++n) {
            total[n][0] = fmaf(s.x, block_sum[n][0], total[n][0]);
            total[n][1] = fmaf(s.x, block_sum[n][1], total[n][1]);
            total[n][2] = fmaf(s.y, block_sum[n][2], total[n][2]);
            total[n][3] = fmaf(s.y, block_sum[n][3], total[n][3]);
          }
          if constexpr (!Symmetric) {
            const float2 centre = Half16<T>::floats(Int4Scales<T, Symmetric>::view(scale[1]));
#pragma unroll
            for (int n = 0; n < N8; ++n) {
              total[n][0] = fmaf(centre.x, ones_sum[n][0], total[n][0]);
              total[n][1] = fmaf(centre.x, ones_sum[n][1], total[n][1]);
              total[n][2] = fmaf(centre.y, ones_sum[n][2], total[n][2]);
              total[n][3] = fmaf(centre.y, ones_sum[n][3], total[n][3]);
            }
          }
        }
#pragma unroll
        for (int n = 0; n < N8; ++n) {
          auto* const low = reinterpret_cast<float2*>(mine + tile * kTile + n * 128);
          float2 a = make_float2(total[n][0], total[n][1]), b = make_float2(total[n][2], total[n][3]);
          if (pass > 0) {
            const float2 c = low[0], d = low[32];
            a = make_float2(c.x + a.x, c.y + a.y);
            b = make_float2(d.x + b.x, d.y + b.y);
          }
          low[0] = a;
          low[32] = b;
        }
      }
    }

    __syncthreads();
    const auto place = [&](int i, int* row, int* n) {  // of a sum: which of x, which of W
      *row = i / 128 % N8 * 8 + i % 8;
      *n = (tile_begin + chunk_tile + i / kTile) * 16 + i / 8 % 16;
      return *row < p.m && *n < p.n;
    };
    for (int i = threadIdx.x; i < chunk_tiles * kTile; i += kThreads) {
      float sum = 0.f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sum += partials[static_cast<size_t>(w) * chunk * kTile + i];
      int row, n;
      if (cluster_size > 1)
        sums[i] = sum;
      else if (place(i, &row, &n))
        y[int64_t{row} * p.n + n] = from_float<T>(sum + (p.bias != nullptr ? p.bias[n] : 0.f));
    }
#if __CUDA_ARCH__ >= 900
    if (cluster_size > 1) {
      // The blocks of the cluster share the outputs.
      cluster.sync();
      for (int i = rank * kThreads + threadIdx.x; i < chunk_tiles * kTile; i += kThreads * cluster_size) {
        int row, n;
        if (!place(i, &row, &n)) continue;
        float sum = p.bias != nullptr ? p.bias[n] : 0.f;
        for (int r = 0; r < cluster_size; ++r) sum += cluster.map_shared_rank(sums, r)[i];
        y[int64_t{row} * p.n + n] = from_float<T>(sum);
      }
      cluster.sync();  // sums are free once every block has read them
      continue;
    }
#endif
    __syncthreads();  // partials are free
  }
}

// How many clusters of which size: the one whose busiest block is done first.
template <typename T, int N8, int BlockTiles, bool Symmetric>
eb_status run(const eb_context* context, const Device& device, const Int4Problem& p) {
  const auto function = kernel<T, N8, BlockTiles, Symmetric>;
  const Int4Layout layout(p.k, p.n, p.block_size, Symmetric);
  const size_t ring = ring_bytes(N8, Symmetric), room = static_cast<size_t>(device.shared_bytes) - ring;
  int best = 1, best_clusters = 0;
  double best_cost = 0;
  for (int size = 1; size <= (device.capability >= 90 ? 4 : 1); size *= 2) {
    if (size > layout.blocks) break;
    // GPCs of 16 or 18 multiprocessors leave some out of clusters of four.
    const int fit = size == 4 ? device.multiprocessors / 16 * 4 : device.multiprocessors / size;
    const int clusters = max(1, min(layout.row_tiles, fit));
    constexpr int kRound = kWarps * column_tiles(N8);
    const int tiles = ceil_div(layout.row_tiles, clusters), columns = ceil_div(layout.k_tiles, size);
    const int chunks = ceil_div(tiles, static_cast<int>(room / tile_bytes(N8)));
    // Bytes of W in whole rounds of the warps, x from the L2 again for every chunk of row tiles; meeting
    // takes about as long as 32 KiB, and twice that in a cluster.
    const double cost = double(ceil_div(columns, kRound) * kRound) * (tiles * 512 + 64.0 * p.m * chunks) +
                        32768.0 * chunks * (size > 1 ? 3 : 1);
    if (best_clusters == 0 || cost < best_cost) {
      best = size;
      best_clusters = clusters;
      best_cost = cost;
    }
  }
  const int tiles = ceil_div(layout.row_tiles, best_clusters);
  const int chunk = min(tiles, static_cast<int>(room / tile_bytes(N8)));
  const size_t shared = ring + static_cast<size_t>(chunk) * tile_bytes(N8);
  EB_RETURN_IF_CUDA(context, cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                  static_cast<int>(shared)));
  EB_RETURN_IF_CUDA(context, launch(device, stream_of(context), dim3(best * best_clusters), dim3(kThreads),
                                    shared, best, function, p, chunk));
  return EB_OK;
}

}  // namespace int4_decode
}  // namespace enginebay::cuda

#endif
