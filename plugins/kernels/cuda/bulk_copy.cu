// Maps for the bulk copy engine. The driver's encoder is found at run time, so that the library loads without
// a driver.
#include "bulk_copy.cuh"

namespace enginebay::cuda {

eb_status map_rows(const eb_context* context, CUtensorMapDataType type, const void* matrix, int64_t rows,
                   int64_t columns, int tile_rows, CUtensorMap* map) {
  static const auto encode = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found{};
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault,
                                         &found) != cudaSuccess ||
        found != cudaDriverEntryPointSuccess)
      entry = nullptr;
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry);
  }();
  if (encode == nullptr)
    return fail(context, EB_UNSUPPORTED,
                "the CUDA driver has no cuTensorMapEncodeTiled; it needs a driver for CUDA 12");
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t pitch[1] = {static_cast<cuuint64_t>(columns) * 2};
  const cuuint32_t box[2] = {64, static_cast<cuuint32_t>(tile_rows)}, step[2] = {1, 1};
  const CUresult status = encode(map, type, 2, const_cast<void*>(matrix), sizes, pitch, box, step,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS)
    return fail(context, EB_DEVICE_ERROR, "cuTensorMapEncodeTiled of %lld x %lld: status %d",
                static_cast<long long>(rows), static_cast<long long>(columns), static_cast<int>(status));
  return EB_OK;
}

}  // namespace enginebay::cuda
