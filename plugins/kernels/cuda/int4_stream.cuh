// y = x.W^T for few rows of x (sm_90a): bound by the bytes of W, alone or grouped by expert.
//
// W is the A operand of wgmma: a warp owns 16 rows of it and streams them past x through its own ring of
// shared memory, filled by bulk copies. x is the B operand, in a ring that one warp fills. Nibbles are not
// brought to q - 8: they are read as offset + q, which spares an instruction in three, and what that is too
// much in a block of K, (offset + 8) times the sum of x, is what the accumulators start from. Three warps sum
// x, with the matrix units too. Two pairs of warpgroups share a block's rows, each with every other step of
// K. Blocks stay: they go from one set of rows to the next with their rings full. Where there are too few
// rows for all multiprocessors, K is split over a cluster. Sums meet in shared memory, always in the same
// order.
#ifndef ENGINEBAY_CUDA_INT4_STREAM_CUH
#define ENGINEBAY_CUDA_INT4_STREAM_CUH

#include <cooperative_groups.h>

#include "activation.cuh"
#include "bulk_copy.cuh"
#include "int4.cuh"
#include "wgmma.cuh"

namespace enginebay::cuda::int4_stream {

// Of one product; of groups; of groups whose gates and ups meet in a block.
enum class Mode { kDense, kGrouped, kGated };

constexpr int kRowTiles = 8, kRows = kRowTiles * 16;   // of W, in a block's set
constexpr int kSummers = 3;                            // warps that sum x
constexpr int kTiles = 4, kStepColumns = kTiles * 64;  // a step of K
constexpr int kSharedBytes = 227 * 1024;               // a block may ask for, on sm_90
constexpr int kPitch = kRows + 4;                      // of a set's sums, in floats

// MT: rows of x in a tile. Block: columns of K that share a scale.
template <int MT, int Block, bool Symmetric>
struct Shape {
  static constexpr int blocks = kStepColumns / Block;
  static constexpr int splits = 2;  // parts of K that a block works on at a time
  static constexpr int warps = splits * kRowTiles, threads = (warps + kSummers + 1) * 32;
  static constexpr int x_stages = MT == 16 ? 8 : 4;
  static constexpr int x_bytes = MT * kStepColumns * 2, start_bytes = blocks * MT * 8;
  static constexpr int scale_bytes = Symmetric ? 32 : 64;  // of a row tile and block
  static constexpr int w_bytes = 512 * kTiles + blocks * scale_bytes;
  static constexpr int starts_at = x_stages * x_bytes, w_at = starts_at + x_stages * start_bytes;
  static constexpr int sum_bytes = splits * MT * kPitch * 4;
  static constexpr int room = (kSharedBytes - 1024 - w_at - sum_bytes) / (warps * w_bytes);
  static constexpr int w_stages = room < 4 ? room : 4;
  static_assert(w_stages >= 2);
  static constexpr int sums_at = w_at + warps * w_stages * w_bytes;
  static constexpr int shared = 1024 + sums_at + sum_bytes;
};

template <int Threads>
__device__ __forceinline__ void sync_some(int barrier) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(barrier), "n"(Threads) : "memory");
}

// One set of rows of W with one tile of x.
struct Item {
  int row_set, group, m0, m_end;
};

