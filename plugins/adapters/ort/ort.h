// What the adapters share: they translate tensors and attributes, launch, and report. No arithmetic.
//
// The run path uses the C API directly; ONNX Runtime's C++ wrappers allocate on every call.
#ifndef ENGINEBAY_ADAPTERS_ORT_H
#define ENGINEBAY_ADAPTERS_ORT_H

#include <onnxruntime_cxx_api.h>

#include <array>
#include <cstdint>
#include <string>

#include "enginebay/abi.h"

namespace enginebay::ort {

// A tensor of at most 5 dimensions, or an optional input that is not there (data null, rank -1).
struct Tensor {
  void* data = nullptr;
  int rank = -1;
  std::array<int64_t, 5> shape{};
  ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;

  bool present() const { return rank >= 0; }
  int64_t elements() const;
};

// Attributes of a node, read once, when the session is created. Members throw Ort::Exception, naming node and
// attribute, where one is missing, of another type, or out of range.
class Attributes {
 public:
  Attributes(const char* op, const OrtKernelInfo* info);

  int32_t integer(const char* name) const;
  int32_t integer(const char* name, int32_t otherwise) const;
  float real(const char* name) const;
  float real(const char* name, float otherwise) const;
  // Position of the string attribute's value among `values`.
  template <size_t kCount>
  int choice(const char* name, const char* const (&values)[kCount]) const {
    return choice(name, values, kCount);
  }

  // "PagedAttention 'layers.0.attention'"
  const std::string& node() const { return node_; }
  [[noreturn]] void refuse(const std::string& why) const;

 private:
  bool present(const char* name) const;
  int choice(const char* name, const char* const* values, size_t count) const;

  Ort::ConstKernelInfo info_;
  std::string node_;
};

// One execution of a node: its tensors, and the kernel library's context on the session's own threads.
class Call {
 public:
  explicit Call(OrtKernelContext* context);
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
  ~Call();

  // Null on success; then *tensor is filled.
  OrtStatus* input(size_t index, Tensor* tensor);
  // The data of an input whose shape is not asked for; null where an optional one is absent.
  OrtStatus* data(size_t index, const void** data);
  OrtStatus* output(size_t index, const int64_t* shape, size_t rank, void** data);

  const eb_context* context() const { return &context_; }
  // An ONNX Runtime status for what the library returned; null for EB_OK.
  OrtStatus* report(const std::string& node, eb_status status);

 private:
  static void parallel_for(void* pool, size_t count, eb_task body, void* argument);

  OrtKernelContext* ort_;
  OrtStatus* pool_failure_ = nullptr;
  char message_[512] = "";
  eb_context context_{};
};

// Calls `probe(const eb_context*)`, a check of the kernel library, while the session is created.
template <class Probe>
void check(const Attributes& attributes, const Probe& probe) {
  char message[512] = "";
  eb_context context{};
  context.abi_version = EB_ABI_VERSION;
  context.message = message;
  context.message_bytes = sizeof message;
  if (probe(&context) != EB_OK) attributes.refuse(message);
}

__attribute__((format(printf, 2, 3))) OrtStatus* refuse(const std::string& node, const char* format, ...);

// Memory of this thread that lasts from call to call, at least `bytes`, aligned to a cache line. One node at
// a time runs on a thread, so nodes share it.
OrtStatus* workspace(const std::string& node, size_t bytes, void** memory);
// The same for plans: a node needs both at once.
OrtStatus* plan_buffer(const std::string& node, size_t ints, int32_t** plan);

// The custom op of a Kernel class, which has
//   kName, kInputs, kOutputs (element types; UNDEFINED: any), kRequiredInputs,
//   Kernel(const OrtKernelInfo*), which may throw, and OrtStatus* ComputeV2(OrtKernelContext*) noexcept.
template <class Kernel>
struct CustomOp : Ort::CustomOpBase<CustomOp<Kernel>, Kernel, true> {
  const char* GetName() const { return Kernel::kName; }
  size_t GetInputTypeCount() const { return std::size(Kernel::kInputs); }
  size_t GetOutputTypeCount() const { return std::size(Kernel::kOutputs); }
  ONNXTensorElementDataType GetInputType(size_t index) const { return Kernel::kInputs[index]; }
  ONNXTensorElementDataType GetOutputType(size_t index) const { return Kernel::kOutputs[index]; }
  OrtCustomOpInputOutputCharacteristic GetInputCharacteristic(size_t index) const {
    return index < Kernel::kRequiredInputs ? INPUT_OUTPUT_REQUIRED : INPUT_OUTPUT_OPTIONAL;
  }
  OrtStatusPtr CreateKernelV2(const OrtApi& api, const OrtKernelInfo* info, void** kernel) const noexcept {
    try {
      *kernel = new Kernel(info);
      return nullptr;
    } catch (const std::exception& error) {
      return api.CreateStatus(ORT_INVALID_ARGUMENT, error.what());
    }
  }
};

}  // namespace enginebay::ort

// Returns a failed status from the calling function.
#define EB_ORT_RETURN_IF_ERROR(expression)              \
  do {                                                  \
    OrtStatus* const eb_ort_status = (expression);      \
    if (eb_ort_status != nullptr) return eb_ort_status; \
  } while (0)

#endif
