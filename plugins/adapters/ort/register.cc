// Entry point ONNX Runtime calls for a custom-op library.
#include <onnxruntime_cxx_api.h>

#include "enginebay/abi.h"

extern "C" EB_API OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  Ort::InitApi(base->GetApi(ORT_API_VERSION));
  (void)options;
  return nullptr;
}
