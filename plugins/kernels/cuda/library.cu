// The op table of the CUDA library and the devices it has code for.
#include <cstdio>

#include "device.cuh"

// Set by the build from its own list of architectures, e.g. "90,100".
#ifndef EB_CUDA_ARCHITECTURES
#error "EB_CUDA_ARCHITECTURES is set by plugins/build_cuda.py"
#endif

namespace enginebay::cuda {

static constexpr int kArchitectures[] = {EB_CUDA_ARCHITECTURES};

eb_status current_device(const eb_context* context, Device* device) {
  EB_RETURN_IF_CUDA(context, cudaGetDevice(&device->ordinal));
  int major = 0, minor = 0;
  EB_RETURN_IF_CUDA(context,
                    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device->ordinal));
  EB_RETURN_IF_CUDA(context,
                    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device->ordinal));
  EB_RETURN_IF_CUDA(context, cudaDeviceGetAttribute(&device->multiprocessors, cudaDevAttrMultiProcessorCount,
                                                    device->ordinal));
  EB_RETURN_IF_CUDA(context,
                    cudaDeviceGetAttribute(&device->shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin,
                                           device->ordinal));
  device->capability = major * 10 + minor;
  for (const int built : kArchitectures)
    if (built == device->capability) return EB_OK;
  char list[128];
  size_t used = 0;
  for (const int built : kArchitectures) {
    const int wrote = snprintf(list + used, sizeof list - used, "%ssm_%d", used ? ", " : "", built);
    if (wrote > 0) used += static_cast<size_t>(wrote);
    if (used >= sizeof list) break;
  }
  return fail(context, EB_UNSUPPORTED,
              "device %d is sm_%d and this library was built for %s; build it with `python -m "
              "enginebay.plugins.build_cuda --arch %d`",
              device->ordinal, device->capability, list, device->capability);
}

}  // namespace enginebay::cuda

extern "C" const char* eb_op_table(void) { return EB_CUDA_OP_TABLE; }
