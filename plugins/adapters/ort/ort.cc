#include "ort.h"

#include <cstdarg>
#include <cstdio>

namespace enginebay::ort {
namespace {

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

std::optional<std::string> Attributes::text(const char* name) const {
  if (!present(name)) return std::nullopt;
  try {
    return info_.GetAttribute<std::string>(name);
  } catch (const Ort::Exception&) {
    refuse(std::string("attribute ") + name + " is not a string");
  }
}

int Attributes::choice(const char* name, const char* const* values, size_t count) const {
  const std::optional<std::string> found = text(name);
  if (!found) refuse(std::string("attribute ") + name + " is missing");
  const std::string& value = *found;
  std::string known;
  for (size_t i = 0; i < count; ++i) {
    if (value == values[i]) return static_cast<int>(i);
    known += (i > 0 ? ", " : "") + std::string(values[i]);
  }
  refuse(std::string("attribute ") + name + " is " + quoted(value.c_str()) + ", expected one of " + known);
}

eb_dtype Attributes::type_of(const Ort::TypeInfo& info, const char* what, size_t index) const {
  const Type type = info.GetTensorTypeAndShapeInfo().GetElementType();
  switch (type) {
    case kFloat:
      return EB_F32;
    case kFloat16:
      return EB_F16;
    case kBfloat16:
      return EB_BF16;
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT8E4M3FN:
      return EB_F8E4M3;
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8:
      return EB_I8;
    case kUint8:  // only as a cache: two codes a byte
      return EB_I4;
    default:
      refuse(std::string(what) + " " + std::to_string(index) + " has element type " + std::to_string(type) +
             ", expected float32, float16, bfloat16, float8e4m3fn, int8 or uint8");
  }
}

eb_dtype Attributes::input_type(size_t index) const {
  return type_of(info_.GetInputTypeInfo(index), "input", index);
}

eb_dtype Attributes::output_type(size_t index) const {
  return type_of(info_.GetOutputTypeInfo(index), "output", index);
}

OrtStatus* Call::report(const std::string& node, eb_status status) {
  if (status != EB_OK) return refuse(node, "%s", message_);
  OrtStatus* failure = failure_;
  failure_ = nullptr;
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

}  // namespace enginebay::ort
