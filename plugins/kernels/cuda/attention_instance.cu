// One (io dtype, cache dtype, head size) of PagedAttention. plugins/build_cuda.py compiles this file once for
// each entry of its table, with EB_INSTANCE, EB_IO, EB_CACHE, EB_IO_DTYPE, EB_CACHE_DTYPE and EB_HEAD_DIM
// set.
#include "attention_prefill.cuh"
#include "attention_prepare.cuh"
#include "attention_split.cuh"
#include "attention_wgmma.cuh"

namespace enginebay::cuda::attention {
namespace {

using Io = EB_IO;
using Cache = EB_CACHE;
constexpr int D = EB_HEAD_DIM;
constexpr bool kHasWgmma = sizeof(Cache) == 2 && (D == 64 || D == 128);

bool uses_wgmma(const Device& device) { return kHasWgmma && device.capability == 90; }

int prefill_rows(const Device& device) { return uses_wgmma(device) ? kWgmmaRows : kPrefillRows; }

template <typename Kernel>
cudaError_t start(const Device& device, cudaStream_t stream, int64_t blocks, int threads, int shared,
                  Kernel* kernel, const Step& step) {
  const cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (status != cudaSuccess) return status;
  return launch(device, stream, dim3(static_cast<unsigned>(blocks)), dim3(static_cast<unsigned>(threads)),
                static_cast<size_t>(shared), 1, kernel, step);
}

cudaError_t run(const Device& device, cudaStream_t stream, const Step& step, bool all_split) {
  const dim3 tokens(static_cast<unsigned>(step.a.tokens + 1));
  cudaError_t status =
      launch(device, stream, tokens, dim3(kPrepareThreads), 0, 1, prepare<Io, Cache, D>, step, all_split);
  if (status != cudaSuccess) return status;
  status = start(device, stream, step.slots, kSplitThreads, SplitShape<Io, Cache, D>::shared,
                 split<Io, Cache, D>, step);
  if (status != cudaSuccess || all_split) return status;

  const int64_t most =
      (step.a.tokens * step.group / step.prefill_rows + step.a.sequences) * step.d.num_kv_heads;
  if constexpr (kHasWgmma)
    if (uses_wgmma(device))  // a block an item: the device balances them
      return start(device, stream, most, kWgmmaThreads, WgmmaShape<D>::shared, prefill_wgmma<Io, D>, step);
  // A block an item, up to where empty blocks would cost more than the loop's poorer balance.
  const int64_t limit = int64_t{device.multiprocessors} * 32;
  return start(device, stream, most < limit ? most : limit, kPrefillThreads,
               PrefillShape<Io, Cache, D>::shared, prefill<Io, Cache, D>, step);
}

}  // namespace

extern const Instance EB_INSTANCE;
const Instance EB_INSTANCE = {
    EB_IO_DTYPE, EB_CACHE_DTYPE, EB_HEAD_DIM, SplitShape<Io, Cache, D>::blocks, prefill_rows, run};

}  // namespace enginebay::cuda::attention
