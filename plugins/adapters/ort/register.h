// From a list of Kernel classes to the domain of custom ops that ONNX Runtime asks for.
#ifndef ENGINEBAY_ADAPTERS_ORT_REGISTER_H
#define ENGINEBAY_ADAPTERS_ORT_REGISTER_H

#include <algorithm>
#include <initializer_list>

#include "ort.h"

namespace enginebay::ort {

// The custom op of a Kernel class for activations of type `io`. The class has
//   kName, kInputs, kOutputs (element types; kIo: io, kAny: any), kRequiredInputs,
//   Kernel(const OrtKernelInfo*), which may throw, and OrtStatus* ComputeV2(OrtKernelContext*) noexcept.
template <class Kernel>
struct CustomOp : Ort::CustomOpBase<CustomOp<Kernel>, Kernel, true> {
  explicit CustomOp(Type io) : io_(io) {}

  const char* GetName() const { return Kernel::kName; }
  const char* GetExecutionProviderType() const { return kProvider; }
  size_t GetInputTypeCount() const { return std::size(Kernel::kInputs); }
  size_t GetOutputTypeCount() const { return std::size(Kernel::kOutputs); }
  Type GetInputType(size_t index) const { return type_of(Kernel::kInputs[index]); }
  Type GetOutputType(size_t index) const { return type_of(Kernel::kOutputs[index]); }
  OrtCustomOpInputOutputCharacteristic GetInputCharacteristic(size_t index) const {
    return index < Kernel::kRequiredInputs ? INPUT_OUTPUT_REQUIRED : INPUT_OUTPUT_OPTIONAL;
  }
  // Of outputs whose type follows from no input, ONNX Runtime takes only optional ones.
  OrtCustomOpInputOutputCharacteristic GetOutputCharacteristic(size_t index) const {
    return io_ == kAny && Kernel::kOutputs[index] == kIo ? INPUT_OUTPUT_OPTIONAL : INPUT_OUTPUT_REQUIRED;
  }
  OrtStatusPtr CreateKernelV2(const OrtApi& api, const OrtKernelInfo* info, void** kernel) const noexcept {
    try {
      *kernel = new Kernel(info);
      return nullptr;
    } catch (const std::exception& error) {
      return api.CreateStatus(ORT_INVALID_ARGUMENT, error.what());
    }
  }

 private:
  Type type_of(Type declared) const { return declared == kIo ? io_ : declared; }

  Type io_;
};

// One custom op for each type of activations that the inputs can tell; else one, and where the library has
// several types the graph's own value_info says which the outputs are.
template <class Kernel>
void add(Ort::CustomOpDomain& domain, std::initializer_list<Type> activations) {
  const auto& inputs = Kernel::kInputs;
  if (std::find(std::begin(inputs), std::end(inputs), kIo) != std::end(inputs)) {
    for (const Type io : activations) domain.Add(new CustomOp<Kernel>(io));
  } else {
    domain.Add(new CustomOp<Kernel>(activations.size() == 1 ? *activations.begin() : kAny));
  }
}

// What RegisterCustomOps does: a domain of Kernels, for activations of these types.
template <class... Kernels>
OrtStatus* register_ops(OrtSessionOptions* options, const OrtApiBase* base,
                        std::initializer_list<Type> activations) {
  const OrtApi* api = base->GetApi(ORT_API_VERSION);
  if (api == nullptr) {
    return base->GetApi(1)->CreateStatus(
        ORT_INVALID_ARGUMENT,
        "this ONNX Runtime is older than the headers the EngineBay library was compiled with; "
        "upgrade it, or compile against its own headers (ENGINEBAY_ORT_INCLUDE)");
  }
  Ort::InitApi(api);
  try {
    // Sessions refer to the domain and its ops as long as the process runs.
    static const Ort::CustomOpDomain* const domain = [&] {
      auto* fresh = new Ort::CustomOpDomain("enginebay");
      (add<Kernels>(*fresh, activations), ...);
      return fresh;
    }();
    return api->AddCustomOpDomain(options, *domain);
  } catch (const std::exception& error) {
    return api->CreateStatus(ORT_FAIL, error.what());
  }
}

}  // namespace enginebay::ort
#endif
