// SpecVerify and Sample: the ABI, and the order in which the kernels run. Several blocks share a row of
// logits; between kernels a row's state lies in the workspace.
#include "spec_walk.cuh"

namespace enginebay::cuda::spec {
namespace {

template <typename T>
eb_status run(const eb_context* context, const Device& device, const Problem& p) {
  const cudaStream_t stream = stream_of(context);
  const auto rows = static_cast<unsigned>(p.a.rows), sequences = static_cast<unsigned>(p.a.sequences);
  const dim3 by_row(static_cast<unsigned>(p.slices), rows),
      by_sequence(static_cast<unsigned>(p.slices), sequences);
  const dim3 threads(kThreads);
  const unsigned fill = ceil_div(2u * static_cast<unsigned>(device.multiprocessors), rows);
  const dim3 by_few(min(static_cast<unsigned>(p.slices),
                        max(static_cast<unsigned>(ceil_div(p.vocab, kMostCounted)), max(2u, fill))),
                    rows);
  const bool drafts = p.a.row_start != nullptr;
  if (p.a.penalty_start != nullptr)
    EB_RETURN_IF_CUDA(context, launch(device, stream, dim3(rows), threads, 0, 1, penalise<T>, p));
  EB_RETURN_IF_CUDA(context, launch(device, stream, by_row, threads, 0, 1, extremes<T>, p));
  if (p.a.temperature != nullptr && (p.a.top_k != nullptr || p.a.top_p != nullptr)) {
    EB_RETURN_IF_CUDA(context, launch(device, stream, by_few, threads, 0, 1, histogram<T>, p));
    EB_RETURN_IF_CUDA(context, launch(device, stream, by_row, threads, 0, 1, refine<T>, p));
  }
  if (drafts) {
    if (p.a.temperature != nullptr)
      EB_RETURN_IF_CUDA(context, launch(device, stream, by_row, threads, 0, 1, totals<T>, p));
    EB_RETURN_IF_CUDA(context, launch(device, stream, dim3(sequences), threads, 0, 1, accept<T>, p));
  }
  EB_RETURN_IF_CUDA(context, launch(device, stream, by_sequence, threads, 0, 1, choose<T>, p));
  return EB_OK;
}

eb_status check(const eb_context* context, const eb_spec_verify_desc* d, int64_t sequences, int64_t rows) {
  EB_RETURN_IF_ERROR(check_context(context));
  if (d == nullptr) return fail(context, EB_INVALID_ARGUMENT, "SpecVerify: desc is NULL");
  if (d->vocab <= 0 || d->max_depth < 0)
    return fail(context, EB_INVALID_ARGUMENT,
                "SpecVerify: vocab %d must be positive, max_depth %d not negative", d->vocab, d->max_depth);
  if (d->dtype != EB_F32 && d->dtype != EB_F16 && d->dtype != EB_BF16)
    return fail(context, EB_UNSUPPORTED, "SpecVerify: logits %s; it has float32, float16 and bfloat16",
                dtype_name(d->dtype));
  if (sequences < 0 || rows < sequences || rows > 65535)
    return fail(context, EB_INVALID_ARGUMENT,
                "SpecVerify: %lld sequences, %lld rows; at least one a sequence, at most 65535",
                static_cast<long long>(sequences), static_cast<long long>(rows));
  return EB_OK;
}

}  // namespace
}  // namespace enginebay::cuda::spec

extern "C" {

using namespace enginebay;
using namespace enginebay::cuda;
using namespace enginebay::cuda::spec;

eb_status eb_spec_verify_workspace_size(const eb_context* context, const eb_spec_verify_desc* desc,
                                        int64_t sequences, int64_t rows, size_t* workspace_bytes) {
  EB_RETURN_IF_ERROR(check(context, desc, sequences, rows));
  if (workspace_bytes == nullptr)
    return fail(context, EB_INVALID_ARGUMENT, "SpecVerify: workspace_bytes is NULL");
  *workspace_bytes = Layout(desc->vocab, sequences, rows).total;
  return EB_OK;
}

eb_status eb_spec_verify_run(const eb_context* context, const eb_spec_verify_desc* desc,
                             const eb_spec_verify_args* args, void* workspace, size_t workspace_bytes) {
  EB_RETURN_IF_ERROR(check_context(context));
  if (args == nullptr) return fail(context, EB_INVALID_ARGUMENT, "SpecVerify: args is NULL");
  EB_RETURN_IF_ERROR(check(context, desc, args->sequences, args->rows));
  if (args->sequences == 0) return EB_OK;
  if (args->logits == nullptr || args->next_token == nullptr)
    return fail(context, EB_INVALID_ARGUMENT, "SpecVerify: logits %p, next_token %p; neither may be NULL",
                args->logits, static_cast<void*>(args->next_token));
  if (args->row_start == nullptr && args->rows != args->sequences)
    return fail(context, EB_INVALID_ARGUMENT, "SpecVerify: %lld rows of %lld sequences without row_start",
                static_cast<long long>(args->rows), static_cast<long long>(args->sequences));
  if (args->row_start != nullptr && (args->draft_tokens == nullptr || args->accepted == nullptr))
    return fail(context, EB_INVALID_ARGUMENT, "SpecVerify: row_start without draft_tokens or accepted");
  const int penalties = (args->penalty_start != nullptr) + (args->penalty_tokens != nullptr) +
                        (args->penalty_counts != nullptr);
  if (penalties != 0 && penalties != 3)
    return fail(context, EB_INVALID_ARGUMENT,
                "SpecVerify: penalty_start, penalty_tokens and penalty_counts go together");
  const Layout layout(desc->vocab, args->sequences, args->rows);
  if (workspace == nullptr || reinterpret_cast<uintptr_t>(workspace) % 256 != 0 ||
      workspace_bytes < layout.total)
    return fail(context, EB_INVALID_ARGUMENT,
                "SpecVerify: workspace %p of %zu bytes; it takes %zu, aligned to 256 bytes", workspace,
                workspace_bytes, layout.total);
  Device device;
  EB_RETURN_IF_ERROR(current_device(context, &device));
  auto* const base = static_cast<uint8_t*>(workspace);
  const Problem problem{*args,
                        desc->vocab,
                        desc->max_depth,
                        layout.slices,
                        layout.slice,
                        reinterpret_cast<Row*>(base + layout.rows),
                        reinterpret_cast<Extremes*>(base + layout.extremes),
                        reinterpret_cast<unsigned*>(base + layout.counts),
                        reinterpret_cast<unsigned long long*>(base + layout.weights),
                        reinterpret_cast<int*>(base + layout.lists),
                        reinterpret_cast<float*>(base + layout.totals),
                        reinterpret_cast<float*>(base + layout.norms),
                        reinterpret_cast<Final*>(base + layout.finals),
                        reinterpret_cast<Best*>(base + layout.bests)};
  switch (desc->dtype) {
    case EB_F32:
      return run<float>(context, device, problem);
    case EB_F16:
      return run<half>(context, device, problem);
    default:
      return run<__nv_bfloat16>(context, device, problem);
  }
}

}  // extern "C"
