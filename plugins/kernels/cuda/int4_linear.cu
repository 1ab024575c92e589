// QuantLinear with INT4 weights: which kernel for how many rows.
#include "int4_decode.cuh"
#include "int4_gemm.cuh"
#include "int4_stream.cuh"
#include "quant_linear.cuh"

namespace enginebay::cuda {
namespace {

template <typename T>
constexpr eb_dtype kDtype = std::is_same_v<T, half> ? EB_F16 : EB_BF16;

// On sm_90: from 9 to 32 rows int4_stream where W has rows enough for its blocks, else int4_gemm.
bool uses_stream(int64_t m, int n, int multiprocessors) {
  return m > 8 && m <= 32 && ceil_div(n, int4_stream::kRows) * 3 >= multiprocessors;
}

template <typename T, int BlockTiles, bool Symmetric>
eb_status by_rows(const eb_context* context, const Device& device, const Int4Problem& p, float* workspace) {
  if (p.m <= 8) return int4_decode::run<T, 1, BlockTiles, Symmetric>(context, device, p);
  if (device.capability == 90 && uses_stream(p.m, p.n, device.multiprocessors))
    return int4_stream::run(context, device, kDtype<T>, p, Symmetric);
  if (device.capability == 90) switch (int4_gemm::rows_per_block(p.m)) {
      case 32:
        return int4_gemm::run<T, 32, BlockTiles, Symmetric>(context, device, p, workspace);
      case 64:
        return int4_gemm::run<T, 64, BlockTiles, Symmetric>(context, device, p, workspace);
      case 128:
        return int4_gemm::run<T, 128, BlockTiles, Symmetric>(context, device, p, workspace);
      default:
        return int4_gemm::run<T, 256, BlockTiles, Symmetric>(context, device, p, workspace);
    }
  // Without wgmma: sixteen rows at a time, reading the weights again each time.
  for (int m = 0; m < p.m; m += 16) {
    Int4Problem part = p;
    part.x = static_cast<const T*>(p.x) + int64_t{m} * p.k;
    part.y = static_cast<T*>(p.y) + int64_t{m} * p.n;
    part.m = min(16, p.m - m);
    EB_RETURN_IF_ERROR((int4_decode::run<T, 2, BlockTiles, Symmetric>(context, device, part)));
  }
  return EB_OK;
}

template <typename T>
eb_status by_format(const eb_context* context, const Device& device, const Int4Problem& p, bool symmetric,
                    float* workspace) {
  if (p.block_size == 64)
    return symmetric ? by_rows<T, 1, true>(context, device, p, workspace)
                     : by_rows<T, 1, false>(context, device, p, workspace);
  return symmetric ? by_rows<T, 2, true>(context, device, p, workspace)
                   : by_rows<T, 2, false>(context, device, p, workspace);
}

template <typename T, int BlockTiles, bool Symmetric>
eb_status groups_by_rows(const eb_context* context, const Device& device, const Int4Problem& p,
                         const Int4Groups& groups, int most_tiles, int rows) {
  switch (rows) {
    case 64:
      return int4_gemm::run_groups<T, 64, BlockTiles, Symmetric>(context, device, p, groups, most_tiles);
    case 128:
      return int4_gemm::run_groups<T, 128, BlockTiles, Symmetric>(context, device, p, groups, most_tiles);
    default:
      return int4_gemm::run_groups<T, 256, BlockTiles, Symmetric>(context, device, p, groups, most_tiles);
  }
}

template <typename T>
eb_status groups_by_format(const eb_context* context, const Device& device, const Int4Problem& p,
                           bool symmetric, const Int4Groups& groups, int most_tiles, int rows) {
  if (p.block_size == 64)
    return symmetric ? groups_by_rows<T, 1, true>(context, device, p, groups, most_tiles, rows)
                     : groups_by_rows<T, 1, false>(context, device, p, groups, most_tiles, rows);
  return symmetric ? groups_by_rows<T, 2, true>(context, device, p, groups, most_tiles, rows)
                   : groups_by_rows<T, 2, false>(context, device, p, groups, most_tiles, rows);
}

// Packed weights to plain ones [n, k], a warp a tile: for so many rows of x that one product of plain
// matrices beats dequantising for each block of rows.
template <typename T>
__global__ void __launch_bounds__(256)
    dequantise(const uint8_t* packed, int n, int k, int block_size, bool symmetric, T* w) {
  __shared__ __align__(16) T staged[8][16][64 + 8];
  let_next_start();
  wait_for_previous();
  const Int4Layout layout(k, n, block_size, symmetric);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int64_t index = int64_t{blockIdx.x} * 8 + warp;
  if (index >= int64_t{layout.row_tiles} * layout.k_tiles) return;
  const int tile = static_cast<int>(index / layout.k_tiles),
            column = static_cast<int>(index % layout.k_tiles);
  const uint4 words = load_stream16(packed + index * 512 + lane * 16);
  const uint32_t word[4] = {words.x, words.y, words.z, words.w};
  const uint8_t* const block =
      packed + layout.value_bytes +
      (int64_t{tile} * layout.blocks + column * 64 / block_size) * layout.scale_bytes;
  using Pair = typename Half16<T>::Pair;
  Pair scale, centre = Half16<T>::pair(0.f, 0.f);
  if (symmetric) {
    scale = reinterpret_cast<const Pair*>(block)[g];
  } else {
    scale = reinterpret_cast<const Pair*>(block)[2 * g];
    centre = reinterpret_cast<const Pair*>(block)[2 * g + 1];
  }
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    Pair q[4];
    int4_fragment<T>(word[step], q);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Pair s = i % 2 ? Pair{scale.y, scale.y} : Pair{scale.x, scale.x};
      const Pair c = i % 2 ? Pair{centre.y, centre.y} : Pair{centre.x, centre.x};
      *reinterpret_cast<Pair*>(&staged[warp][g + i % 2 * 8][step * 16 + i / 2 * 8 + t * 2]) =
          __hfma2(q[i], s, c);
    }
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = i * 4 + lane / 8, piece = lane % 8 * 8;
    if (tile * 16 + row < n)
      *reinterpret_cast<uint4*>(w + int64_t{tile * 16 + row} * k + column * 64 + piece) =
          *reinterpret_cast<const uint4*>(&staged[warp][row][piece]);
  }
}

