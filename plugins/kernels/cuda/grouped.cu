// Every instance of grouped.cuh.
#include "grouped.cuh"

namespace enginebay::cuda::grouped {
namespace {

template <typename T, typename Weights, int MT>
eb_status start(const eb_context* context, const Device& device, const Int4Problem& p,
                const Int4Groups& groups, int most_tiles) {
  constexpr int shared = kShared<Weights, MT>;
  const auto function = kernel<T, Weights, MT>;
  EB_RETURN_IF_CUDA(context,
                    cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
  const dim3 grid(static_cast<unsigned>(most_tiles), static_cast<unsigned>(ceil_div(p.n, kRows)));
  EB_RETURN_IF_CUDA(context,
                    launch(device, stream_of(context), grid, dim3(kThreads), shared, 1, function, p, groups));
  return EB_OK;
}

template <typename T, typename Weights>
eb_status by_rows(const eb_context* context, const Device& device, const Int4Problem& p,
                  const Int4Groups& groups, int most_tiles, int rows) {
  return rows == 16 ? start<T, Weights, 16>(context, device, p, groups, most_tiles)
                    : start<T, Weights, 64>(context, device, p, groups, most_tiles);
}

template <typename T>
eb_status by_format(const eb_context* context, const Device& device, eb_dtype format, const Int4Problem& p,
                    bool symmetric, const Int4Groups& groups, int most_tiles, int rows) {
  if (format == EB_F8E4M3) return by_rows<T, Eight<T>>(context, device, p, groups, most_tiles, rows);
  if (format != EB_I4) return by_rows<T, Wide<T>>(context, device, p, groups, most_tiles, rows);
  return symmetric ? by_rows<T, Four<T, true>>(context, device, p, groups, most_tiles, rows)
                   : by_rows<T, Four<T, false>>(context, device, p, groups, most_tiles, rows);
}

}  // namespace

eb_status run(const eb_context* context, const Device& device, eb_dtype format, eb_dtype io,
              const Int4Problem& p, bool symmetric, const Int4Groups& groups, int most_tiles, int rows) {
  return io == EB_F16
             ? by_format<half>(context, device, format, p, symmetric, groups, most_tiles, rows)
             : by_format<__nv_bfloat16>(context, device, format, p, symmetric, groups, most_tiles, rows);
}

}  // namespace enginebay::cuda::grouped
