// The entry point ONNX Runtime calls when a session's options name this library.
#include "ops.h"

namespace enginebay::ort {
namespace {

struct Domain {
  CustomOp<PagedAttention> paged_attention;
  CustomOp<QuantLinear> quant_linear;
  CustomOp<QuantLinearF8Inputs> quant_linear_f8_inputs;
  CustomOp<Embedding> embedding;
  CustomOp<AddRmsNorm> add_rms_norm;
  CustomOp<GatedActivation> gated_activation;
  CustomOp<QuantMoe> quant_moe;
  CustomOp<SpecVerify> spec_verify;
  CustomOp<Sample> sample;
  Ort::CustomOpDomain domain{"enginebay"};

  Domain() {
    domain.Add(&paged_attention);
    domain.Add(&quant_linear);
    domain.Add(&quant_linear_f8_inputs);
    domain.Add(&embedding);
    domain.Add(&add_rms_norm);
    domain.Add(&gated_activation);
    domain.Add(&quant_moe);
    domain.Add(&spec_verify);
    domain.Add(&sample);
  }
};

}  // namespace
}  // namespace enginebay::ort

extern "C" EB_API OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  const OrtApi* api = base->GetApi(ORT_API_VERSION);
  if (api == nullptr) {
    return base->GetApi(1)->CreateStatus(
        ORT_INVALID_ARGUMENT,
        "this ONNX Runtime is older than the headers the EngineBay library was compiled with; "
        "upgrade it, or compile against its own headers (ENGINEBAY_ORT_INCLUDE)");
  }
  Ort::InitApi(api);
  try {
    // Sessions refer to the domain as long as the process runs.
    static const auto* ops = new enginebay::ort::Domain;
    return api->AddCustomOpDomain(options, ops->domain);
  } catch (const std::exception& error) {
    return api->CreateStatus(ORT_FAIL, error.what());
  }
}
