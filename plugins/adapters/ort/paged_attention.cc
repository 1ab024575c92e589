// enginebay::PagedAttention for ONNX Runtime.
#include "ops.h"

namespace enginebay::ort {
namespace {

enum Input {
  kQkv,
  kCache,
  kQueryStart,
  kKvLen,
  kBlockTable,
  kSlotMapping,
  kPositionIds,  // required
  kRopeCos,
  kRopeSin,
  kQNorm,
  kKNorm,
  kSinks,
  kCacheScales,
  kCacheInt8,
  kCacheInt4,
  kCacheOffsets
};
constexpr const char* kNames[] = {"qkv",          "cache",        "query_start",  "kv_len",
                                  "block_table",  "slot_mapping", "position_ids", "rope_cos",
                                  "rope_sin",     "q_norm",       "k_norm",       "sinks",
                                  "cache_scales", "cache_int8",   "cache_int4",   "cache_offsets"};

}  // namespace

PagedAttention::PagedAttention(const OrtKernelInfo* info) {
  const Attributes attributes(kName, info);
  node_ = attributes.node();
  desc_.num_heads = attributes.integer("num_heads");
  desc_.num_kv_heads = attributes.integer("num_kv_heads");
  desc_.head_dim = attributes.integer("head_dim");
  desc_.scale = attributes.real("scale");
  desc_.causal = attributes.integer("causal", 1);
  desc_.window = attributes.integer("window", 0);
  desc_.softcap = attributes.real("softcap", 0.0f);
  desc_.rope_interleaved = attributes.integer("rope_interleaved", 0);
  desc_.norm_epsilon = attributes.real("norm_epsilon", 1e-6f);
  desc_.latent_dim = attributes.integer("latent_dim", 0);
  desc_.io_dtype = attributes.input_type(kQkv);
  desc_.cache_dtype = attributes.input_type(kCache);
  // What depends on the tensors is filled in per call; these stand in for a check of the attributes.
  desc_.block_size = desc_.num_blocks = desc_.table_width = 1;
  check(attributes, [this](const eb_context* context) {
    size_t ints, bytes;
    return eb_paged_attention_plan_size(context, &desc_, 0, 0, &ints, &bytes);
  });
}

OrtStatus* PagedAttention::check_shapes(const Tensor (&in)[kInputCount]) const {
  const bool latent = desc_.latent_dim > 0;
  const int64_t width = (int64_t{desc_.num_heads} + (latent ? 1 : 2 * desc_.num_kv_heads)) * desc_.head_dim;
  constexpr int64_t kFree = -1;
  const int64_t tokens = in[kQkv].shape[0], sequences = in[kBlockTable].shape[0];
  const int64_t half = in[kRopeCos].present() ? in[kRopeCos].shape[1] : kFree;
  const int64_t row = desc_.cache_dtype == EB_I4 ? eb_int4_cache_row_bytes(desc_.head_dim) : desc_.head_dim;
  const int64_t block = in[kCache].shape[2];
  struct Shape {
    int rank;
    int64_t shape[5];
  };
  const Shape expected[] = {
      {2, {kFree, width}},
      latent ? Shape{3, {kFree, kFree, desc_.head_dim}}
             : Shape{5, {kFree, 2, kFree, desc_.num_kv_heads, row}},
      {1, {sequences + 1}},
      {1, {sequences}},
      {2, {kFree, kFree}},
      {1, {tokens}},
      {1, {tokens}},
      {2, {kFree, kFree}},
      {2, {in[kRopeCos].shape[0], half}},
      {1, {desc_.head_dim}},
      {1, {desc_.head_dim}},
      {1, {desc_.num_heads}},
      in[kCacheScales].rank == 2 ? Shape{2, {latent ? 1 : 2, desc_.num_kv_heads}}
                                 : Shape{3, {latent ? 1 : 2, desc_.num_kv_heads, desc_.head_dim}},
      {5, {kFree, 2, block, desc_.num_kv_heads, desc_.head_dim}},
      {5, {kFree, 2, block, desc_.num_kv_heads, eb_int4_cache_row_bytes(desc_.head_dim)}},
      {3, {2, desc_.num_kv_heads, desc_.head_dim}},
  };
  if (in[kRopeCos].present() != in[kRopeSin].present()) {
    return refuse(node_, "rope_cos and rope_sin come together; only %s is connected",
                  in[kRopeCos].present() ? "rope_cos" : "rope_sin");
  }
  for (int i = kQkv; i <= kCacheOffsets; ++i) {
    if (!in[i].present()) {
      if (i <= kPositionIds) return refuse(node_, "input %s is not connected", kNames[i]);
      continue;
    }
    if (in[i].rank != expected[i].rank) {
      return refuse(node_, "%s has %d dimensions, expected %d", kNames[i], in[i].rank, expected[i].rank);
    }
    for (int d = 0; d < in[i].rank; ++d) {
      if (expected[i].shape[d] == kFree || in[i].shape[d] == expected[i].shape[d]) continue;
      return refuse(node_, "dimension %d of %s is %lld, expected %lld", d, kNames[i],
                    static_cast<long long>(in[i].shape[d]), static_cast<long long>(expected[i].shape[d]));
    }
  }
  return nullptr;
}

OrtStatus* PagedAttention::ComputeV2(OrtKernelContext* context) noexcept {
  Call call(context);
  Tensor in[kInputCount];
  for (int i = kQkv; i <= kCacheOffsets; ++i) EB_ORT_RETURN_IF_ERROR(call.input(i, &in[i]));
  EB_ORT_RETURN_IF_ERROR(check_shapes(in));

  eb_paged_attention_desc desc = desc_;
  const bool latent = desc.latent_dim > 0;
  const int64_t block_size = in[kCache].shape[latent ? 1 : 2];
  if (in[kCache].shape[0] > INT32_MAX || block_size > INT32_MAX || in[kBlockTable].shape[1] > INT32_MAX) {
    return refuse(node_, "cache or block_table has a dimension beyond 32 bits");
  }
  desc.num_blocks = static_cast<int32_t>(in[kCache].shape[0]);
  desc.block_size = static_cast<int32_t>(block_size);
  for (const auto& [input, blocks] :
       {std::pair{kCacheInt8, &desc.num_blocks_int8}, std::pair{kCacheInt4, &desc.num_blocks_int4}}) {
    if (!in[input].present()) continue;
    if (in[input].shape[0] > INT32_MAX)
      return refuse(node_, "%s has a dimension beyond 32 bits", kNames[input]);
    *blocks = static_cast<int32_t>(in[input].shape[0]);
  }
  desc.table_width = static_cast<int32_t>(in[kBlockTable].shape[1]);
  if (in[kRopeCos].present()) {
    desc.rope_positions = static_cast<int32_t>(in[kRopeCos].shape[0]);
    desc.rotary_dim = static_cast<int32_t>(2 * in[kRopeCos].shape[1]);
  }

  desc.cache_scale_dim = in[kCacheScales].rank == 3 ? desc.head_dim : 1;

  const int64_t tokens = in[kQkv].shape[0], sequences = in[kBlockTable].shape[0];
  const int64_t out_shape[] = {tokens, int64_t{desc.num_heads} * (latent ? desc.latent_dim : desc.head_dim)};
  void *attention, *cache_out;
  EB_ORT_RETURN_IF_ERROR(call.output(0, out_shape, 2, &attention));
  EB_ORT_RETURN_IF_ERROR(
      call.output(1, in[kCache].shape.data(), static_cast<size_t>(in[kCache].rank), &cache_out));
  if (cache_out != in[kCache].data) {
    return refuse(node_, "cache_out is another buffer than cache; bind one OrtValue to both (IO binding)");
  }

  size_t ints, bytes;
  EB_ORT_RETURN_IF_ERROR(call.report(
      node_, eb_paged_attention_plan_size(call.context(), &desc, tokens, sequences, &ints, &bytes)));
  eb_paged_attention_args args{};
  args.tokens = tokens;
  args.sequences = sequences;
  args.qkv = in[kQkv].data;
  args.cache = in[kCache].data;
  args.query_start = static_cast<const int32_t*>(in[kQueryStart].data);
  args.kv_len = static_cast<const int32_t*>(in[kKvLen].data);
  args.block_table = static_cast<const int32_t*>(in[kBlockTable].data);
  args.slot_mapping = static_cast<const int32_t*>(in[kSlotMapping].data);
  args.position_ids = static_cast<const int32_t*>(in[kPositionIds].data);
  args.rope_cos = static_cast<const float*>(in[kRopeCos].data);
  args.rope_sin = static_cast<const float*>(in[kRopeSin].data);
  args.q_norm = static_cast<const float*>(in[kQNorm].data);
  args.k_norm = static_cast<const float*>(in[kKNorm].data);
  args.sinks = static_cast<const float*>(in[kSinks].data);
  args.cache_scales = static_cast<const float*>(in[kCacheScales].data);
  args.cache_int8 = in[kCacheInt8].data;
  args.cache_int4 = in[kCacheInt4].data;
  args.cache_offsets = static_cast<const float*>(in[kCacheOffsets].data);
  args.attention = attention;
  int32_t* plan;
  void* memory;
  EB_ORT_RETURN_IF_ERROR(call.plan(node_, ints, &plan));
  EB_ORT_RETURN_IF_ERROR(call.workspace(node_, bytes, &memory));
  EB_ORT_RETURN_IF_ERROR(
      call.report(node_, eb_paged_attention_plan(call.context(), &desc, tokens, sequences, args.query_start,
                                                 args.kv_len, plan, ints)));
  return call.report(node_, eb_paged_attention_run(call.context(), &desc, &args, plan, ints, memory, bytes));
}

}  // namespace enginebay::ort
