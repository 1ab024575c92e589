// Refusals. Everything is looked at before anything is written: a refused step leaves the cache as it was.
#include <cfloat>

#include "attention.h"
#include "simd_common.h"
#include "status.h"

namespace enginebay {

AttentionShape attention_shape(const eb_paged_attention_desc& desc) {
  AttentionShape shape;
  shape.group = desc.num_heads / desc.num_kv_heads;
  shape.padded_dim = (desc.head_dim + kDimMultiple - 1) / kDimMultiple * kDimMultiple;
  const bool latent = desc.latent_dim > 0;
  shape.qkv_width = (desc.num_heads + (latent ? 1 : 2 * desc.num_kv_heads)) * desc.head_dim;
  shape.value_dim = latent ? desc.latent_dim : desc.head_dim;
  shape.rotary_offset = latent ? desc.latent_dim : 0;
  shape.tile_tokens = shape.group >= kTileRows ? 1 : kTileRows / shape.group;
  // Bytes of an INT4 row count as its elements.
  shape.row_elements = desc.cache_dtype == EB_I4 ? eb_int4_cache_row_bytes(desc.head_dim) : desc.head_dim;
  shape.token_stride = desc.num_kv_heads * shape.row_elements;
  shape.value_offset = latent ? 0 : shape.token_stride * desc.block_size;
  shape.block_stride = shape.token_stride * desc.block_size * (latent ? 1 : 2);
  return shape;
}

CacheScales cache_scales_of(const float* scales, int heads, int64_t channels) {
  if (scales == nullptr) return {nullptr, nullptr, 0, 0};
  return {scales, scales + heads * channels, channels, channels > 1 ? 1 : 0};
}

CacheScales cache_scales(const eb_paged_attention_desc& desc, const eb_paged_attention_args& args) {
  const int64_t channels = desc.cache_scale_dim > 1 ? desc.head_dim : 1;
  CacheScales scales = cache_scales_of(args.cache_scales, desc.num_kv_heads, channels);
  if (desc.latent_dim > 0) scales.values = scales.keys;
  return scales;
}

CachePool cache_pool(const void* base, eb_dtype dtype, int heads, int dim, int block_size) {
  const int64_t width = dtype == EB_F32 ? 4 : dtype == EB_F16 || dtype == EB_BF16 ? 2 : 1;
  CachePool pool{};
  pool.base = static_cast<const char*>(base);
  pool.dtype = dtype;
  pool.row_bytes = dtype == EB_I4 ? eb_int4_cache_row_bytes(dim) : dim * width;
  pool.token_stride = pool.row_bytes * heads;
  pool.value_offset = pool.token_stride * block_size;
  pool.block_stride = 2 * pool.value_offset;
  return pool;
}

void cache_pools(const eb_paged_attention_desc& desc, const eb_paged_attention_args& args,
                 CachePool (&pools)[kMostPools]) {
  const struct {
    const void* base;
    eb_dtype dtype;
    int32_t blocks;
  } each[kMostPools] = {
      {args.cache, desc.cache_dtype, desc.num_blocks},
      {args.cache_int8, EB_I8, desc.num_blocks_int8},
      {args.cache_int4, EB_I4, desc.num_blocks_int4},
  };
  int32_t first = 0;
  for (int i = 0; i < kMostPools; ++i) {
    pools[i] = cache_pool(each[i].base, each[i].dtype, desc.num_kv_heads, desc.head_dim, desc.block_size);
    pools[i].first_block = first;
    first += each[i].blocks;
    pools[i].end_block = first;
  }
}

eb_status check_pool_bytes(const eb_context* context, const char* op, const char* pool, int64_t blocks,
                           int64_t block_bytes) {
  int64_t bytes;
  if (!__builtin_mul_overflow(blocks, block_bytes, &bytes)) return EB_OK;
  return fail(context, EB_INVALID_ARGUMENT,
              "%s: %s has %lld blocks of %lld bytes, together 2^63 or more; give the pool's real size", op,
              pool, static_cast<long long>(blocks), static_cast<long long>(block_bytes));
}

eb_status check_scale_values(const eb_context* context, const char* op, const float* scales, int heads,
                             int parts, int64_t channels) {
  for (int64_t i = 0; scales != nullptr && i < parts * heads * channels; ++i) {
    if (scales[i] > 0.0f && scales[i] <= FLT_MAX) continue;
    const int64_t head = i / channels;
    return fail(context, EB_INVALID_ARGUMENT,
                "%s: cache_scales of %s of key head %d, channel %d is %g; a scale is positive and finite", op,
                head < heads ? "keys" : "values", static_cast<int>(head % heads),
                static_cast<int>(i % channels), static_cast<double>(scales[i]));
  }
  return EB_OK;
}

namespace {

bool is_eight_bits(eb_dtype dtype) { return dtype == EB_F8E4M3 || dtype == EB_I8; }

eb_status check_cache_offsets(const eb_context* context, const eb_paged_attention_desc& desc,
                              const eb_paged_attention_args& args) {
  if (args.cache_offsets == nullptr) return EB_OK;
  if (desc.cache_dtype != EB_I4) {
    return fail(context, EB_INVALID_ARGUMENT,
                "PagedAttention: cache_offsets given for a %s cache; int4 has them",
                dtype_name(desc.cache_dtype));
  }
  for (int64_t i = 0; i < int64_t{2} * desc.num_kv_heads * desc.head_dim; ++i) {
    const float offset = args.cache_offsets[i];
    if (offset >= -FLT_MAX && offset <= FLT_MAX) continue;
    return fail(context, EB_INVALID_ARGUMENT, "PagedAttention: cache_offsets[%lld] is %g; offsets are finite",
                static_cast<long long>(i), static_cast<double>(offset));
  }
  return EB_OK;
}

eb_status check_cache_scales(const eb_context* context, const eb_paged_attention_desc& desc,
                             const eb_paged_attention_args& args) {
  if (args.cache_scales == nullptr) return EB_OK;
  if (!is_eight_bits(desc.cache_dtype) && desc.num_blocks_int8 == 0) {
    return fail(context, EB_INVALID_ARGUMENT,
                "PagedAttention: cache_scales given for a %s cache, which has none",
                dtype_name(desc.cache_dtype));
  }
  const int64_t channels = desc.cache_scale_dim > 1 ? desc.head_dim : 1;
  return check_scale_values(context, "PagedAttention", args.cache_scales, desc.num_kv_heads,
                            desc.latent_dim > 0 ? 1 : 2, channels);
}

}  // namespace

eb_status check_attention_desc(const eb_context* context, const eb_paged_attention_desc* desc) {
  EB_RETURN_IF_ERROR(check_context(context));
  if (desc == nullptr) return fail(context, EB_INVALID_ARGUMENT, "PagedAttention: the descriptor is null");
  constexpr int kMost = 1 << 16;
  const struct {
    const char* name;
    int value, least, most;
  } sizes[] = {
      {"num_heads", desc->num_heads, 1, kMost},
      {"num_kv_heads", desc->num_kv_heads, 1, kMost},
      {"head_dim", desc->head_dim, 1, 1 << 20},
      {"block_size", desc->block_size, 1, 1 << 20},
      {"num_blocks", desc->num_blocks, 0, INT32_MAX},
      {"num_blocks_int8", desc->num_blocks_int8, 0, INT32_MAX - desc->num_blocks},
      {"num_blocks_int4", desc->num_blocks_int4, 0, INT32_MAX - desc->num_blocks - desc->num_blocks_int8},
      {"table_width", desc->table_width, 0, INT32_MAX},
      {"rotary_dim", desc->rotary_dim, 0, desc->head_dim},
      {"rope_positions", desc->rope_positions, 0, INT32_MAX},
      {"window", desc->window, 0, INT32_MAX},
      {"latent_dim", desc->latent_dim, 0, desc->head_dim - 1},
      {"causal", desc->causal, 0, 1},
      {"rope_interleaved", desc->rope_interleaved, 0, 1},
  };
  for (const auto& size : sizes) {
    if (size.value < size.least || size.value > size.most) {
      return fail(context, EB_INVALID_ARGUMENT, "PagedAttention: %s is %d, expected %d to %d", size.name,
                  size.value, size.least, size.most);
    }
  }
  if (desc->num_heads % desc->num_kv_heads != 0) {
    return fail(context, EB_INVALID_ARGUMENT,
                "PagedAttention: num_heads %d is no multiple of num_kv_heads %d", desc->num_heads,
                desc->num_kv_heads);
  }
  if (desc->rotary_dim % 2 != 0) {
    return fail(context, EB_INVALID_ARGUMENT, "PagedAttention: rotary_dim %d is odd", desc->rotary_dim);
  }
  if (desc->latent_dim > 0 && desc->num_kv_heads != 1) {
    return fail(context, EB_INVALID_ARGUMENT,
                "PagedAttention: num_kv_heads %d with latent_dim %d; all heads attend to one latent",
                desc->num_kv_heads, desc->latent_dim);
  }
  if (!(desc->scale > 0.0f && desc->scale <= FLT_MAX)) {
    return fail(context, EB_INVALID_ARGUMENT,
                "PagedAttention: scale is %g, expected a positive finite number",
                static_cast<double>(desc->scale));
  }
  if (!(desc->softcap >= 0.0f && desc->softcap <= FLT_MAX)) {
    return fail(context, EB_INVALID_ARGUMENT,
                "PagedAttention: softcap is %g, expected 0 (none) or a positive finite number",
                static_cast<double>(desc->softcap));
  }
  if (!(desc->norm_epsilon >= 0.0f && desc->norm_epsilon <= FLT_MAX)) {
    return fail(context, EB_INVALID_ARGUMENT,
                "PagedAttention: norm_epsilon is %g, expected 0 or a positive finite number",
                static_cast<double>(desc->norm_epsilon));
  }
  if (desc->head_dim > kMaxHeadDim) {
    return fail(context, EB_UNSUPPORTED, "PagedAttention: head_dim %d; this library goes up to %d",
                desc->head_dim, kMaxHeadDim);
  }
  if (desc->window > 0 && !desc->causal) {
    return fail(context, EB_UNSUPPORTED, "PagedAttention: window %d with causal 0; a window looks back only",
                desc->window);
  }
  if (desc->io_dtype != EB_F32) {
    return fail(context, EB_UNSUPPORTED, "PagedAttention: qkv is %s; the CPU library computes in float32",
                dtype_name(desc->io_dtype));
  }
  if (desc->cache_scale_dim != 0 && desc->cache_scale_dim != 1 && desc->cache_scale_dim != desc->head_dim) {
    return fail(context, EB_INVALID_ARGUMENT,
                "PagedAttention: cache_scale_dim is %d, expected 1 or head_dim %d", desc->cache_scale_dim,
                desc->head_dim);
  }
  if (desc->cache_dtype != EB_F32 && desc->cache_dtype != EB_F16 && desc->cache_dtype != EB_BF16 &&
      desc->cache_dtype != EB_I4 && !is_eight_bits(desc->cache_dtype)) {
    return fail(context, EB_UNSUPPORTED,
                "PagedAttention: cache is %s; expected float32, float16, bfloat16, float8e4m3, int8 or int4",
                dtype_name(desc->cache_dtype));
  }
  const bool wide =
      desc->cache_dtype == EB_F32 || desc->cache_dtype == EB_F16 || desc->cache_dtype == EB_BF16;
  if (is_tiered(*desc) && (!wide || desc->latent_dim > 0)) {
    return fail(
        context, EB_UNSUPPORTED,
        "PagedAttention: cache_int8 and cache_int4 beside a %s cache with latent_dim %d; they go with "
        "float32, float16 and bfloat16 caches without latents",
        dtype_name(desc->cache_dtype), desc->latent_dim);
  }
  const bool int4 = desc->cache_dtype == EB_I4 || desc->num_blocks_int4 > 0;
  if (int4 && desc->head_dim % kInt4Group != 0) {
    return fail(context, EB_UNSUPPORTED,
                "PagedAttention: head_dim %d is no multiple of %d, which an int4 cache takes", desc->head_dim,
                kInt4Group);
  }
  if (desc->cache_dtype == EB_I4 && desc->latent_dim > 0) {
    return fail(context, EB_UNSUPPORTED,
                "PagedAttention: latent_dim %d with an int4 cache; 8 bits are the least", desc->latent_dim);
  }
  const struct {
    const char* name;
    eb_dtype dtype;
    int32_t blocks;
  } pools[] = {
      {"cache", desc->cache_dtype, desc->num_blocks},
      {"cache_int8", EB_I8, desc->num_blocks_int8},
      {"cache_int4", EB_I4, desc->num_blocks_int4},
  };
  for (const auto& pool : pools) {
    const int64_t bytes =
        cache_pool(nullptr, pool.dtype, desc->num_kv_heads, desc->head_dim, desc->block_size).block_stride;
    EB_RETURN_IF_ERROR(check_pool_bytes(context, "PagedAttention", pool.name, pool.blocks, bytes));
  }
  return EB_OK;
}

eb_status check_attention_lengths(const eb_context* context, const eb_paged_attention_desc& desc,
                                  int64_t tokens, int64_t sequences, const int32_t* query_start,
                                  const int32_t* kv_len) {
  if (tokens < 0 || tokens > INT32_MAX || sequences < 0 || sequences > INT32_MAX) {
    return fail(context, EB_INVALID_ARGUMENT, "PagedAttention: %lld tokens, %lld sequences",
                static_cast<long long>(tokens), static_cast<long long>(sequences));
  }
  if (query_start == nullptr || (sequences > 0 && kv_len == nullptr)) {
    return fail(context, EB_INVALID_ARGUMENT, "PagedAttention: %s is null",
                query_start == nullptr ? "query_start" : "kv_len");
  }
  if (query_start[0] != 0) {
    return fail(context, EB_INVALID_ARGUMENT, "PagedAttention: query_start[0] is %d, expected 0",
                query_start[0]);
  }
  const int64_t capacity = int64_t{desc.table_width} * desc.block_size;
  for (int64_t b = 0; b < sequences; ++b) {
    const int index = static_cast<int>(b);
    if (query_start[b + 1] < query_start[b]) {
      return fail(context, EB_INVALID_ARGUMENT, "PagedAttention: query_start falls from %d at %d to %d at %d",
                  query_start[b], index, query_start[b + 1], index + 1);
    }
    const int32_t chunk = query_start[b + 1] - query_start[b];
    if (kv_len[b] < chunk) {
      return fail(context, EB_INVALID_ARGUMENT,
                  "PagedAttention: sequence %d has %d tokens in this step but kv_len %d", index, chunk,
                  kv_len[b]);
    }
    if (kv_len[b] > capacity) {
      return fail(context, EB_INVALID_ARGUMENT,
                  "PagedAttention: sequence %d has kv_len %d, its %d blocks of %d tokens hold %lld", index,
                  kv_len[b], desc.table_width, desc.block_size, static_cast<long long>(capacity));
    }
  }
  if (query_start[sequences] > tokens) {
    return fail(context, EB_INVALID_ARGUMENT, "PagedAttention: query_start ends at %d, there are %lld tokens",
                query_start[sequences], static_cast<long long>(tokens));
  }
  return EB_OK;
}

eb_status check_attention_args(const eb_context* context, const eb_paged_attention_desc& desc,
                               const eb_paged_attention_args& args) {
  EB_RETURN_IF_ERROR(
      check_attention_lengths(context, desc, args.tokens, args.sequences, args.query_start, args.kv_len));
  if (args.tree_mask != nullptr) {
    return fail(context, EB_UNSUPPORTED, "PagedAttention: the CPU library has no tree mask");
  }
  EB_RETURN_IF_ERROR(check_cache_scales(context, desc, args));
  EB_RETURN_IF_ERROR(check_cache_offsets(context, desc, args));
  if (desc.latent_dim > 0 && desc.latent_dim + desc.rotary_dim != desc.head_dim) {
    return fail(context, EB_INVALID_ARGUMENT,
                "PagedAttention: latent_dim %d and rotary_dim %d do not make up head_dim %d", desc.latent_dim,
                desc.rotary_dim, desc.head_dim);
  }
  if (desc.latent_dim > 0 && (args.q_norm != nullptr || args.k_norm != nullptr)) {
    return fail(context, EB_UNSUPPORTED, "PagedAttention: latent attention takes no q_norm and no k_norm");
  }
  const bool rope = desc.rotary_dim > 0;
  const struct {
    const char* name;
    bool missing;
  } pointers[] = {
      {"qkv", args.qkv == nullptr && args.tokens > 0},
      {"attention", args.attention == nullptr && args.tokens > 0},
      {"cache", args.cache == nullptr && desc.num_blocks > 0},
      {"cache_int8", args.cache_int8 == nullptr && desc.num_blocks_int8 > 0},
      {"cache_int4", args.cache_int4 == nullptr && desc.num_blocks_int4 > 0},
      {"block_table", args.block_table == nullptr && args.sequences > 0 && desc.table_width > 0},
      {"slot_mapping", args.slot_mapping == nullptr && args.tokens > 0},
      {"position_ids", rope && args.position_ids == nullptr && args.tokens > 0},
      {"rope_cos", rope && args.rope_cos == nullptr},
      {"rope_sin", rope && args.rope_sin == nullptr},
  };
  for (const auto& pointer : pointers) {
    if (pointer.missing)
      return fail(context, EB_INVALID_ARGUMENT, "PagedAttention: %s is null", pointer.name);
  }
  const int64_t slots = int64_t{desc.num_blocks} * desc.block_size;
  const int32_t blocks = desc.num_blocks + desc.num_blocks_int8 + desc.num_blocks_int4;
  const int32_t used = args.query_start[args.sequences];
  for (int32_t token = 0; token < used; ++token) {
    const int32_t slot = args.slot_mapping[token];
    if (slot < -1 || slot >= slots) {
      return fail(context, EB_INVALID_ARGUMENT,
                  "PagedAttention: slot_mapping[%d] is %d; the cache has %lld slots (-1 writes nothing)",
                  token, slot, static_cast<long long>(slots));
    }
    if (rope && (args.position_ids[token] < 0 || args.position_ids[token] >= desc.rope_positions)) {
      return fail(context, EB_INVALID_ARGUMENT,
                  "PagedAttention: position_ids[%d] is %d; the RoPE table has %d positions", token,
                  args.position_ids[token], desc.rope_positions);
    }
  }
  for (int64_t b = 0; b < args.sequences; ++b) {
    const int64_t chunk = args.query_start[b + 1] - args.query_start[b];
    if (chunk == 0) continue;
    // Blocks that no token of this step sees may be gone: a window lets its cache free them.
    const int64_t first = first_visible(desc, args.kv_len[b] - chunk) / desc.block_size;
    const int64_t last = (args.kv_len[b] - 1) / desc.block_size;
    const int32_t* table = args.block_table + b * desc.table_width;
    for (int64_t i = first; i <= last; ++i) {
      if (table[i] < 0 || table[i] >= blocks) {
        return fail(context, EB_INVALID_ARGUMENT,
                    "PagedAttention: block_table[%d][%d] is %d; the cache has %d blocks", static_cast<int>(b),
                    static_cast<int>(i), table[i], blocks);
      }
    }
  }
  return EB_OK;
}

}  // namespace enginebay
