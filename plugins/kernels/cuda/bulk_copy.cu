// Maps for the bulk copy engine. The driver's encoder is found at run time, so that the library loads without
// a driver.
#include "bulk_copy.cuh"

namespace enginebay::cuda {

namespace {

eb_status encode(const eb_context* context, CUtensorMapDataType type, const void* data, int rank,
                 const cuuint64_t* sizes, const cuuint64_t* pitches, const cuuint32_t* box,
                 CUtensorMap* map) {
  static const auto function = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found{};
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault,
                                         &found) != cudaSuccess ||
        found != cudaDriverEntryPointSuccess)
      entry = nullptr;
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry);
  }();
  if (function == nullptr)
    return fail(context, EB_UNSUPPORTED,
                "the CUDA driver has no cuTensorMapEncodeTiled; it needs a driver for CUDA 12");
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  const CUresult status =
      function(map, type, static_cast<cuuint32_t>(rank), const_cast<void*>(data), sizes, pitches, box, steps,
               CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
               CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS)
    return fail(context, EB_DEVICE_ERROR, "cuTensorMapEncodeTiled: status %d", static_cast<int>(status));
  return EB_OK;
}

}  // namespace

eb_status map_rows(const eb_context* context, CUtensorMapDataType type, const void* matrix, int64_t rows,
                   int64_t columns, int tile_rows, CUtensorMap* map) {
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t pitch[1] = {static_cast<cuuint64_t>(columns) * 2};
  const cuuint32_t box[2] = {64, static_cast<cuuint32_t>(tile_rows)};
  return encode(context, type, matrix, 2, sizes, pitch, box, map);
}

eb_status map_cache(const eb_context* context, CUtensorMapDataType type, const void* cache, int blocks,
                    int block_size, int heads, int head_dim, CUtensorMap* map) {
  const auto d = static_cast<cuuint64_t>(head_dim), h = static_cast<cuuint64_t>(heads);
  const auto b = static_cast<cuuint64_t>(block_size);
  const cuuint64_t sizes[4] = {d, h, b, static_cast<cuuint64_t>(blocks) * 2};
  const cuuint64_t pitches[3] = {d * 2, h * d * 2, b * h * d * 2};
  const cuuint32_t box[4] = {64, 1, static_cast<cuuint32_t>(block_size), 1};
  return encode(context, type, cache, 4, sizes, pitches, box, map);
}

}  // namespace enginebay::cuda