template <typename T, int MT, int Block, bool Symmetric, Mode mode>
__global__ void __launch_bounds__(Shape<MT, Block, Symmetric>::threads, 1)
    kernel(const Int4Problem p, const Int4Groups groups, const Gate gate, const int row_sets,
           const int cluster_size, const __grid_constant__ CUtensorMap x_map) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using S = Shape<MT, Block, Symmetric>;
  constexpr int kWarps = S::warps, kThreads = S::threads, kSplits = S::splits;
  extern __shared__ uint8_t raw[];
  const uint32_t base = (shared_address(raw) + 1023) & ~1023u;
  uint8_t* const rings = raw + (base - shared_address(raw));
  float* const sums = reinterpret_cast<float*>(rings + S::sums_at);  // [split][MT][kPitch]
  __shared__ __align__(8) uint64_t barriers[3 * S::x_stages + kWarps * S::w_stages];
  const uint32_t full = shared_address(barriers), ready = full + 8 * S::x_stages,
                 empty = ready + 8 * S::x_stages, landed = empty + 8 * S::x_stages;

  // The compiler keeps in uniform registers what it knows to be the same in all lanes.
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const Int4Layout layout(p.k, p.n, p.block_size, Symmetric);
  const int rank = blockIdx.x % cluster_size;
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::x_stages; ++i) {
      barrier_init(full + 8 * i, 1);
      barrier_init(ready + 8 * i, kSummers);
      barrier_init(empty + 8 * i, kRowTiles);
    }
    for (int i = 0; i < kWarps * S::w_stages; ++i) barrier_init(landed + 8 * i, 1);
    barrier_init_done();
    prefetch_map(&x_map);
  }
  __syncthreads();
  let_next_start();
  int x_tiles = ceil_div(p.m, MT);
  if constexpr (mode != Mode::kDense) {
    wait_for_previous();
    x_tiles = *groups.count;
  }
  const int items = row_sets * x_tiles, first_item = blockIdx.x / cluster_size,
            stride = gridDim.x / cluster_size;
  const auto item_at = [&](int index) {
    const int x_tile = index % x_tiles;
    Item item{index / x_tiles, 0, x_tile * MT, p.m};
    if constexpr (mode != Mode::kDense) {
      const int4 tile = groups.tiles[x_tile];
      item.group = tile.x;
      item.m0 = tile.y;
      item.m_end = tile.z;
    }
    return item;
  };
  const int all_steps = ceil_div(layout.k_tiles, kTiles);
  const int begin = all_steps * rank / cluster_size, steps = all_steps * (rank + 1) / cluster_size - begin;

  // Rows of y out of the sums of `blocks` blocks, four columns a thread.
  const auto write = [&](const Item& item, int thread, int threads, int blocks) {
    constexpr bool kGate = mode == Mode::kGated;
    constexpr int kQuads = kRows / (kGate ? 8 : 4);
    const int n = kGate ? p.n / 2 : p.n, set_columns = kRows / (kGate ? 2 : 1);
    const int n0 = item.row_set * set_columns, rows = min(MT, item.m_end - item.m0);
    const float* const bias = p.bias == nullptr ? nullptr : p.bias + int64_t{item.group} * p.n;
    const auto sum_at = [&](int at, int first, float (&v)[4]) {
      const int columns = n - first % n;
#pragma unroll
      for (int j = 0; j < 4; ++j) v[j] = bias != nullptr && j < columns ? __ldg(bias + first + j) : 0.f;
#pragma unroll 1
      for (int r = 0; r < blocks; ++r) {
        const float* const from =
            blocks > 1 ? cooperative_groups::this_cluster().map_shared_rank(sums, r) : sums;
#pragma unroll
        for (int split = 0; split < kSplits; ++split) {
          const float4 part = *reinterpret_cast<const float4*>(from + split * (MT * kPitch) + at);
          v[0] += part.x;
          v[1] += part.y;
          v[2] += part.z;
          v[3] += part.w;
        }
      }
    };
#pragma unroll 1
    for (int i = thread; i < rows * kQuads; i += threads) {
      const int row = i / kQuads, column = i % kQuads * 4;
      if (n0 + column >= n) continue;
      float v[4];
      sum_at(row * kPitch + column, n0 + column, v);
      if constexpr (kGate) {
        float up[4];
        sum_at(row * kPitch + kRows / 2 + column, n + n0 + column, up);
#pragma unroll
        for (int j = 0; j < 4; ++j) v[j] = gate(v[j], up[j]);
      }
      T* const to = static_cast<T*>(p.y) + int64_t{item.m0 + row} * n + n0 + column;
      if (n % 4 == 0) {
        *reinterpret_cast<uint2*>(to) =
            make_uint2(bits(Half16<T>::pair(v[0], v[1])), bits(Half16<T>::pair(v[2], v[3])));
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j)
          if (n0 + column + j < n) to[j] = from_float<T>(v[j]);
      }
    }
  };

  if (warp == kWarps + kSummers) {
    if constexpr (mode == Mode::kDense) wait_for_previous();
    int q = 0;  // steps so far, of all items
    if (lane == 0)
      for (int index = first_item; index < items; index += stride) {
        const Item item = item_at(index);
        for (int step = 0; step < steps; ++step, ++q) {
          const int stage = q % S::x_stages;
          if (q >= S::x_stages) barrier_wait(empty + 8 * stage, (q / S::x_stages - 1) % 2);
          barrier_expect(full + 8 * stage, S::x_bytes);
          // Columns past K read as zeros.
          for (int tile = 0; tile < kTiles; ++tile)
            copy_tile(base + stage * S::x_bytes + tile * MT * 128, &x_map,
                      ((begin + step) * kTiles + tile) * 64, item.m0, full + 8 * stage);
        }
      }
    __syncwarp();
  } else if (warp >= kWarps) {
    constexpr uint32_t kOne = std::is_same_v<T, half> ? 0x3c003c00 : 0x3f803f80;
    const uint32_t ones[4] = {kOne, kOne, kOne, kOne};
    const int total_steps = items > first_item ? ceil_div(items - first_item, stride) * steps : 0;
    unsigned turn = 0;  // blocks of K go to the summing warps in turn
#pragma unroll 1
    for (int q = 0; q < total_steps; ++q) {
      const int stage = q % S::x_stages;
      barrier_wait(full + 8 * stage, q / S::x_stages % 2);
      auto* const starts = reinterpret_cast<float4*>(rings + S::starts_at + stage * S::start_bytes);
#pragma unroll 1
      for (int block = 0; block < S::blocks; ++block) {
        if (turn++ % kSummers != warp - kWarps) continue;
        // Lane l gives the address of row l % 8 of the (l / 8)-th piece of 8 columns. Four chains of sums.
#pragma unroll 1
        for (int n = 0; n < MT / 8; n += 2) {
          const uint32_t row = base + stage * S::x_bytes + n * 1024 + lane % 8 * 128;
          float total[2][2][4] = {};
          uint32_t b[2][Block / 32][4];
#pragma unroll
          for (int part = 0; part < Block / 32; ++part) {
            const int column = block * Block + part * 32, piece = column % 64 / 8 + lane / 8;
            const uint32_t at = row + column / 64 * (MT * 128) + ((piece ^ (lane % 8)) << 4);
#pragma unroll
            for (int i = 0; i < 2; ++i) load_matrix4(b[i][part], at + i * 1024);
          }
#pragma unroll
          for (int part = 0; part < Block / 32; ++part)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              mma16816<T>(total[i][0], ones, b[i][part][0], b[i][part][1]);
              mma16816<T>(total[i][1], ones, b[i][part][2], b[i][part][3]);
            }
          const float low = -Int4Biased<T>::low, high = -Int4Biased<T>::high;
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const float x0 = total[i][0][0] + total[i][1][0], x1 = total[i][0][1] + total[i][1][1];
            if (lane < 4)
              starts[block * (MT / 2) + (n + i) * 4 + lane] =
                  make_float4(low * x0, low * x1, high * x0, high * x1);
          }
        }
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(ready + 8 * stage);
    }
  } else {
    const int split = warp / kRowTiles, own = warp % kRowTiles;
    // A gated set has the gates of its rows in each warpgroup's first two warps, their ups in the others.
    const int up = mode == Mode::kGated ? own % 4 / 2 : 0;
    const int own_tile = mode == Mode::kGated ? own / 4 * 2 + own % 2 : own;
    const int place = up * (kRows / 2) + own_tile * 16;  // of the warp's columns in the sums
    const int half_tiles = layout.row_tiles / (mode == Mode::kGated ? 2 : 1);
    const int sets_apart = kRowTiles / (mode == Mode::kGated ? 2 : 1);

    const uint32_t ring_offset = S::w_at + warp * S::w_stages * S::w_bytes;
    const uint32_t own_landed = landed + warp * S::w_stages * 8;
    // What is fetched next: all lanes know it, so that it stays in uniform registers; one asks for it.
    const uint8_t *values = nullptr, *scales = nullptr;
    int ahead_item = first_item, ahead_step = split;
    const auto aim = [&] {
      if (ahead_item >= items) return;
      const Item item = item_at(ahead_item);
      const int group = __shfl_sync(~0u, item.group, 0);
      const int64_t tile = up * half_tiles + min(item.row_set * sets_apart + own_tile, half_tiles - 1);
      const uint8_t* const packed = p.packed + group * groups.stride;
      values = packed + (tile * layout.k_tiles + (begin + ahead_step) * kTiles) * 512;
      scales = packed + layout.value_bytes +
               (tile * layout.blocks + (begin + ahead_step) * S::blocks) * S::scale_bytes;
    };
    const auto fetch = [&](int stage) {
      if (ahead_item >= items) return;
      const int tiles = min(kTiles, layout.k_tiles - (begin + ahead_step) * kTiles),
                blocks = tiles * 64 / Block;
      const uint32_t to = base + ring_offset + stage * S::w_bytes, barrier = own_landed + 8 * stage;
      if (lane == 0) {
        barrier_expect(barrier, tiles * 512 + blocks * S::scale_bytes);
        copy_bulk(to, values, tiles * 512, barrier);
        copy_bulk(to + 512 * kTiles, scales, blocks * S::scale_bytes, barrier);
      }
      values += kSplits * 512 * kTiles;
      scales += kSplits * S::blocks * S::scale_bytes;
      ahead_step += kSplits;
      if (ahead_step >= steps) {
        ahead_step = split;
        ahead_item += stride;
        aim();
      }
    };
    if (split < steps) {
      aim();
#pragma unroll 1
      for (int i = 0; i < S::w_stages; ++i) fetch(i);
    }
    if constexpr (mode == Mode::kDense) wait_for_previous();

    const int g = lane / 4, t = lane % 4;
    float total[MT / 2], d[MT / 2];
    uint32_t a[2][4][4] = {};
    // A descriptor's upper half is the same for all of the ring.
    const uint64_t x0 = wgmma_descriptor(base), wide_x = x0 >> 32 << 32;
    const uint32_t first_x = static_cast<uint32_t>(x0);
    // Adds a block's sums, scaled for rows g and g + 8.
    const auto add = [&](const uint32_t* scale, [[maybe_unused]] const float4* start) {
      wgmma_wait<0>();
      wgmma_touch(d);
      const float2 s = Half16<T>::floats(Int4Scales<T, Symmetric>::view(scale[0]));
#pragma unroll
      for (int i = 0; i < MT / 2; ++i) total[i] = fmaf(i % 4 < 2 ? s.x : s.y, d[i], total[i]);
      if constexpr (!Symmetric) {
        float2 c = Half16<T>::floats(Int4Scales<T, Symmetric>::view(scale[1]));
        c.x *= -1.f / Int4Biased<T>::low;
        c.y *= -1.f / Int4Biased<T>::low;
#pragma unroll
        for (int n = 0; n < MT / 8; ++n) {
          const float2 x = *reinterpret_cast<const float2*>(start + n * 4);
          total[4 * n] = fmaf(c.x, x.x, total[4 * n]);
          total[4 * n + 1] = fmaf(c.x, x.y, total[4 * n + 1]);
          total[4 * n + 2] = fmaf(c.y, x.x, total[4 * n + 2]);
          total[4 * n + 3] = fmaf(c.y, x.y, total[4 * n + 3]);
        }
      }
    };
    int w_stage = 0, w_parity = 0;
    int q0 = 0;  // steps of the items before
#pragma unroll 1
    for (int index = first_item; index < items; index += stride, q0 += steps) {
#pragma unroll
      for (int i = 0; i < MT / 2; ++i) total[i] = 0.f;
#pragma unroll 1
      for (int step = split; step < steps; step += kSplits) {
        const int stage = (q0 + step) % S::x_stages, parity = (q0 + step) / S::x_stages % 2;
        const uint8_t* const w = rings + ring_offset + w_stage * S::w_bytes;
        const auto* const scale =
            reinterpret_cast<const uint32_t*>(w + 512 * kTiles) + g * (Symmetric ? 1 : 2);
        const uint32_t x = first_x + stage * (S::x_bytes / 16);
        const auto* const starts =
            reinterpret_cast<const float4*>(rings + S::starts_at + stage * S::start_bytes) + t;
        barrier_wait(own_landed + 8 * w_stage, w_parity);
        const int tiles_here = layout.k_tiles - (begin + step) * kTiles;
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          if (tile > 0 && tile * 64 % Block == 0 && tile >= tiles_here) break;
          auto& fragment = a[tile % 2];
          const uint4 words = *reinterpret_cast<const uint4*>(w + tile * 512 + lane * 16);
          Int4Biased<T>::fragment(words.x, fragment[0]);
          Int4Biased<T>::fragment(words.y, fragment[1]);
          Int4Biased<T>::fragment(words.z, fragment[2]);
          Int4Biased<T>::fragment(words.w, fragment[3]);
          if (tile == 0) {
            barrier_wait(full + 8 * stage, parity);
            barrier_wait(ready + 8 * stage, parity);
          }
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int column = tile * 64 + i * 16, block = column / Block;
            if (column % Block == 0) {
#pragma unroll
              for (int n = 0; n < MT / 8; ++n) {
                const float4 start = starts[block * (MT / 2) + n * 4];
                d[4 * n] = start.x;
                d[4 * n + 1] = start.y;
                d[4 * n + 2] = start.z;
                d[4 * n + 3] = start.w;
              }
            }
            if (i == 0 || column % Block == 0) wgmma_fence();
            WgmmaRegisterA<T, MT>::run(d, fragment[i], wide_x | (x + tile * (MT * 128 / 16) + 2 * i));
            if (i == 3 || (column + 16) % Block == 0) wgmma_commit();
            if ((column + 16) % Block == 0)
              add(scale + block * (S::scale_bytes / 4), starts + block * (MT / 2));
          }
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(empty + 8 * stage);
        fetch(w_stage);
        if (++w_stage == S::w_stages) {
          w_stage = 0;
          w_parity ^= 1;
        }
      }

      sync_some<kWarps * 32>(1);  // the sums of the set before are read
#pragma unroll
      for (int i = 0; i < MT / 2; ++i)
        sums[(split * MT + i / 4 * 8 + t * 2 + i % 2) * kPitch + place + g + i % 4 / 2 * 8] = total[i];
      sync_some<kWarps * 32>(1);
      if (mode == Mode::kDense && cluster_size > 1) break;  // the only set of this block
      write(item_at(index), threadIdx.x, kWarps * 32, 1);
    }
  }
  if constexpr (mode == Mode::kDense) {
    if (cluster_size > 1) {
      const auto cluster = cooperative_groups::this_cluster();
      cluster.sync();
      if (first_item < items)
        write(item_at(first_item), rank * kThreads + threadIdx.x, cluster_size * kThreads, cluster_size);
      cluster.sync();  // the sums are there until every block has read them
    }
  }
#endif
}

// Up to 32 rows of x (int4_stream.cu).
eb_status run(const eb_context* context, const Device& device, eb_dtype io, const Int4Problem& p,
              bool symmetric);
// Grouped products, in tiles of `rows` rows, 16 or 32. With a gate, y is [m, n/2]: the gated halves of each
// row.
eb_status run_groups(const eb_context* context, const Device& device, eb_dtype io, const Int4Problem& p,
                     bool symmetric, const Int4Groups& groups, int rows, const Gate* gate);

}  // namespace enginebay::cuda::int4_stream

#endif