eb_quant_linear_desc plain(const eb_quant_linear_desc& desc) {
  eb_quant_linear_desc wide = desc;
  wide.format = desc.io_dtype;
  wide.block_size = 0;
  wide.symmetric = 1;
  return wide;
}

// From here on the dequantised product wins (benchmarks/RESULTS.md).
constexpr int64_t kDequantiseRows = 768;

bool dequantises(const eb_quant_linear_desc& desc, int64_t rows) {
  return rows >= kDequantiseRows && desc.out_features % 16 == 0 && lt_missing() == nullptr;
}

size_t plain_bytes(const eb_quant_linear_desc& desc) {
  return ceil_div<size_t>(size_t{2} * desc.in_features * desc.out_features, 256) * 256;
}

template <typename T>
eb_status run_dequantised(const eb_context* context, const Device& device, const eb_quant_linear_desc& desc,
                          int64_t rows, const void* x, const void* packed, const float* bias, void* y,
                          void* workspace) {
  const int64_t tiles = int64_t{ceil_div(desc.out_features, 16)} * (desc.in_features / 64);
  EB_RETURN_IF_CUDA(
      context, launch(device, stream_of(context), dim3(static_cast<unsigned>(ceil_div<int64_t>(tiles, 8))),
                      dim3(256), 0, 1, dequantise<T>, static_cast<const uint8_t*>(packed), desc.out_features,
                      desc.in_features, desc.block_size, desc.symmetric != 0, static_cast<T*>(workspace)));
  return lt_run(context, device, plain(desc), rows, x, workspace, bias, y,
                static_cast<uint8_t*>(workspace) + plain_bytes(desc));
}

