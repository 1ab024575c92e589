// enginebay::QuantLinearF8Inputs for ONNX Runtime.
#include "enginebay/quant_linear_f8_inputs.h"

#include "ops.h"

namespace enginebay::ort {

QuantLinearF8Inputs::QuantLinearF8Inputs(const OrtKernelInfo* info) : PackedWeights(kName, info) {
  const Attributes attributes(kName, info);
  input_scale_ = attributes.real("input_scale", 0.0f);
  check(attributes,
        [this](const eb_context* context) { return eb_quant_linear_f8_inputs_check(context, input_scale_); });
}

OrtStatus* QuantLinearF8Inputs::ComputeV2(OrtKernelContext* context) noexcept {
  Call call(context);
  Tensor x, weight, bias, repeated;
  EB_ORT_RETURN_IF_ERROR(call.input(0, &x));
  EB_ORT_RETURN_IF_ERROR(weights(call, &weight));
  EB_ORT_RETURN_IF_ERROR(call.input(2, &bias));
  EB_ORT_RETURN_IF_ERROR(call.input(3, &repeated));
  const int64_t repeats = repeated.present() ? repeated.elements() : 0;
  if (x.rank != 2 || x.shape[1] + repeats != desc_.in_features) {
    return refuse(node_,
                  "x has %d dimensions, the last of %lld elements; expected 2 and in_features %d less %lld "
                  "repeated",
                  x.rank, static_cast<long long>(x.rank > 0 ? x.shape[x.rank - 1] : 0), desc_.in_features,
                  static_cast<long long>(repeats));
  }
  if (bias.present() && bias.elements() != desc_.out_features) {
    return refuse(node_, "bias has %lld elements, out_features is %d",
                  static_cast<long long>(bias.elements()), desc_.out_features);
  }
  const int64_t rows = x.shape[0], shape[] = {rows, desc_.out_features};
  void *y, *memory;
  EB_ORT_RETURN_IF_ERROR(call.output(0, shape, 2, &y));
  if (rows == 0) return nullptr;
  size_t bytes;
  EB_ORT_RETURN_IF_ERROR(
      call.report(node_, eb_quant_linear_f8_inputs_workspace_size(call.context(), &desc_, rows, &bytes)));
  EB_ORT_RETURN_IF_ERROR(call.workspace(node_, bytes, &memory));
  return call.report(
      node_, eb_quant_linear_f8_inputs_run(call.context(), &desc_, rows, x.data, input_scale_,
                                           static_cast<const int32_t*>(repeated.data), repeats, weight.data,
                                           bytes_, static_cast<const float*>(bias.data), y, memory, bytes));
}

}  // namespace enginebay::ort
