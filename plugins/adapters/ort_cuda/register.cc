// The entry point ONNX Runtime calls when a session's options name the CUDA library.
#include "register.h"

#include "ops.h"

using namespace enginebay::ort;

// All three types for every op: one that a kernel lacks is then refused by the kernel library's own words.
extern "C" EB_API OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  return register_ops<PagedAttention, QuantLinear, Embedding, AddRmsNorm, GatedActivation, QuantMoe,
                      SpecVerify, Sample>(options, base, {kFloat, kFloat16, kBfloat16});
}
