// enginebay::AddRMSNorm and enginebay::GatedActivation for ONNX Runtime.
#include "ops.h"

namespace enginebay::ort {

AddRmsNorm::AddRmsNorm(const OrtKernelInfo* info) {
  const Attributes attributes(kName, info);
  node_ = attributes.node();
  epsilon_ = attributes.real("epsilon", 1e-6f);
  io_ = attributes.input_type(0);
}

OrtStatus* AddRmsNorm::ComputeV2(OrtKernelContext* context) noexcept {
  Call call(context);
  Tensor x, residual, weight;
  EB_ORT_RETURN_IF_ERROR(call.input(0, &x));
  EB_ORT_RETURN_IF_ERROR(call.input(1, &residual));
  EB_ORT_RETURN_IF_ERROR(call.input(2, &weight));
  if (x.rank != 2 || x.shape[1] > INT32_MAX || residual.rank != 2 || residual.shape != x.shape) {
    return refuse(node_, "x and residual must both be [T, H]; x is [%lld, %lld], residual [%lld, %lld]",
                  static_cast<long long>(x.shape[0]), static_cast<long long>(x.shape[1]),
                  static_cast<long long>(residual.shape[0]), static_cast<long long>(residual.shape[1]));
  }
  if (weight.elements() != x.shape[1]) {
    return refuse(node_, "weight has %lld elements, a row of x %lld",
                  static_cast<long long>(weight.elements()), static_cast<long long>(x.shape[1]));
  }
  void *y, *sum;
  EB_ORT_RETURN_IF_ERROR(call.output(0, x.shape.data(), 2, &y));
  EB_ORT_RETURN_IF_ERROR(call.output(1, x.shape.data(), 2, &sum));
  if (x.shape[0] == 0) return nullptr;
  const eb_rms_norm_desc desc{static_cast<int32_t>(x.shape[1]), epsilon_, io_};
  return call.report(node_, eb_add_rms_norm_run(call.context(), &desc, x.shape[0], x.data, residual.data,
                                                static_cast<const float*>(weight.data), y, sum));
}

GatedActivation::GatedActivation(const OrtKernelInfo* info) {
  const Attributes attributes(kName, info);
  node_ = attributes.node();
  activation_ = kActivationCodes[attributes.choice("activation", kActivations)];
  io_ = attributes.input_type(0);
}

OrtStatus* GatedActivation::ComputeV2(OrtKernelContext* context) noexcept {
  Call call(context);
  Tensor gate_up;
  EB_ORT_RETURN_IF_ERROR(call.input(0, &gate_up));
  if (gate_up.rank != 2 || gate_up.shape[1] % 2 != 0 || gate_up.shape[1] / 2 > INT32_MAX) {
    return refuse(node_, "gate_up must be [T, 2*I]; it has %d dimensions, the last of %lld elements",
                  gate_up.rank,
                  static_cast<long long>(gate_up.rank > 0 ? gate_up.shape[gate_up.rank - 1] : 0));
  }
  const int64_t shape[] = {gate_up.shape[0], gate_up.shape[1] / 2};
  void* y;
  EB_ORT_RETURN_IF_ERROR(call.output(0, shape, 2, &y));
  if (shape[0] == 0) return nullptr;
  const eb_gated_activation_desc desc{static_cast<int32_t>(shape[1]), activation_, io_};
  return call.report(node_, eb_gated_activation_run(call.context(), &desc, shape[0], gate_up.data, y));
}

}  // namespace enginebay::ort
