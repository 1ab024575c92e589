/* EngineBay kernel library, plain C ABI: what every op shares.
 *
 * One library per device exports the same symbols. Every op has
 *   plan()            host, once per step: ragged lengths -> a flat int32 array (only ops that need one),
 *   workspace_size()  host, the same arithmetic,
 *   run()             reads only the plan, the workspace and device pointers.
 * Entry points validate, never throw, and return a status; the words are in the context's message buffer.
 * All sizes are counts of elements unless they say bytes; all offsets inside kernels are 64 bits wide.
 */
#ifndef ENGINEBAY_ABI_H
#define ENGINEBAY_ABI_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(_WIN32)
#define EB_API __declspec(dllexport)
#else
#define EB_API __attribute__((visibility("default")))
#endif

#define EB_ABI_VERSION 1

typedef enum eb_status {
  EB_OK = 0,
  EB_INVALID_ARGUMENT = 1, /* a null pointer, a size, an alignment, an id out of range */
  EB_UNSUPPORTED = 2,      /* well formed, but this library has no kernel for it */
  EB_DEVICE_ERROR = 3,     /* the device runtime failed */
  EB_INTERNAL = 4
} eb_status;

typedef enum eb_dtype { EB_F32 = 1, EB_F16 = 2, EB_BF16 = 3, EB_F8E4M3 = 4, EB_I8 = 5, EB_I4 = 6 } eb_dtype;

/* Runs body(arg, i) for every i in [0, count), in any order, on any threads; returns when all are done. */
typedef void (*eb_task)(void* arg, size_t index);
typedef void (*eb_parallel_for)(void* pool, size_t count, eb_task body, void* arg);

/* What a call runs on. Zero-initialise, then set. A CPU library uses parallel_for (NULL: the caller's
 * thread); a CUDA library uses stream (a cudaStream_t). */
typedef struct eb_context {
  uint32_t abi_version; /* EB_ABI_VERSION */
  uint32_t threads;     /* how many threads parallel_for has, the caller's included; 0 counts as 1 */
  void* stream;
  eb_parallel_for parallel_for;
  void* pool;
  char* message; /* receives a NUL-terminated explanation on failure; may be NULL */
  size_t message_bytes;
} eb_context;

/* The ops and versions this library implements, as "Name=version;Name=version;...". Static storage. */
EB_API const char* eb_op_table(void);

#ifdef __cplusplus
}
#endif
#endif
