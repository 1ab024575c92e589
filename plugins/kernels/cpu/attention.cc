// PagedAttention on the caller's threads: prepare all tokens, then attend tile by tile.
#include "attention.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>

#include "cpu_features.h"
#include "parallel.h"
#include "status.h"

namespace enginebay {

const AttentionKernels& attention_kernels(Isa isa) {
  if (isa >= Isa::kAvx512) return attention_kernels_avx512();
  if (isa >= Isa::kAvx2) return attention_kernels_avx2();
  return attention_kernels_baseline();
}

namespace {

// Below this many multiply-adds, waking other threads takes longer than the work.
constexpr int64_t kWorthSharing = 200'000;
constexpr int64_t kPrepareTokens = 4;  // tokens prepared in one go

// Multiply-adds of a step, to the nearest split.
int64_t work(const eb_paged_attention_desc& desc, const Plan& plan, const int32_t* kv_len) {
  int64_t total = 0;
  for (int32_t i = 0; i < plan.header->items; ++i) {
    const PlanItem& item = plan.items[i];
    const PlanTile& tile = plan.tiles[item.tile];
    const int64_t positions = std::min(int64_t{item.end_split} * kSplit, int64_t{kv_len[tile.sequence]}) -
                              int64_t{item.first_split} * kSplit;
    total += tile.tokens * positions;
  }
  return total * desc.num_heads * desc.head_dim * 2;
}

// Key heads of a job: as many as leave every thread some jobs.
int heads_together(const eb_paged_attention_desc& desc, int64_t items, unsigned threads) {
  constexpr int64_t kJobsPerThread = 4;
  const int64_t most = std::min(desc.num_kv_heads, kHeadsTogether);
  return static_cast<int>(
      std::clamp<int64_t>(items * desc.num_kv_heads / (kJobsPerThread * threads), 1, most));
}

}  // namespace
}  // namespace enginebay

using namespace enginebay;  // NOLINT: the C entry point below

extern "C" eb_status eb_paged_attention_run(const eb_context* context, const eb_paged_attention_desc* desc,
                                            const eb_paged_attention_args* args, const int32_t* plan_ints,
                                            size_t plan_count, void* memory, size_t memory_bytes) {
  EB_RETURN_IF_ERROR(check_attention_desc(context, desc));
  if (args == nullptr) return fail(context, EB_INVALID_ARGUMENT, "PagedAttention: the arguments are null");
  EB_RETURN_IF_ERROR(check_attention_args(context, *desc, *args));
  Plan plan;
  EB_RETURN_IF_ERROR(read_plan(context, *desc, *args, plan_ints, plan_count, &plan));
  const PlanBounds bounds = plan_bounds(context, *desc, args->tokens, args->sequences);
  const AttentionWorkspace workspace = attention_workspace(context, *desc, args->tokens, bounds);
  if (memory == nullptr || memory_bytes < workspace.bytes) {
    return fail(context, EB_INVALID_ARGUMENT,
                "PagedAttention: the workspace has %zu bytes, this step takes %zu", memory_bytes,
                workspace.bytes);
  }
  CpuFeatures features;
  EB_RETURN_IF_ERROR(cpu_features(context, &features));
  const AttentionKernels& kernels = attention_kernels(features.isa);

  char* base = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(memory) + 63) & ~uintptr_t{63});
  AttentionCall call{};
  call.desc = desc, call.args = args;
  call.shape = attention_shape(*desc);
  (is_tiered(*desc) ? call.tier_scales : call.scales) = cache_scales(*desc, *args);
  call.offsets = cache_scales_of(args->cache_offsets, desc->num_kv_heads, desc->head_dim);
  cache_pools(*desc, *args, call.pools);
  call.queries = reinterpret_cast<float*>(base + workspace.queries);
  call.parts = reinterpret_cast<float*>(base + workspace.parts);
  const int64_t tokens = args->query_start[args->sequences];
  const int64_t out_width = int64_t{desc->num_heads} * call.shape.value_dim;
  std::memset(static_cast<float*>(args->attention) + tokens * out_width, 0,
              sizeof(float) * (args->tokens - tokens) * out_width);

  eb_context shared = *context;
  if (work(*desc, plan, args->kv_len) < kWorthSharing) shared.parallel_for = nullptr;
  parallel_for(&shared, (tokens + kPrepareTokens - 1) / kPrepareTokens, [&](size_t i) {
    const int64_t first = static_cast<int64_t>(i) * kPrepareTokens;
    kernels.prepare(call, first, std::min(first + kPrepareTokens, tokens));
  });

  // A job is some key heads of an item. Who does the last of a tile's parts merges them.
  const int together = heads_together(*desc, plan.header->items, thread_count(&shared));
  const int chunks = (desc->num_kv_heads + together - 1) / together;
  auto* done = reinterpret_cast<std::atomic<uint32_t>*>(base + workspace.counters);
  for (int64_t i = 0; i < int64_t{plan.header->tiles} * chunks; ++i) new (done + i) std::atomic<uint32_t>(0);
  std::atomic<int64_t> next{0};
  const int64_t jobs = int64_t{plan.header->items} * chunks;
  const int workers = static_cast<int>(std::min<int64_t>(jobs, thread_count(&shared)));
  const auto job_at = [&](int64_t index) {
    const PlanItem& item = plan.items[index / chunks];
    const int first = static_cast<int>(index % chunks) * together;
    return AttentionJob{&plan.tiles[item.tile], first, std::min(together, desc->num_kv_heads - first),
                        item.first_split, item.end_split};
  };
  const auto work_on = [&](size_t worker) {
    auto* scratch = reinterpret_cast<float*>(base + workspace.scratch + worker * workspace.scratch_bytes);
    for (int64_t index = next.fetch_add(1); index < jobs; index = next.fetch_add(1)) {
      const AttentionJob job = job_at(index);
      // Threads that keep step with each other take every workers-th job.
      const bool more = index + workers < jobs;
      const AttentionJob following = more ? job_at(index + workers) : job;
      kernels.attend(call, job, more ? &following : nullptr, scratch);
      const PlanTile& tile = *job.tile;
      if (tile.part_token < 0) continue;
      const uint32_t parts = static_cast<uint32_t>(tile.end_split - tile.first_split);
      auto& finished = done[(&tile - plan.tiles) * chunks + index % chunks];
      if (finished.fetch_add(1, std::memory_order_acq_rel) + 1 < parts) continue;
      for (int i = 0; i < job.heads; ++i) kernels.merge(call, tile, job.first_head + i, scratch);
    }
  };
  parallel_for(&shared, static_cast<size_t>(workers), work_on);
  return EB_OK;
}
