// CacheConvert: checks everything, then converts blocks on the caller's threads.
#include "enginebay/cache_convert.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <new>

#include "attention.h"
#include "cpu_features.h"
#include "parallel.h"
#include "status.h"

namespace enginebay {
namespace {

// Elements are read as what they are.
eb_status check_alignment(const eb_context* context, const char* name, const void* pointer, size_t bytes) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  if (address % bytes == 0) return EB_OK;
  return fail(context, EB_INVALID_ARGUMENT, "CacheConvert: %s is %zu bytes past a multiple of %zu", name,
              static_cast<size_t>(address % bytes), bytes);
}

bool is_wide(eb_dtype dtype) { return dtype == EB_F32 || dtype == EB_F16 || dtype == EB_BF16; }

eb_status check_desc(const eb_context* context, const eb_cache_convert_desc* desc) {
  EB_RETURN_IF_ERROR(check_context(context));
  if (desc == nullptr) return fail(context, EB_INVALID_ARGUMENT, "CacheConvert: the descriptor is null");
  const struct {
    const char* name;
    int value, least, most;
  } sizes[] = {
      {"num_kv_heads", desc->num_kv_heads, 1, 1 << 16},
      {"head_dim", desc->head_dim, 1, kMaxHeadDim},
      {"block_size", desc->block_size, 1, 1 << 20},
      {"source_blocks", desc->source_blocks, 0, INT32_MAX},
      {"destination_blocks", desc->destination_blocks, 0, INT32_MAX},
  };
  for (const auto& size : sizes) {
    if (size.value < size.least || size.value > size.most) {
      return fail(context, EB_INVALID_ARGUMENT, "CacheConvert: %s is %d, expected %d to %d", size.name,
                  size.value, size.least, size.most);
    }
  }
  const eb_dtype from = desc->source_dtype, into = desc->destination_dtype;
  if (!(is_wide(from) && (into == EB_I8 || into == EB_I4)) && !(from == EB_I8 && into == EB_I4)) {
    return fail(context, EB_UNSUPPORTED,
                "CacheConvert: from %s to %s; it goes from float32, float16 or bfloat16 to int8 or int4, and "
                "from int8 to int4",
                dtype_name(from), dtype_name(into));
  }
  if (into == EB_I4 && desc->head_dim % EB_INT4_CACHE_GROUP != 0) {
    return fail(context, EB_UNSUPPORTED,
                "CacheConvert: head_dim %d is no multiple of %d, which an int4 cache takes", desc->head_dim,
                EB_INT4_CACHE_GROUP);
  }
  const int32_t dim = desc->cache_scale_dim;
  if (dim != 0 && dim != 1 && dim != desc->head_dim) {
    return fail(context, EB_INVALID_ARGUMENT,
                "CacheConvert: cache_scale_dim is %d, expected 1 or head_dim %d", dim, desc->head_dim);
  }
  return EB_OK;
}

eb_status check_pairs(const eb_context* context, const eb_cache_convert_desc& desc, const int32_t* pairs,
                      int64_t count) {
  if (count < 0 || count > desc.destination_blocks) {
    return fail(context, EB_INVALID_ARGUMENT, "CacheConvert: %lld pairs; the destination has %d blocks",
                static_cast<long long>(count), desc.destination_blocks);
  }
  const std::unique_ptr<int32_t[]> taken(new (std::nothrow) int32_t[count]);
  if (taken == nullptr) return fail(context, EB_INTERNAL, "CacheConvert: no memory to check the pairs");
  for (int64_t i = 0; i < count; ++i) {
    const int32_t ids[] = {pairs[2 * i], pairs[2 * i + 1]};
    const int32_t blocks[] = {desc.source_blocks, desc.destination_blocks};
    for (int side = 0; side < 2; ++side) {
      if (ids[side] >= 0 && ids[side] < blocks[side]) continue;
      return fail(context, EB_INVALID_ARGUMENT, "CacheConvert: pairs[%lld] names %s block %d; there are %d",
                  static_cast<long long>(i), side == 0 ? "source" : "destination", ids[side], blocks[side]);
    }
    taken[i] = ids[1];
  }
  std::sort(taken.get(), taken.get() + count);
  const int32_t* twice = std::adjacent_find(taken.get(), taken.get() + count);
  if (twice != taken.get() + count) {
    return fail(context, EB_INVALID_ARGUMENT, "CacheConvert: destination block %d is in two pairs", *twice);
  }
  return EB_OK;
}

}  // namespace
}  // namespace enginebay

