// What the adapters share: they translate tensors and attributes, launch, and report. No arithmetic.
//
// The ops are one source for the CPU and the CUDA library; what differs, marked "by device" below, is in
// ort/device.cc and ort_cuda/device.cc. The run path uses the C API directly; ONNX Runtime's C++ wrappers
// allocate on every call.
#ifndef ENGINEBAY_ADAPTERS_ORT_H
#define ENGINEBAY_ADAPTERS_ORT_H

#include <onnxruntime_cxx_api.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "enginebay/abi.h"

namespace enginebay::ort {

using Type = ONNXTensorElementDataType;
constexpr Type kFloat = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
constexpr Type kFloat16 = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16;
constexpr Type kBfloat16 = ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16;
constexpr Type kInt32 = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32;
constexpr Type kInt64 = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;
constexpr Type kUint8 = ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8;
constexpr Type kInt8 = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8;
constexpr Type kAny = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
// Stands for the type of the activations, of which a library may have several; no ONNX type has this number.
constexpr Type kIo = static_cast<Type>(31);

// A tensor of at most 5 dimensions, or an optional input that is not there (data null, rank -1).
struct Tensor {
  void* data = nullptr;
  int rank = -1;
  std::array<int64_t, 5> shape{};
  Type type = kAny;

  bool present() const { return rank >= 0; }
  int64_t elements() const;
};

// Attributes and element types of a node, read once, when the session is created. Members throw
// Ort::Exception, naming node and attribute, where one is missing, of another type, or out of range.
class Attributes {
 public:
  Attributes(const char* op, const OrtKernelInfo* info);

  int32_t integer(const char* name) const;
  int32_t integer(const char* name, int32_t otherwise) const;
  float real(const char* name) const;
  float real(const char* name, float otherwise) const;
  // A string attribute that need not be there.
  std::optional<std::string> text(const char* name) const;
  // Position of the string attribute's value among `values`.
  template <size_t kCount>
  int choice(const char* name, const char* const (&values)[kCount]) const {
    return choice(name, values, kCount);
  }

  // Element type of an input or output in the graph.
  eb_dtype input_type(size_t index) const;
  eb_dtype output_type(size_t index) const;

  // "PagedAttention 'layers.0.attention'"
  const std::string& node() const { return node_; }
  [[noreturn]] void refuse(const std::string& why) const;

 private:
  bool present(const char* name) const;
  int choice(const char* name, const char* const* values, size_t count) const;
  eb_dtype type_of(const Ort::TypeInfo& info, const char* what, size_t index) const;

  Ort::ConstKernelInfo info_;
  std::string node_;
};

// The execution provider whose kernels these are. By device.
extern const char* const kProvider;

// One execution of a node: its tensors, and the kernel library's context on the session's threads or stream.
class Call {
 public:
  explicit Call(OrtKernelContext* context);  // by device
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
  ~Call();  // by device

  // Null on success; then *tensor is filled.
  OrtStatus* input(size_t index, Tensor* tensor);
  // The data of an input whose shape is not asked for; null where an optional one is absent.
  OrtStatus* data(size_t index, const void** data);
  OrtStatus* output(size_t index, const int64_t* shape, size_t rank, void** data);

  const eb_context* context() const { return &context_; }
  // An ONNX Runtime status for what the library returned; null for EB_OK.
  OrtStatus* report(const std::string& node, eb_status status);
  // At least `bytes` to work in, aligned as the library asks; theirs until the call ends. Once a call. By
  // device.
  OrtStatus* workspace(const std::string& node, size_t bytes, void** memory);
  // Host memory for a plan of `ints`. By device.
  OrtStatus* plan(const std::string& node, size_t ints, int32_t** memory);

 private:
  static void parallel_for(void* pool, size_t count, eb_task body, void* argument);

  OrtKernelContext* ort_;
  OrtStatus* failure_ = nullptr;       // beside the library's own status: its threads or stream failed
  OrtAllocator* allocator_ = nullptr;  // CUDA: of scratch_
  void* scratch_ = nullptr;
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

}  // namespace enginebay::ort

// Returns a failed status from the calling function.
#define EB_ORT_RETURN_IF_ERROR(expression)              \
  do {                                                  \
    OrtStatus* const eb_ort_status = (expression);      \
    if (eb_ort_status != nullptr) return eb_ort_status; \
  } while (0)

#endif
