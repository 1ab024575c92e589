// enginebay::QuantMoE for ONNX Runtime.
#include "ops.h"

namespace enginebay::ort {
namespace {

enum Input { kX, kRouterLogits, kGateUp, kDown, kCorrectionBias, kGateUpBias, kDownBias };
constexpr const char* kNames[] = {
    "x", "router_logits", "gate_up", "down", "correction_bias", "gate_up_bias", "down_bias"};
constexpr const char* kScorings[] = {"softmax", "sigmoid", "softmax_topk"};
constexpr eb_moe_scoring kScoringCodes[] = {EB_SCORE_SOFTMAX, EB_SCORE_SIGMOID, EB_SCORE_SOFTMAX_TOPK};

}  // namespace

QuantMoe::QuantMoe(const OrtKernelInfo* info) {
  const Attributes attributes(kName, info);
  node_ = attributes.node();
  desc_.num_experts = attributes.integer("num_experts");
  desc_.top_k = attributes.integer("top_k");
  desc_.hidden = attributes.integer("hidden");
  desc_.intermediate = attributes.integer("intermediate");
  if (attributes.text("scoring")) desc_.scoring = kScoringCodes[attributes.choice("scoring", kScorings)];
  desc_.renormalize = attributes.integer("renormalize", 0);
  desc_.num_groups = attributes.integer("num_groups", 0);
  desc_.top_groups = attributes.integer("top_groups", 0);
  desc_.routed_scale = attributes.real("routed_scale", 1.0f);
  desc_.activation = kActivationCodes[attributes.choice("activation", kActivations)];
  desc_.clamp = attributes.real("clamp", 0.0f);
  desc_.clamp_alpha = attributes.real("clamp_alpha", 1.702f);
  desc_.format = kFormatTypes[attributes.choice("format", kFormats)];
  desc_.block_size = attributes.integer("block_size", 0);
  desc_.symmetric = attributes.integer("symmetric", 1);
  desc_.io_dtype = attributes.input_type(kX);
  check(attributes, [this](const eb_context* context) {
    return eb_moe_expert_stride(context, &desc_, &gate_up_stride_, &down_stride_);
  });
  check_layout(attributes,
               {desc_.hidden, 2 * desc_.intermediate, desc_.format,
                desc_.block_size == 0 ? desc_.hidden : desc_.block_size, desc_.symmetric, desc_.io_dtype});
}

OrtStatus* QuantMoe::check_shapes(const Tensor (&in)[kInputCount]) const {
  const int64_t experts = desc_.num_experts, tokens = in[kX].rank > 0 ? in[kX].shape[0] : 0;
  const int64_t elements[] = {tokens * desc_.hidden,
                              tokens * experts,
                              experts * static_cast<int64_t>(gate_up_stride_),
                              experts * static_cast<int64_t>(down_stride_),
                              experts,
                              experts * 2 * desc_.intermediate,
                              experts * desc_.hidden};
  if (in[kX].rank != 2) return refuse(node_, "x has %d dimensions, expected 2", in[kX].rank);
  for (int i = kX; i <= kDownBias; ++i) {
    if (!in[i].present()) {
      if (i <= kDown) return refuse(node_, "input %s is not connected", kNames[i]);
      continue;
    }
    if (in[i].elements() == elements[i]) continue;
    return refuse(node_, "%s has %lld elements, expected %lld", kNames[i],
                  static_cast<long long>(in[i].elements()), static_cast<long long>(elements[i]));
  }
  return nullptr;
}

OrtStatus* QuantMoe::ComputeV2(OrtKernelContext* context) noexcept {
  Call call(context);
  Tensor in[kInputCount];
  for (int i = kX; i <= kDownBias; ++i) EB_ORT_RETURN_IF_ERROR(call.input(i, &in[i]));
  EB_ORT_RETURN_IF_ERROR(check_shapes(in));
  eb_moe_args args{};
  args.tokens = in[kX].shape[0];
  args.x = in[kX].data;
  args.router_logits = static_cast<const float*>(in[kRouterLogits].data);
  args.correction_bias = static_cast<const float*>(in[kCorrectionBias].data);
  args.gate_up = in[kGateUp].data;
  args.down = in[kDown].data;
  args.gate_up_bias = static_cast<const float*>(in[kGateUpBias].data);
  args.down_bias = static_cast<const float*>(in[kDownBias].data);
  const int64_t shape[] = {args.tokens, desc_.hidden};
  EB_ORT_RETURN_IF_ERROR(call.output(0, shape, 2, &args.y));
  if (args.tokens == 0) return nullptr;
  size_t bytes;
  void* memory;
  EB_ORT_RETURN_IF_ERROR(
      call.report(node_, eb_moe_workspace_size(call.context(), &desc_, args.tokens, &bytes)));
  EB_ORT_RETURN_IF_ERROR(call.workspace(node_, bytes, &memory));
  return call.report(node_, eb_moe_run(call.context(), &desc_, &args, memory, bytes));
}

}  // namespace enginebay::ort
