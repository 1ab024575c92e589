// PagedAttention's ABI: validation, workspace, and which instance runs.
#include "attention.cuh"
#include "attention_instances.h"  // written by plugins/build_cuda.py: EB_ATTENTION_INSTANCES(X)

namespace enginebay::cuda::attention {

#define EB_DECLARE(name) extern const Instance name;
EB_ATTENTION_INSTANCES(EB_DECLARE)
#undef EB_DECLARE

#define EB_ADDRESS(name) &name,
static const Instance* const kInstances[] = {EB_ATTENTION_INSTANCES(EB_ADDRESS)};
#undef EB_ADDRESS

}  // namespace enginebay::cuda::attention

namespace {

using namespace enginebay;
using namespace enginebay::cuda;
using attention::Instance;
using attention::Step;
using attention::Workspace;

eb_status find(const eb_context* context, const eb_paged_attention_desc* d, const Instance** instance) {
  EB_RETURN_IF_ERROR(check_context(context));
  if (d == nullptr) return fail(context, EB_INVALID_ARGUMENT, "PagedAttention: desc is NULL");
  if (d->num_heads <= 0 || d->num_kv_heads <= 0 || d->num_heads % d->num_kv_heads != 0)
    return fail(context, EB_INVALID_ARGUMENT,
                "PagedAttention: num_heads %d must be a positive multiple of num_kv_heads %d", d->num_heads,
                d->num_kv_heads);
  if (d->latent_dim != 0)
    return fail(context, EB_UNSUPPORTED, "PagedAttention on CUDA: no latent attention (latent_dim %d)",
                d->latent_dim);
  if (d->block_size <= 0 || d->num_blocks <= 0 || d->table_width <= 0)
    return fail(context, EB_INVALID_ARGUMENT,
                "PagedAttention: block_size %d, num_blocks %d and table_width %d must be positive",
                d->block_size, d->num_blocks, d->table_width);
  if (d->head_dim <= 0 || d->rotary_dim < 0 || d->rotary_dim % 2 != 0 || d->rotary_dim > d->head_dim)
    return fail(context, EB_INVALID_ARGUMENT,
                "PagedAttention: rotary_dim %d must be even and at most head_dim %d", d->rotary_dim,
                d->head_dim);
  if (d->rotary_dim > 0 && d->rope_positions <= 0)
    return fail(context, EB_INVALID_ARGUMENT, "PagedAttention: rotary_dim %d with rope_positions %d",
                d->rotary_dim, d->rope_positions);
  if (d->window < 0 || !(d->softcap >= 0.f) || !(d->scale == d->scale))
    return fail(context, EB_INVALID_ARGUMENT,
                "PagedAttention: window %d, softcap %g, scale %g; neither negative nor NaN", d->window,
                d->softcap, d->scale);
  if (d->num_heads / d->num_kv_heads > attention::kSplitLimit)
    return fail(context, EB_UNSUPPORTED, "PagedAttention on CUDA: %d query heads a key head; it has up to %d",
                d->num_heads / d->num_kv_heads, attention::kSplitLimit);
  for (const Instance* candidate : attention::kInstances)
    if (candidate->io == d->io_dtype && candidate->cache == d->cache_dtype &&
        candidate->head_dim == d->head_dim) {
      *instance = candidate;
      return EB_OK;
    }
  return fail(
      context, EB_UNSUPPORTED,
      "PagedAttention on CUDA: this library was built without io %s, cache %s, head_dim %d; its table is "
      "ATTENTION in plugins/build_cuda.py",
      dtype_name(d->io_dtype), dtype_name(d->cache_dtype), d->head_dim);
}

eb_status check_counts(const eb_context* context, int64_t tokens, int64_t sequences) {
  if (tokens < 0 || sequences < 0 || tokens > INT32_MAX / 2 || sequences > INT32_MAX / 2)
    return fail(context, EB_INVALID_ARGUMENT,
                "PagedAttention: tokens %lld, sequences %lld; both at least 0, below 2^30",
                static_cast<long long>(tokens), static_cast<long long>(sequences));
  return EB_OK;
}

constexpr int kMostMultiprocessors = 256;  // where no device can be asked

int most_slots(int multiprocessors) { return multiprocessors * attention::kMostBlocks; }

bool aligned(const void* p, uintptr_t to) { return reinterpret_cast<uintptr_t>(p) % to == 0; }

eb_status check_args(const eb_context* context, const eb_paged_attention_desc& d,
                     const eb_paged_attention_args* a) {
  if (a == nullptr) return fail(context, EB_INVALID_ARGUMENT, "PagedAttention: args is NULL");
  EB_RETURN_IF_ERROR(check_counts(context, a->tokens, a->sequences));
  if (a->tokens == 0) return EB_OK;
  if (a->sequences == 0)
    return fail(context, EB_INVALID_ARGUMENT, "PagedAttention: %lld tokens of 0 sequences",
                static_cast<long long>(a->tokens));
  const struct {
    const char* name;
    const void* pointer;
    uintptr_t alignment;
    bool needed;
  } pointers[] = {
      {"qkv", a->qkv, 16, true},
      {"cache", a->cache, 16, true},
      {"query_start", a->query_start, 4, true},
      {"kv_len", a->kv_len, 4, true},
      {"block_table", a->block_table, 4, true},
      {"slot_mapping", a->slot_mapping, 4, true},
      {"position_ids", a->position_ids, 4, true},
      {"attention", a->attention, 16, true},
      {"rope_cos", a->rope_cos, 4, d.rotary_dim > 0},
      {"rope_sin", a->rope_sin, 4, d.rotary_dim > 0},
      {"q_norm", a->q_norm, 4, false},
      {"k_norm", a->k_norm, 4, false},
      {"sinks", a->sinks, 4, false},
      {"cache_scales", a->cache_scales, 4, false},
      {"tree_mask", a->tree_mask, 4, false},
  };
  for (const auto& p : pointers) {
    if (p.needed && p.pointer == nullptr)
      return fail(context, EB_INVALID_ARGUMENT, "PagedAttention: %s is NULL", p.name);
    if (!aligned(p.pointer, p.alignment))
      return fail(context, EB_INVALID_ARGUMENT, "PagedAttention: %s at %p is not aligned to %zu bytes",
                  p.name, p.pointer, static_cast<size_t>(p.alignment));
  }
  const bool narrow = d.cache_dtype == EB_F8E4M3 || d.cache_dtype == EB_I8;
  if (!narrow && a->cache_scales != nullptr)
    return fail(context, EB_INVALID_ARGUMENT,
                "PagedAttention: cache_scales with a %s cache; only 8-bit caches have scales",
                dtype_name(d.cache_dtype));
  if (a->cache_offsets != nullptr)
    return fail(context, EB_UNSUPPORTED,
                "PagedAttention on CUDA: cache_offsets given; it has no int4 caches");
  if (d.num_blocks_int8 > 0 || d.num_blocks_int4 > 0)
    return fail(context, EB_UNSUPPORTED,
                "PagedAttention on CUDA: it has one pool, no cache_int8 or cache_int4");
  if (a->tree_mask != nullptr && a->tree_words <= 0)
    return fail(context, EB_INVALID_ARGUMENT, "PagedAttention: tree_mask with tree_words %d", a->tree_words);
  return EB_OK;
}

}  // namespace

