// Failures: a status for the program, words for the person.
#ifndef ENGINEBAY_STATUS_H
#define ENGINEBAY_STATUS_H

#include "enginebay/abi.h"

namespace enginebay {

// Writes the message into the context's buffer, cut to fit, and returns `status`.
__attribute__((format(printf, 3, 4))) eb_status fail(const eb_context* context, eb_status status,
                                                     const char* format, ...);

// EB_INVALID_ARGUMENT unless the context is there and speaks this header's version.
eb_status check_context(const eb_context* context);

const char* dtype_name(eb_dtype dtype);

}  // namespace enginebay

// Returns from the calling function what `expression` returned, unless that was EB_OK.
#define EB_RETURN_IF_ERROR(expression)                                    \
  do {                                                                    \
    const eb_status eb_status_of_expression = (expression);               \
    if (eb_status_of_expression != EB_OK) return eb_status_of_expression; \
  } while (0)

#endif
