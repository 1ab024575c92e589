// enginebay::QuantLinear and enginebay::Embedding for ONNX Runtime.
#include "ops.h"

namespace enginebay::ort {

void check_layout(const Attributes& attributes, const eb_quant_linear_desc& desc, const char* attribute) {
  const std::optional<std::string> stated = attributes.text(attribute);
  if (!stated || stated->empty()) return;
  const char* const own = eb_quant_linear_layout(&desc);
  if (own != nullptr && *stated == own) return;
  attributes.refuse("the weights are packed as '" + *stated + "', this library takes '" +
                    (own == nullptr ? "" : own) + "'; build the engine for this library");
}

PackedWeights::PackedWeights(const char* op, const OrtKernelInfo* info) {
  const Attributes attributes(op, info);
  node_ = attributes.node();
  desc_.in_features = attributes.integer("in_features");
  desc_.out_features = attributes.integer("out_features");
  desc_.format = kFormatTypes[attributes.choice("format", kFormats)];
  desc_.block_size = attributes.integer("block_size", 0);
  desc_.symmetric = attributes.integer("symmetric", 1);
  desc_.io_dtype = attributes.output_type(0);
  check(attributes,
        [this](const eb_context* context) { return eb_quant_linear_packed_bytes(context, &desc_, &bytes_); });
  check_layout(attributes, desc_);
}

OrtStatus* PackedWeights::weights(Call& call, Tensor* tensor) const {
  EB_ORT_RETURN_IF_ERROR(call.input(1, tensor));
  if (tensor->elements() == static_cast<int64_t>(bytes_)) return nullptr;
  return refuse(node_, "weight has %lld bytes; %d x %d weights of this format and block size take %zu",
                static_cast<long long>(tensor->elements()), desc_.out_features, desc_.in_features, bytes_);
}

OrtStatus* QuantLinear::ComputeV2(OrtKernelContext* context) noexcept {
  Call call(context);
  Tensor x, weight, bias;
  EB_ORT_RETURN_IF_ERROR(call.input(0, &x));
  EB_ORT_RETURN_IF_ERROR(weights(call, &weight));
  EB_ORT_RETURN_IF_ERROR(call.input(2, &bias));
  if (x.rank != 2 || x.shape[1] != desc_.in_features) {
    return refuse(node_, "x has %d dimensions, the last of %lld elements; expected 2 and in_features %d",
                  x.rank, static_cast<long long>(x.rank > 0 ? x.shape[x.rank - 1] : 0), desc_.in_features);
  }
  if (bias.present() && bias.elements() != desc_.out_features) {
    return refuse(node_, "bias has %lld elements, out_features is %d",
                  static_cast<long long>(bias.elements()), desc_.out_features);
  }
  const int64_t shape[] = {x.shape[0], desc_.out_features};
  void *y, *memory;
  EB_ORT_RETURN_IF_ERROR(call.output(0, shape, 2, &y));
  if (x.shape[0] == 0) return nullptr;
  size_t bytes;
  EB_ORT_RETURN_IF_ERROR(
      call.report(node_, eb_quant_linear_workspace_size(call.context(), &desc_, x.shape[0], &bytes)));
  EB_ORT_RETURN_IF_ERROR(call.workspace(node_, bytes, &memory));
  return call.report(node_,
                     eb_quant_linear_run(call.context(), &desc_, x.shape[0], x.data, weight.data, bytes_,
                                         static_cast<const float*>(bias.data), y, memory, bytes));
}

OrtStatus* Embedding::ComputeV2(OrtKernelContext* context) noexcept {
  Call call(context);
  Tensor ids, weight;
  EB_ORT_RETURN_IF_ERROR(call.input(0, &ids));
  EB_ORT_RETURN_IF_ERROR(weights(call, &weight));
  if (ids.rank != 1) return refuse(node_, "input_ids has %d dimensions, expected 1", ids.rank);
  const int64_t shape[] = {ids.shape[0], desc_.in_features};
  void* y;
  EB_ORT_RETURN_IF_ERROR(call.output(0, shape, 2, &y));
  if (ids.shape[0] == 0) return nullptr;
  return call.report(node_, eb_embedding_run(call.context(), &desc_, ids.shape[0],
                                             static_cast<const int32_t*>(ids.data), weight.data, bytes_, y));
}

}  // namespace enginebay::ort
