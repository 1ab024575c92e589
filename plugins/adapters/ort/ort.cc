#include "ort.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <memory>
#include <new>
#include <thread>

namespace enginebay::ort {
namespace {

constexpr size_t kAlignment = 64;

// Grows, never shrinks; freed with its thread.
class Buffer {
 public:
  // Null where the system has no more.
  void* at_least(size_t bytes) {
    bytes = std::max(bytes, kAlignment);
    if (bytes > bytes_) {
      memory_.reset(::operator new(bytes, std::align_val_t{kAlignment}, std::nothrow));
      bytes_ = memory_ == nullptr ? 0 : bytes;
    }
    return memory_.get();
  }

 private:
  struct Delete {
    void operator()(void* memory) const { ::operator delete(memory, std::align_val_t{kAlignment}); }
  };
  std::unique_ptr<void, Delete> memory_;
  size_t bytes_ = 0;
};

uint32_t machine_threads() {
  // The session does not tell its pool's size. Asking for more tasks than it has threads costs a little and
  // changes no answer.
  static const uint32_t count = std::max(1u, std::thread::hardware_concurrency());
  return count;
}

std::string quoted(const char* text) { return std::string("'") + text + "'"; }

}  // namespace

int64_t Tensor::elements() const {
  int64_t count = 1;
  for (int i = 0; i < rank; ++i) count *= shape[i];
  return count;
}

Attributes::Attributes(const char* op, const OrtKernelInfo* info)
    : info_(info), node_(std::string(op) + " " + quoted(info_.GetNodeName().c_str())) {}

void Attributes::refuse(const std::string& why) const {
  throw Ort::Exception(node_ + ": " + why, ORT_INVALID_ARGUMENT);
}

bool Attributes::present(const char* name) const {
  const OrtApi& api = Ort::GetApi();
  float real;
  int64_t integer;
  size_t length = 0;
  for (OrtStatus* status : {api.KernelInfoGetAttribute_float(info_, name, &real),
                            api.KernelInfoGetAttribute_int64(info_, name, &integer),
                            api.KernelInfoGetAttribute_string(info_, name, nullptr, &length)}) {
    if (status == nullptr) return true;
    api.ReleaseStatus(status);
  }
  return false;
}

int32_t Attributes::integer(const char* name) const {
  int64_t value;
  if (!present(name)) refuse(std::string("attribute ") + name + " is missing");
  if (OrtStatus* status = Ort::GetApi().KernelInfoGetAttribute_int64(info_, name, &value)) {
    Ort::GetApi().ReleaseStatus(status);
    refuse(std::string("attribute ") + name + " is not an integer");
  }
  if (value != static_cast<int32_t>(value)) {
    refuse(std::string("attribute ") + name + " is " + std::to_string(value) + ", beyond 32 bits");
  }
  return static_cast<int32_t>(value);
}

int32_t Attributes::integer(const char* name, int32_t otherwise) const {
  return present(name) ? integer(name) : otherwise;
}

float Attributes::real(const char* name) const {
  float value;
  if (!present(name)) refuse(std::string("attribute ") + name + " is missing");
  if (OrtStatus* status = Ort::GetApi().KernelInfoGetAttribute_float(info_, name, &value)) {
    Ort::GetApi().ReleaseStatus(status);
    refuse(std::string("attribute ") + name + " is not a float");
  }
  return value;
}

float Attributes::real(const char* name, float otherwise) const {
  return present(name) ? real(name) : otherwise;
}

int Attributes::choice(const char* name, const char* const* values, size_t count) const {
  if (!present(name)) refuse(std::string("attribute ") + name + " is missing");
  std::string value, known;
  try {
    value = info_.GetAttribute<std::string>(name);
  } catch (const Ort::Exception&) {
    refuse(std::string("attribute ") + name + " is not a string");
  }
  for (size_t i = 0; i < count; ++i) {
    if (value == values[i]) return static_cast<int>(i);
    known += (i > 0 ? ", " : "") + std::string(values[i]);
  }
  refuse(std::string("attribute ") + name + " is " + quoted(value.c_str()) + ", expected one of " + known);
}

Call::Call(OrtKernelContext* context) : ort_(context) {
  context_.abi_version = EB_ABI_VERSION;
  context_.threads = machine_threads();
  context_.parallel_for = parallel_for;
  context_.pool = this;
  context_.message = message_;
  context_.message_bytes = sizeof message_;
}

Call::~Call() {
  if (pool_failure_ != nullptr) Ort::GetApi().ReleaseStatus(pool_failure_);
}

void Call::parallel_for(void* pool, size_t count, eb_task body, void* argument) {
  auto* call = static_cast<Call*>(pool);
  OrtStatus* status = Ort::GetApi().KernelContext_ParallelFor(call->ort_, body, count, 0, argument);
  if (status == nullptr) return;
  if (call->pool_failure_ != nullptr) Ort::GetApi().ReleaseStatus(call->pool_failure_);
  call->pool_failure_ = status;
}

OrtStatus* Call::report(const std::string& node, eb_status status) {
  if (status != EB_OK) return refuse(node, "%s", message_);
  OrtStatus* failure = pool_failure_;
  pool_failure_ = nullptr;
  return failure;
}

OrtStatus* Call::input(size_t index, Tensor* tensor) {
  const OrtApi& api = Ort::GetApi();
  const OrtValue* value = nullptr;
  *tensor = Tensor{};
  EB_ORT_RETURN_IF_ERROR(api.KernelContext_GetInput(ort_, index, &value));
  if (value == nullptr) return nullptr;
  EB_ORT_RETURN_IF_ERROR(api.GetTensorMutableData(const_cast<OrtValue*>(value), &tensor->data));
  OrtTensorTypeAndShapeInfo* info = nullptr;
  EB_ORT_RETURN_IF_ERROR(api.GetTensorTypeAndShape(value, &info));
  size_t rank = 0;
  OrtStatus* status = api.GetTensorElementType(info, &tensor->type);
  if (status == nullptr) status = api.GetDimensionsCount(info, &rank);
  if (status == nullptr) {
    if (rank <= tensor->shape.size()) {
      status = api.GetDimensions(info, tensor->shape.data(), rank);
      tensor->rank = static_cast<int>(rank);
    } else {
      status = api.CreateStatus(ORT_INVALID_ARGUMENT, "an input has more than 5 dimensions");
    }
  }
  api.ReleaseTensorTypeAndShapeInfo(info);
  return status;
}

OrtStatus* Call::data(size_t index, const void** data) {
  const OrtApi& api = Ort::GetApi();
  const OrtValue* value = nullptr;
  *data = nullptr;
  EB_ORT_RETURN_IF_ERROR(api.KernelContext_GetInput(ort_, index, &value));
  if (value == nullptr) return nullptr;
  return api.GetTensorMutableData(const_cast<OrtValue*>(value), const_cast<void**>(data));
}

OrtStatus* Call::output(size_t index, const int64_t* shape, size_t rank, void** data) {
  OrtValue* value = nullptr;
  EB_ORT_RETURN_IF_ERROR(Ort::GetApi().KernelContext_GetOutput(ort_, index, shape, rank, &value));
  return Ort::GetApi().GetTensorMutableData(value, data);
}

OrtStatus* refuse(const std::string& node, const char* format, ...) {
  char text[1024];
  const int start = std::snprintf(text, sizeof text, "%s: ", node.c_str());
  va_list arguments;
  va_start(arguments, format);
  if (start > 0 && start < static_cast<int>(sizeof text)) {
    std::vsnprintf(text + start, sizeof text - start, format, arguments);
  }
  va_end(arguments);
  return Ort::GetApi().CreateStatus(ORT_INVALID_ARGUMENT, text);
}

OrtStatus* workspace(const std::string& node, size_t bytes, void** memory) {
  thread_local Buffer buffer;
  *memory = buffer.at_least(bytes);
  return *memory != nullptr ? nullptr : refuse(node, "no memory for a workspace of %zu bytes", bytes);
}

OrtStatus* plan_buffer(const std::string& node, size_t ints, int32_t** plan) {
  thread_local Buffer buffer;
  *plan = static_cast<int32_t*>(buffer.at_least(ints * sizeof(int32_t)));
  return *plan != nullptr ? nullptr : refuse(node, "no memory for a plan of %zu integers", ints);
}

}  // namespace enginebay::ort
