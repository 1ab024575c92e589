// How a node runs on the CPU: on the session's own threads, in memory of the thread that calls it.
#include <algorithm>
#include <memory>
#include <new>
#include <thread>

#include "ort.h"

namespace enginebay::ort {
namespace {

constexpr size_t kAlignment = 64;

// Grows, never shrinks; freed with its thread. One node at a time runs on a thread, so nodes share it.
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

}  // namespace

const char* const kProvider = "CPUExecutionProvider";

Call::Call(OrtKernelContext* context) : ort_(context) {
  context_.abi_version = EB_ABI_VERSION;
  context_.threads = machine_threads();
  context_.parallel_for = parallel_for;
  context_.pool = this;
  context_.message = message_;
  context_.message_bytes = sizeof message_;
}

Call::~Call() {
  if (failure_ != nullptr) Ort::GetApi().ReleaseStatus(failure_);
}

void Call::parallel_for(void* pool, size_t count, eb_task body, void* argument) {
  auto* call = static_cast<Call*>(pool);
  OrtStatus* status = Ort::GetApi().KernelContext_ParallelFor(call->ort_, body, count, 0, argument);
  if (status == nullptr) return;
  if (call->failure_ != nullptr) Ort::GetApi().ReleaseStatus(call->failure_);
  call->failure_ = status;
}

OrtStatus* Call::workspace(const std::string& node, size_t bytes, void** memory) {
  thread_local Buffer buffer;
  *memory = buffer.at_least(bytes);
  return *memory != nullptr ? nullptr : refuse(node, "no memory for a workspace of %zu bytes", bytes);
}

OrtStatus* Call::plan(const std::string& node, size_t ints, int32_t** memory) {
  thread_local Buffer buffer;
  *memory = static_cast<int32_t*>(buffer.at_least(ints * sizeof(int32_t)));
  return *memory != nullptr ? nullptr : refuse(node, "no memory for a plan of %zu integers", ints);
}

}  // namespace enginebay::ort
