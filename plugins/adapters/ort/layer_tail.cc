// enginebay::LayerTail for ONNX Runtime.
#include "ops.h"

namespace enginebay::ort {
namespace {

constexpr const char* kProducts[] = {"out", "gate_up", "down", "next"};
// The op table's inputs.
constexpr size_t kX = 0, kResidual = 1, kMlpNorm = 2, kNextNorm = 3, kFirstWeight = 4, kFirstBias = 8;

}  // namespace

LayerTail::LayerTail(const OrtKernelInfo* info) {
  const Attributes attributes(kName, info);
  node_ = attributes.node();
  const int32_t attended = attributes.integer("attended"), hidden = attributes.integer("hidden");
  const int32_t intermediate = attributes.integer("intermediate");
  const int32_t in[] = {attended, hidden, intermediate, hidden};
  const int32_t out[] = {hidden, 2 * intermediate, hidden, attributes.integer("next_features")};
  for (size_t i = 0; i < EB_TAIL_PRODUCTS; ++i) {
    const std::string prefix = std::string(kProducts[i]) + "_";
    eb_quant_linear_desc& desc = desc_.products[i];
    desc.in_features = in[i];
    desc.out_features = out[i];
    desc.format = kFormatTypes[attributes.choice((prefix + "format").c_str(), kFormats)];
    desc.block_size = attributes.integer((prefix + "block_size").c_str(), 0);
    desc.symmetric = attributes.integer((prefix + "symmetric").c_str(), 1);
    desc.io_dtype = attributes.input_type(kX);
    check(attributes, [&](const eb_context* context) {
      return eb_quant_linear_packed_bytes(context, &desc, &bytes_[i]);
    });
    check_layout(attributes, desc, (prefix + "layout").c_str());
  }
  desc_.activation = kActivationCodes[attributes.choice("activation", kActivations)];
  desc_.mlp_epsilon = attributes.real("mlp_epsilon", 1e-6f);
  desc_.next_epsilon = attributes.real("next_epsilon", 1e-6f);
}

OrtStatus* LayerTail::ComputeV2(OrtKernelContext* context) noexcept {
  Call call(context);
  Tensor x, residual, norm, weight, bias;
  eb_layer_tail_args args{};
  EB_ORT_RETURN_IF_ERROR(call.input(kX, &x));
  EB_ORT_RETURN_IF_ERROR(call.input(kResidual, &residual));
  const int64_t attended = desc_.products[EB_TAIL_OUT].in_features;
  const int64_t hidden = desc_.products[EB_TAIL_OUT].out_features;
  if (x.rank != 2 || x.shape[1] != attended || residual.rank != 2 || residual.shape[1] != hidden ||
      residual.shape[0] != x.shape[0]) {
    return refuse(node_, "x must be [T, %lld] and residual [T, %lld]; they are [%lld, %lld] and [%lld, %lld]",
                  static_cast<long long>(attended), static_cast<long long>(hidden),
                  static_cast<long long>(x.shape[0]), static_cast<long long>(x.shape[1]),
                  static_cast<long long>(residual.shape[0]), static_cast<long long>(residual.shape[1]));
  }
  for (const size_t index : {kMlpNorm, kNextNorm}) {
    EB_ORT_RETURN_IF_ERROR(call.input(index, &norm));
    if (norm.elements() != hidden) {
      return refuse(node_, "a norm's weight has %lld elements, a row %lld",
                    static_cast<long long>(norm.elements()), static_cast<long long>(hidden));
    }
    (index == kMlpNorm ? args.mlp_norm : args.next_norm) = static_cast<const float*>(norm.data);
  }
  for (size_t i = 0; i < EB_TAIL_PRODUCTS; ++i) {
    EB_ORT_RETURN_IF_ERROR(call.input(kFirstWeight + i, &weight));
    EB_ORT_RETURN_IF_ERROR(call.input(kFirstBias + i, &bias));
    const int32_t features = desc_.products[i].out_features;
    if (weight.elements() != static_cast<int64_t>(bytes_[i]) ||
        (bias.present() && bias.elements() != features)) {
      return refuse(node_, "%s has %lld bytes of weights and %lld biases; expected %zu and %d", kProducts[i],
                    static_cast<long long>(weight.elements()), static_cast<long long>(bias.elements()),
                    bytes_[i], features);
    }
    args.weights[i] = weight.data;
    args.weight_bytes[i] = bytes_[i];
    args.biases[i] = static_cast<const float*>(bias.data);
  }
  args.rows = x.shape[0];
  args.x = x.data;
  args.residual = residual.data;
  const int64_t shape[] = {args.rows, desc_.products[EB_TAIL_NEXT].out_features};
  EB_ORT_RETURN_IF_ERROR(call.output(0, shape, 2, &args.y));
  EB_ORT_RETURN_IF_ERROR(call.output(1, residual.shape.data(), 2, &args.sum));
  if (args.rows == 0) return nullptr;
  size_t bytes;
  void* memory;
  EB_ORT_RETURN_IF_ERROR(
      call.report(node_, eb_layer_tail_workspace_size(call.context(), &desc_, args.rows, &bytes)));
  EB_ORT_RETURN_IF_ERROR(call.workspace(node_, bytes, &memory));
  return call.report(node_, eb_layer_tail_run(call.context(), &desc_, &args, memory, bytes));
}

}  // namespace enginebay::ort
