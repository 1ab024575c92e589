// How a node runs on an NVIDIA GPU: on the session's stream, in memory of the session's arena. Nothing here
// waits for the device or reads from it, so a run can be captured in a CUDA graph. (The arena may ask the
// device for memory; ONNX Runtime runs a graph once before it captures, and the arena keeps what it got.)
#include "ort.h"

namespace enginebay::ort {

const char* const kProvider = "CUDAExecutionProvider";

Call::Call(OrtKernelContext* context) : ort_(context) {
  context_.abi_version = EB_ABI_VERSION;
  context_.message = message_;
  context_.message_bytes = sizeof message_;
  failure_ = Ort::GetApi().KernelContext_GetGPUComputeStream(context, &context_.stream);
}

Call::~Call() {
  const OrtApi& api = Ort::GetApi();
  // The arena ties memory to the stream it was asked for on: what comes next on the stream may have it at
  // once, others after an event.
  if (scratch_ != nullptr) allocator_->Free(allocator_, scratch_);
  if (allocator_ != nullptr) api.ReleaseAllocator(allocator_);
  if (failure_ != nullptr) api.ReleaseStatus(failure_);
}

OrtStatus* Call::workspace(const std::string&, size_t bytes, void** memory) {
  const OrtApi& api = Ort::GetApi();
  *memory = nullptr;
  if (bytes == 0) return nullptr;
  // The first input of every op lies on the device that runs it.
  const OrtValue* value = nullptr;
  const OrtMemoryInfo* place = nullptr;
  int device = 0;
  EB_ORT_RETURN_IF_ERROR(api.KernelContext_GetInput(ort_, 0, &value));
  EB_ORT_RETURN_IF_ERROR(api.GetTensorMemoryInfo(value, &place));
  EB_ORT_RETURN_IF_ERROR(api.MemoryInfoGetId(place, &device));
  OrtMemoryInfo* arena = nullptr;
  EB_ORT_RETURN_IF_ERROR(api.CreateMemoryInfo("Cuda", OrtArenaAllocator, device, OrtMemTypeDefault, &arena));
  OrtStatus* status = api.KernelContext_GetAllocator(ort_, arena, &allocator_);
  if (status == nullptr) status = api.KernelContext_GetScratchBuffer(ort_, arena, bytes, &scratch_);
  api.ReleaseMemoryInfo(arena);
  *memory = scratch_;
  return status;
}

OrtStatus* Call::plan(const std::string& node, size_t ints, int32_t** memory) {
  *memory = nullptr;
  if (ints == 0) return nullptr;
  return refuse(node, "the CUDA library asks for a plan of %zu integers; it plans on the device, in 0", ints);
}

}  // namespace enginebay::ort