using namespace enginebay;  // NOLINT: the C entry point below

extern "C" eb_status eb_cache_convert(const eb_context* context, const eb_cache_convert_desc* desc,
                                      const void* source, void* destination, const int32_t* pairs,
                                      int64_t count, const float* cache_scales) {
  EB_RETURN_IF_ERROR(check_desc(context, desc));
  const struct {
    const char* name;
    bool missing;
  } pointers[] = {
      {"source", source == nullptr && desc->source_blocks > 0},
      {"destination", destination == nullptr && desc->destination_blocks > 0},
      {"pairs", pairs == nullptr && count > 0},
  };
  for (const auto& pointer : pointers) {
    if (pointer.missing) return fail(context, EB_INVALID_ARGUMENT, "CacheConvert: %s is null", pointer.name);
  }
  const size_t element = desc->source_dtype == EB_F32 ? 4 : is_wide(desc->source_dtype) ? 2 : 1;
  EB_RETURN_IF_ERROR(check_alignment(context, "source", source, element));
  EB_RETURN_IF_ERROR(check_alignment(context, "pairs", pairs, alignof(int32_t)));
  EB_RETURN_IF_ERROR(check_alignment(context, "cache_scales", cache_scales, alignof(float)));
  EB_RETURN_IF_ERROR(check_pairs(context, *desc, pairs, count));
  if (cache_scales != nullptr && desc->source_dtype != EB_I8 && desc->destination_dtype != EB_I8) {
    return fail(context, EB_INVALID_ARGUMENT,
                "CacheConvert: cache_scales given from %s to %s, which have none",
                dtype_name(desc->source_dtype), dtype_name(desc->destination_dtype));
  }
  const int64_t channels = desc->cache_scale_dim > 1 ? desc->head_dim : 1;
  EB_RETURN_IF_ERROR(
      check_scale_values(context, "CacheConvert", cache_scales, desc->num_kv_heads, 2, channels));

  CacheConversion work;
  work.source = cache_pool(source, desc->source_dtype, desc->num_kv_heads, desc->head_dim, desc->block_size);
  work.destination =
      cache_pool(destination, desc->destination_dtype, desc->num_kv_heads, desc->head_dim, desc->block_size);
  EB_RETURN_IF_ERROR(
      check_pool_bytes(context, "CacheConvert", "source", desc->source_blocks, work.source.block_stride));
  EB_RETURN_IF_ERROR(check_pool_bytes(context, "CacheConvert", "destination", desc->destination_blocks,
                                      work.destination.block_stride));
  work.written = static_cast<char*>(destination);
  work.heads = desc->num_kv_heads, work.dim = desc->head_dim, work.block_size = desc->block_size;
  work.scales = cache_scales_of(cache_scales, desc->num_kv_heads, channels);
  const char* const begin = work.source.base;
  if (begin < work.written + desc->destination_blocks * work.destination.block_stride &&
      work.written < begin + desc->source_blocks * work.source.block_stride) {
    return fail(context, EB_INVALID_ARGUMENT, "CacheConvert: source and destination overlap in memory");
  }
  CpuFeatures features;
  EB_RETURN_IF_ERROR(cpu_features(context, &features));
  const AttentionKernels& kernels = attention_kernels(features.isa);
  parallel_for(context, static_cast<size_t>(count),
               [&](size_t i) { kernels.convert(work, pairs[2 * i], pairs[2 * i + 1]); });
  return EB_OK;
}
