// The caller's threads. Include it from baseline files only: code compiled for one ISA must not be shared.
#ifndef ENGINEBAY_PARALLEL_H
#define ENGINEBAY_PARALLEL_H

#include "enginebay/abi.h"

namespace enginebay {

inline unsigned thread_count(const eb_context* context) {
  return context->parallel_for != nullptr && context->threads > 1 ? context->threads : 1;
}

// Runs body(i) for every i in [0, count), on the caller's thread where the context has no others.
template <class Body>
static void parallel_for(const eb_context* context, size_t count, const Body& body) {
  if (count <= 1 || thread_count(context) == 1) {
    for (size_t i = 0; i < count; ++i) body(i);
    return;
  }
  context->parallel_for(
      context->pool, count, [](void* arg, size_t i) { (*static_cast<const Body*>(arg))(i); },
      const_cast<Body*>(&body));
}

}  // namespace enginebay
#endif