template <typename T>
__global__ void embed(const uint8_t* packed, int n, int k, int block_size, bool symmetric, const int32_t* ids,
                      T* y) {
  let_next_start();
  wait_for_previous();
  const Int4Layout layout(k, n, block_size, symmetric);
  const int id = ids[blockIdx.x];
  T* const out = y + int64_t{blockIdx.x} * k;
  const bool known = id >= 0 && id < n;  // an id outside gives NaN: visible, and no wild read
  for (int c = threadIdx.x; c < k; c += blockDim.x) {
    float w = __int_as_float(0x7fc00000);
    if (known) {
      int word, shift;
      int4_place(id % 16, c % 64, &word, &shift);
      const int64_t tile = id / 16;
      const uint32_t v =
          reinterpret_cast<const uint32_t*>(packed)[(tile * layout.k_tiles + c / 64) * 128 + word];
      const T* s = reinterpret_cast<const T*>(packed + layout.value_bytes +
                                              (tile * layout.blocks + c / block_size) * layout.scale_bytes) +
                   (id % 8) * (symmetric ? 2 : 4) + id % 16 / 8;
      w = to_float(s[0]) * (static_cast<int>((v >> shift) & 15) - 8);
      if (!symmetric) w += to_float(s[2]);
    }
    out[c] = from_float<T>(w);
  }
}

}  // namespace

size_t int4_workspace_bytes(const eb_quant_linear_desc& desc, int64_t rows, int multiprocessors) {
  if (rows <= 8 || uses_stream(rows, desc.out_features, multiprocessors)) return 0;
  if (dequantises(desc, rows)) return plain_bytes(desc) + lt_workspace_bytes(plain(desc), rows);
  const int slices = int4_gemm::splits(multiprocessors, rows, desc.out_features, desc.in_features);
  return slices == 1 ? 0 : size_t{4} * slices * rows * desc.out_features;
}

eb_status int4_run(const eb_context* context, const Device& device, const eb_quant_linear_desc& desc,
                   int64_t rows, const void* x, const void* packed, const float* bias, void* y,
                   void* workspace) {
  if (dequantises(desc, rows))
    return desc.io_dtype == EB_F16
               ? run_dequantised<half>(context, device, desc, rows, x, packed, bias, y, workspace)
               : run_dequantised<__nv_bfloat16>(context, device, desc, rows, x, packed, bias, y, workspace);
  const Int4Problem problem{static_cast<const uint8_t*>(packed),
                            x,
                            bias,
                            y,
                            static_cast<int>(rows),
                            desc.out_features,
                            desc.in_features,
                            desc.block_size};
  float* const scratch = static_cast<float*>(workspace);
  return desc.io_dtype == EB_F16
             ? by_format<half>(context, device, problem, desc.symmetric != 0, scratch)
             : by_format<__nv_bfloat16>(context, device, problem, desc.symmetric != 0, scratch);
}

eb_status int4_run_groups(const eb_context* context, const Device& device, eb_dtype io, const Int4Problem& p,
                          bool symmetric, const Int4Groups& groups, int most_tiles, int rows) {
  return io == EB_F16
             ? groups_by_format<half>(context, device, p, symmetric, groups, most_tiles, rows)
             : groups_by_format<__nv_bfloat16>(context, device, p, symmetric, groups, most_tiles, rows);
}

eb_status int4_embedding(const eb_context* context, const eb_quant_linear_desc& desc, int64_t rows,
                         const int32_t* ids, const void* packed, void* y) {
  Device device;
  EB_RETURN_IF_ERROR(current_device(context, &device));
  const auto* bytes = static_cast<const uint8_t*>(packed);
  const dim3 grid(static_cast<unsigned>(rows));
  const bool symmetric = desc.symmetric != 0;
  EB_RETURN_IF_CUDA(context, desc.io_dtype == EB_F16
                                 ? launch(device, stream_of(context), grid, dim3(256), 0, 1, embed<half>,
                                          bytes, desc.out_features, desc.in_features, desc.block_size,
                                          symmetric, ids, static_cast<half*>(y))
                                 : launch(device, stream_of(context), grid, dim3(256), 0, 1,
                                          embed<__nv_bfloat16>, bytes, desc.out_features, desc.in_features,
                                          desc.block_size, symmetric, ids, static_cast<__nv_bfloat16*>(y)));
  return EB_OK;
}

}  // namespace enginebay::cuda
