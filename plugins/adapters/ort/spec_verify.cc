// enginebay::SpecVerify and enginebay::Sample for ONNX Runtime.
#include "ops.h"

namespace enginebay::ort {
namespace {

// Reads input `index`, which has `elements` where it is there.
OrtStatus* read(Call& call, const std::string& node, size_t index, const char* name, int64_t elements,
                Tensor* tensor) {
  EB_ORT_RETURN_IF_ERROR(call.input(index, tensor));
  if (tensor->present() && tensor->elements() != elements) {
    return refuse(node, "%s has %lld elements, expected %lld", name,
                  static_cast<long long>(tensor->elements()), static_cast<long long>(elements));
  }
  return nullptr;
}

// The sampling inputs, which stand one after another from `first` on, each [sequences].
OrtStatus* read_sampling(Call& call, const std::string& node, size_t first, eb_spec_verify_args* args) {
  constexpr const char* kNames[] = {"temperature", "top_k", "top_p", "min_p", "seeds", "positions"};
  Tensor in[std::size(kNames)];
  for (size_t i = 0; i < std::size(kNames); ++i) {
    EB_ORT_RETURN_IF_ERROR(read(call, node, first + i, kNames[i], args->sequences, &in[i]));
  }
  args->temperature = static_cast<const float*>(in[0].data);
  args->top_k = static_cast<const int32_t*>(in[1].data);
  args->top_p = static_cast<const float*>(in[2].data);
  args->min_p = static_cast<const float*>(in[3].data);
  args->seeds = static_cast<const uint64_t*>(in[4].data);
  args->positions = static_cast<const int64_t*>(in[5].data);
  return nullptr;
}

OrtStatus* read_logits(Call& call, const std::string& node, Tensor* logits) {
  EB_ORT_RETURN_IF_ERROR(call.input(0, logits));
  if (logits->rank != 2 || logits->shape[1] > INT32_MAX) {
    return refuse(node, "logits has %d dimensions, the last of %lld elements; expected 2, below 2^31",
                  logits->rank,
                  static_cast<long long>(logits->rank > 0 ? logits->shape[logits->rank - 1] : 0));
  }
  return nullptr;
}

OrtStatus* run(Call& call, const std::string& node, const eb_spec_verify_desc& desc,
               const eb_spec_verify_args& args) {
  size_t bytes;
  void* memory;
  EB_ORT_RETURN_IF_ERROR(call.report(
      node, eb_spec_verify_workspace_size(call.context(), &desc, args.sequences, args.rows, &bytes)));
  EB_ORT_RETURN_IF_ERROR(call.workspace(node, bytes, &memory));
  return call.report(node, eb_spec_verify_run(call.context(), &desc, &args, memory, bytes));
}

}  // namespace

SpecVerify::SpecVerify(const OrtKernelInfo* info) {
  const Attributes attributes(kName, info);
  node_ = attributes.node();
  max_depth_ = attributes.integer("max_depth");
  io_ = attributes.input_type(0);
  if (max_depth_ < 0) attributes.refuse("max_depth must not be negative");
}

OrtStatus* SpecVerify::ComputeV2(OrtKernelContext* context) noexcept {
  Call call(context);
  Tensor logits, row_start, tokens, parents, probs;
  EB_ORT_RETURN_IF_ERROR(read_logits(call, node_, &logits));
  EB_ORT_RETURN_IF_ERROR(call.input(1, &row_start));
  if (row_start.rank != 1 || row_start.shape[0] < 1) {
    return refuse(node_, "row_start must be [B+1]; it has %d dimensions", row_start.rank);
  }
  const int64_t rows = logits.shape[0];
  EB_ORT_RETURN_IF_ERROR(read(call, node_, 2, "draft_tokens", rows, &tokens));
  EB_ORT_RETURN_IF_ERROR(read(call, node_, 3, "parents", rows, &parents));
  EB_ORT_RETURN_IF_ERROR(read(call, node_, 4, "draft_probs", rows * logits.shape[1], &probs));
  eb_spec_verify_args args{};
  args.sequences = row_start.shape[0] - 1;
  args.rows = rows;
  args.logits = logits.data;
  args.row_start = static_cast<const int32_t*>(row_start.data);
  args.draft_tokens = static_cast<const int32_t*>(tokens.data);
  args.parents = static_cast<const int32_t*>(parents.data);
  args.draft_probs = static_cast<const float*>(probs.data);
  EB_ORT_RETURN_IF_ERROR(read_sampling(call, node_, 5, &args));
  const int64_t shape[] = {args.sequences, max_depth_};
  void *accepted, *path, *next;
  EB_ORT_RETURN_IF_ERROR(call.output(0, shape, 1, &accepted));
  EB_ORT_RETURN_IF_ERROR(call.output(1, shape, 2, &path));
  EB_ORT_RETURN_IF_ERROR(call.output(2, shape, 1, &next));
  args.accepted = static_cast<int32_t*>(accepted);
  args.path = static_cast<int32_t*>(path);
  args.next_token = static_cast<int32_t*>(next);
  if (args.sequences == 0) return nullptr;
  return run(call, node_, {static_cast<int32_t>(logits.shape[1]), max_depth_, io_}, args);
}

Sample::Sample(const OrtKernelInfo* info) {
  const Attributes attributes(kName, info);
  node_ = attributes.node();
  io_ = attributes.input_type(0);
}

OrtStatus* Sample::ComputeV2(OrtKernelContext* context) noexcept {
  Call call(context);
  Tensor logits;
  EB_ORT_RETURN_IF_ERROR(read_logits(call, node_, &logits));
  eb_spec_verify_args args{};
  args.sequences = args.rows = logits.shape[0];
  args.logits = logits.data;
  EB_ORT_RETURN_IF_ERROR(read_sampling(call, node_, 1, &args));
  void* next;
  EB_ORT_RETURN_IF_ERROR(call.output(0, logits.shape.data(), 1, &next));
  args.next_token = static_cast<int32_t*>(next);
  if (args.sequences == 0) return nullptr;
  return run(call, node_, {static_cast<int32_t>(logits.shape[1]), 0, io_}, args);
}

}  // namespace enginebay::ort
