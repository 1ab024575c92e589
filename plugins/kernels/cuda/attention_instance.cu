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
  EB_RETURN_IF_CUDA(context,
                    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
  EB_RETURN_IF_CUDA(context, launch(device, stream_of(context), dim3(static_cast<unsigned>(blocks)),
                                    dim3(static_cast<unsigned>(threads)), static_cast<size_t>(shared), 1,
                                    kernel, step, more...));
  return EB_OK;
}

template <typename Io, typename Cache, int D>
eb_status run(const eb_context* context, const Device& device, const Step& step, bool all_split) {
  const dim3 tokens(static_cast<unsigned>(step.a.tokens + 1));
  EB_RETURN_IF_CUDA(context, launch(device, stream_of(context), tokens, dim3(kPrepareThreads), 0, 1,
                                    prepare<Io, Cache, D>, step, all_split));
  EB_RETURN_IF_ERROR(start(context, device, step.slots, kSplitThreads, SplitShape<Io, Cache, D>::shared,
                           split<Io, Cache, D>, step));
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
                              SplitShape<EB_IO, EB_CACHE, EB_HEAD_DIM>::blocks,
                              prefill_rows<EB_CACHE, EB_HEAD_DIM>,
                              run<EB_IO, EB_CACHE, EB_HEAD_DIM>};

}  // namespace enginebay::cuda::attention
