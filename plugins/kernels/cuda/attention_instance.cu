// One (io dtype, cache dtype, head size) of PagedAttention. plugins/build_cuda.py compiles this file once for
// each entry of its table, with EB_INSTANCE, EB_IO, EB_CACHE, EB_IO_DTYPE, EB_CACHE_DTYPE and EB_HEAD_DIM
// set.
#include "attention_prefill.cuh"
#include "attention_prepare.cuh"
#include "attention_split.cuh"
#include "attention_wgmma.cuh"

namespace enginebay::cuda::attention {
namespace {

template <typename Cache, int D>
constexpr bool kHasWgmma = sizeof(Cache) == 2 && (D == 64 || D == 128);

template <typename Cache, int D>
bool uses_wgmma(const Device& device) {
  return kHasWgmma<Cache, D> && device.capability == 90;
}

template <typename Cache, int D>
int prefill_rows(const Device& device) {
  return uses_wgmma<Cache, D>(device) ? kWgmmaRows : kPrefillRows;
}

template <typename Kernel, typename... More>
eb_status start(const eb_context* context, const Device& device, int64_t blocks, int threads, int shared,
                Kernel* kernel, const Step& step, More... more) {
  if (shared > device.shared_bytes)
    return fail(
        context, EB_UNSUPPORTED,
        "PagedAttention on CUDA: io %s, cache %s, head_dim %d takes %d bytes of shared memory a block; this "
        "device (sm_%d) has %d",
        dtype_name(step.d.io_dtype), dtype_name(step.d.cache_dtype), step.d.head_dim, shared,
        device.capability, device.shared_bytes);
  EB_RETURN_IF_CUDA(context,
                    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
  EB_RETURN_IF_CUDA(context, launch(device, stream_of(context), dim3(static_cast<unsigned>(blocks)),
                                    dim3(static_cast<unsigned>(threads)), static_cast<size_t>(shared), 1,
                                    kernel, step, more...));
  return EB_OK;
}

// Three stages where keys are small enough for them to leave room for a second block, and the device has the
// memory.
template <typename Io, typename Cache, int D>
bool three_stages(const Device& device) {
  using Shape = SplitShape<Io, Cache, D, 3>;
  return Shape::blocks >= 2 && Shape::shared <= device.shared_bytes;
}

template <typename Io, typename Cache, int D>
int split_blocks(const Device& device) {
  return three_stages<Io, Cache, D>(device) ? SplitShape<Io, Cache, D, 3>::blocks
                                            : SplitShape<Io, Cache, D, 2>::blocks;
}

template <typename Io, typename Cache, int D, int Stages>
eb_status start_split(const eb_context* context, const Device& device, const Step& step) {
  return start(context, device, step.slots, kSplitThreads, SplitShape<Io, Cache, D, Stages>::shared,
               split<Io, Cache, D, Stages>, step);
}

template <typename Io, typename Cache, int D>
eb_status run(const eb_context* context, const Device& device, const Step& step, bool all_split) {
  const dim3 tokens(static_cast<unsigned>(step.a.tokens + 1));
  EB_RETURN_IF_CUDA(context, launch(device, stream_of(context), tokens, dim3(kPrepareThreads), 0, 1,
                                    prepare<Io, Cache, D>, step, all_split));
  EB_RETURN_IF_ERROR((three_stages<Io, Cache, D>(device)
                          ? start_split<Io, Cache, D, 3>(context, device, step)
                          : start_split<Io, Cache, D, 2>(context, device, step)));
  if (all_split) return EB_OK;

  const int64_t most =
      (step.a.tokens * step.group / step.prefill_rows + step.a.sequences) * step.d.num_kv_heads;
  if constexpr (kHasWgmma<Cache, D>)
    if (uses_wgmma<Cache, D>(device)) {
      const int size = step.d.block_size;
      const bool bulk = size >= 8 && size <= kWgmmaKeys && kWgmmaKeys % size == 0;
      CUtensorMap map{};
      if (bulk)
        EB_RETURN_IF_ERROR(map_cache(
            context,
            std::is_same_v<Io, half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            step.a.cache, step.d.num_blocks, size, step.d.num_kv_heads, D, &map));
      // A block an item: the device balances them.
      return start(context, device, most, kWgmmaThreads, WgmmaShape<D>::shared, prefill_wgmma<Io, D>, step,
                   bulk, map);
    }
  // A block an item, up to where empty blocks would cost more than the loop's poorer balance.
  const int64_t limit = int64_t{device.multiprocessors} * 32;
  return start(context, device, most < limit ? most : limit, kPrefillThreads,
               PrefillShape<Io, Cache, D>::shared, prefill<Io, Cache, D>, step);
}

}  // namespace

extern const Instance EB_INSTANCE;
const Instance EB_INSTANCE = {EB_IO_DTYPE,
                              EB_CACHE_DTYPE,
                              EB_HEAD_DIM,
                              split_blocks<EB_IO, EB_CACHE, EB_HEAD_DIM>,
                              prefill_rows<EB_CACHE, EB_HEAD_DIM>,
                              run<EB_IO, EB_CACHE, EB_HEAD_DIM>};

}  // namespace enginebay::cuda::attention