extern "C" {

eb_status eb_paged_attention_plan_size(const eb_context* context, const eb_paged_attention_desc* desc,
                                       int64_t tokens, int64_t sequences, size_t* plan_ints,
                                       size_t* workspace_bytes) {
  const Instance* instance = nullptr;
  EB_RETURN_IF_ERROR(find(context, desc, &instance));
  EB_RETURN_IF_ERROR(check_counts(context, tokens, sequences));
  if (plan_ints == nullptr || workspace_bytes == nullptr)
    return fail(context, EB_INVALID_ARGUMENT, "PagedAttention: plan_ints or workspace_bytes is NULL");
  int device = 0, multiprocessors = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) {
    (void)cudaGetLastError();
    multiprocessors = kMostMultiprocessors;
  }
  *plan_ints = 0;
  *workspace_bytes = Workspace(*desc, tokens, sequences, most_slots(multiprocessors)).total;
  return EB_OK;
}

// The plan is made on the device, by `run`: what a captured graph replays sees the lengths of its own step.
eb_status eb_paged_attention_plan(const eb_context* context, const eb_paged_attention_desc* desc,
                                  int64_t tokens, int64_t sequences, const int32_t*, const int32_t*, int32_t*,
                                  size_t plan_ints) {
  const Instance* instance = nullptr;
  EB_RETURN_IF_ERROR(find(context, desc, &instance));
  EB_RETURN_IF_ERROR(check_counts(context, tokens, sequences));
  if (plan_ints != 0)
    return fail(context, EB_INVALID_ARGUMENT,
                "PagedAttention on CUDA: a plan of %zu ints; it plans on the device, in 0", plan_ints);
  return EB_OK;
}

eb_status eb_paged_attention_run(const eb_context* context, const eb_paged_attention_desc* desc,
                                 const eb_paged_attention_args* args, const int32_t*, size_t plan_ints,
                                 void* workspace, size_t workspace_bytes) {
  const Instance* instance = nullptr;
  EB_RETURN_IF_ERROR(find(context, desc, &instance));
  EB_RETURN_IF_ERROR(check_args(context, *desc, args));
  if (plan_ints != 0)
    return fail(context, EB_INVALID_ARGUMENT,
                "PagedAttention on CUDA: a plan of %zu ints; it plans on the device, in 0", plan_ints);
  if (args->tokens == 0) return EB_OK;
  Device device;
  EB_RETURN_IF_ERROR(current_device(context, &device));
  if (desc->cache_dtype == EB_F8E4M3 && device.capability < 89)
    return fail(context, EB_UNSUPPORTED,
                "PagedAttention: a float8e4m3 cache needs sm_89 or newer; this device is sm_%d",
                device.capability);
  const Workspace layout(*desc, args->tokens, args->sequences, most_slots(device.multiprocessors));
  if (workspace == nullptr || !aligned(workspace, 256) || workspace_bytes < layout.total)
    return fail(context, EB_INVALID_ARGUMENT,
                "PagedAttention: workspace %p of %zu bytes; it takes %zu, aligned to 256 bytes", workspace,
                workspace_bytes, layout.total);
  auto* const base = static_cast<uint8_t*>(workspace);
  const Step step{*desc,
                  *args,
                  desc->num_heads / desc->num_kv_heads,
                  attention::Divider(desc->num_heads / desc->num_kv_heads),
                  attention::Divider(desc->block_size),
                  instance->prefill_rows(device),
                  device.multiprocessors * instance->split_blocks(device),
                  base + layout.queries,
                  reinterpret_cast<attention::Counts*>(base + layout.counts),
                  reinterpret_cast<attention::Item*>(base + layout.split_items),
                  reinterpret_cast<attention::Item*>(base + layout.prefill_items),
                  reinterpret_cast<int*>(base + layout.counters),
                  reinterpret_cast<float*>(base + layout.partial)};
  // Decode, or nearly: the split kernel takes all there is, and nothing else is launched.
  const bool all_split =
      args->tokens <= 2 * args->sequences || args->tokens * step.group <= attention::kSplitLimit;
  return instance->run(context, device, step, all_split);
}

}  // extern "C"
