// The entry point ONNX Runtime calls when a session's options name the CPU library.
#include "register.h"

#include "ops.h"

using namespace enginebay::ort;

extern "C" EB_API OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  return register_ops<PagedAttention, QuantLinear, QuantLinearF8Inputs, Embedding, AddRmsNorm,
                      GatedActivation, LayerTail, QuantMoe, SpecVerify, Sample>(options, base, {kFloat});
}
