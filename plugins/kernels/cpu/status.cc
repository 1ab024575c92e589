#include "status.h"

#include <cstdarg>
#include <cstdio>

namespace enginebay {

eb_status fail(const eb_context* context, eb_status status, const char* format, ...) {
  if (context != nullptr && context->message != nullptr && context->message_bytes > 0) {
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(context->message, context->message_bytes, format, arguments);
    va_end(arguments);
  }
  return status;
}

eb_status check_context(const eb_context* context) {
  if (context == nullptr) return EB_INVALID_ARGUMENT;
  if (context->abi_version != EB_ABI_VERSION) {
    // A context of another version may have its message buffer elsewhere: leave it alone.
    return EB_INVALID_ARGUMENT;
  }
  return EB_OK;
}

const char* dtype_name(eb_dtype dtype) {
  switch (dtype) {
    case EB_F32:
      return "float32";
    case EB_F16:
      return "float16";
    case EB_BF16:
      return "bfloat16";
    case EB_F8E4M3:
      return "float8e4m3";
    case EB_I8:
      return "int8";
    case EB_I4:
      return "int4";
  }
  return "unknown";
}

}  // namespace enginebay
