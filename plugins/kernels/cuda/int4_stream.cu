// The products of int4_stream.cuh: how many blocks share W, and every instance.
#include "int4_stream.cuh"

namespace enginebay::cuda::int4_stream {
namespace {

template <typename T, int MT, int Block, bool Symmetric, Mode mode>
eb_status start(const eb_context* context, const Device& device, const Int4Problem& p,
                const Int4Groups& groups, const Gate& gate) {
  using S = Shape<MT, Block, Symmetric>;
  const auto function = kernel<T, MT, Block, Symmetric, mode>;
  EB_RETURN_IF_CUDA(context,
                    cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, S::shared));
  CUtensorMap x_map;
  EB_RETURN_IF_ERROR(map_rows(
      context, std::is_same_v<T, half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
      p.x, p.m, p.k, MT, &x_map));
  // Two blocks for each set of rows, each with half of K, where not all multiprocessors would have a block.
  const int sets = ceil_div(p.n, kRows);
  const int cluster =
      mode == Mode::kDense && 2 * sets <= device.multiprocessors && p.k >= 4 * kStepColumns ? 2 : 1;
  const int blocks =
      mode == Mode::kDense ? min(sets * cluster, device.multiprocessors) : device.multiprocessors;
  EB_RETURN_IF_CUDA(context,
                    launch(device, stream_of(context), dim3(static_cast<unsigned>(blocks)), dim3(S::threads),
                           S::shared, cluster, function, p, groups, gate, sets, cluster, x_map));
  return EB_OK;
}

template <typename T, int MT, int Block, bool Symmetric>
eb_status by_mode(const eb_context* context, const Device& device, const Int4Problem& p,
                  const Int4Groups* groups, const Gate* gate) {
  if (groups == nullptr) return start<T, MT, Block, Symmetric, Mode::kDense>(context, device, p, {}, {});
  return gate == nullptr ? start<T, MT, Block, Symmetric, Mode::kGrouped>(context, device, p, *groups, {})
                         : start<T, MT, Block, Symmetric, Mode::kGated>(context, device, p, *groups, *gate);
}

template <typename T, int Block, bool Symmetric>
eb_status by_rows(const eb_context* context, const Device& device, const Int4Problem& p,
                  const Int4Groups* groups, int rows, const Gate* gate) {
  return rows <= 16 ? by_mode<T, 16, Block, Symmetric>(context, device, p, groups, gate)
                    : by_mode<T, 32, Block, Symmetric>(context, device, p, groups, gate);
}

template <typename T>
eb_status by_format(const eb_context* context, const Device& device, const Int4Problem& p, bool symmetric,
                    const Int4Groups* groups, int rows, const Gate* gate) {
  if (p.block_size == 64)
    return symmetric ? by_rows<T, 64, true>(context, device, p, groups, rows, gate)
                     : by_rows<T, 64, false>(context, device, p, groups, rows, gate);
  return symmetric ? by_rows<T, 128, true>(context, device, p, groups, rows, gate)
                   : by_rows<T, 128, false>(context, device, p, groups, rows, gate);
}

eb_status by_type(const eb_context* context, const Device& device, eb_dtype io, const Int4Problem& p,
                  bool symmetric, const Int4Groups* groups, int rows, const Gate* gate) {
  return io == EB_F16 ? by_format<half>(context, device, p, symmetric, groups, rows, gate)
                      : by_format<__nv_bfloat16>(context, device, p, symmetric, groups, rows, gate);
}

}  // namespace

eb_status run(const eb_context* context, const Device& device, eb_dtype io, const Int4Problem& p,
              bool symmetric) {
  return by_type(context, device, io, p, symmetric, nullptr, p.m, nullptr);
}

eb_status run_groups(const eb_context* context, const Device& device, eb_dtype io, const Int4Problem& p,
                     bool symmetric, const Int4Groups& groups, int rows, const Gate* gate) {
  return by_type(context, device, io, p, symmetric, &groups, rows, gate);
}

}  // namespace enginebay::cuda::int4_stream
