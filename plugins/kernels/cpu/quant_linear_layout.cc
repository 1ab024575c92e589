#include "quant_linear_layout.h"

#include <algorithm>
#include <initializer_list>

#include "status.h"

namespace enginebay {
namespace {

// The largest of the usual blocks, at most `most`, that divides block_size; 0 where none does.
int kernel_block(int block_size, int most) {
  for (int block : {512, 256, 128, 64, 32}) {
    if (block <= most && block_size % block == 0) return block;
  }
  return 0;
}

// Fills the layout's blocks of formats that have scales.
eb_status set_blocks(const eb_context* context, const eb_quant_linear_desc& desc, QuantLinearLayout* layout) {
  const char* format = dtype_name(desc.format);
  const int block =
      desc.block_size <= 0 ? 0 : kernel_block(desc.block_size, desc.format == EB_F8E4M3 ? 512 : 128);
  if (block == 0) {
    return fail(context, EB_INVALID_ARGUMENT,
                "QuantLinear: block_size %d of %s weights is not a positive multiple of 32", desc.block_size,
                format);
  }
  if (desc.in_features % desc.block_size != 0) {
    return fail(
        context, EB_INVALID_ARGUMENT,
        "QuantLinear: in_features %d is not a multiple of block_size %d; choose a block that divides it",
        desc.in_features, desc.block_size);
  }
  if (desc.format != EB_I4 && !desc.symmetric) {
    return fail(context, EB_UNSUPPORTED, "QuantLinear: %s weights have no minimum here; set symmetric to 1",
                format);
  }
  layout->block = block;
  layout->blocks = desc.in_features / block;
  layout->blocks_per_scale = desc.block_size / block;
  return EB_OK;
}

eb_status fill_layout(const eb_context* context, const eb_quant_linear_desc* desc,
                      QuantLinearLayout* layout) {
  EB_RETURN_IF_ERROR(check_context(context));
  if (desc == nullptr) return fail(context, EB_INVALID_ARGUMENT, "QuantLinear: the descriptor is NULL");
  if (desc->in_features <= 0 || desc->out_features <= 0) {
    return fail(context, EB_INVALID_ARGUMENT,
                "QuantLinear: in_features %d and out_features %d must both be positive", desc->in_features,
                desc->out_features);
  }
  if (desc->io_dtype != EB_F32) {
    return fail(context, EB_UNSUPPORTED, "QuantLinear: this library computes x and y in float32, not %s (%d)",
                dtype_name(desc->io_dtype), static_cast<int>(desc->io_dtype));
  }
  *layout = {};
  layout->in_features = desc->in_features;
  layout->out_features = desc->out_features;
  layout->panels = (layout->out_features + kPanel - 1) / kPanel;
  layout->format = desc->format;
  const size_t features = static_cast<size_t>(desc->in_features);
  switch (desc->format) {
    case EB_F32:
      layout->panel_bytes = features * kPanel * 4;
      return EB_OK;
    case EB_F16:
    case EB_BF16:
      layout->panel_bytes = align_up(features * kPanel * 2);
      return EB_OK;
    case EB_F8E4M3:
      EB_RETURN_IF_ERROR(set_blocks(context, *desc, layout));
      layout->values_offset = static_cast<size_t>(layout->blocks) * kPanel * 4;
      layout->panel_bytes = align_up(layout->values_offset + features * kPanel);
      return EB_OK;
    case EB_I8:
    case EB_I4: {
      EB_RETURN_IF_ERROR(set_blocks(context, *desc, layout));
      layout->integer = true;
      layout->minimum = !desc->symmetric;
      const size_t scales = static_cast<size_t>(layout->blocks) * kPanel * 2 * (layout->minimum ? 2 : 1);
      layout->values_offset = kAlignment + align_up(scales);
      layout->panel_bytes = layout->values_offset + features * kPanel / (desc->format == EB_I4 ? 2 : 1);
      return EB_OK;
    }
    default:
      return fail(context, EB_UNSUPPORTED, "QuantLinear: no kernel for %s (%d) weights",
                  dtype_name(desc->format), static_cast<int>(desc->format));
  }
}

}  // namespace

eb_status make_layout(const eb_context* context, const eb_quant_linear_desc* desc,
                      QuantLinearLayout* layout) {
  EB_RETURN_IF_ERROR(fill_layout(context, desc, layout));
  if (layout->panel_bytes <= static_cast<size_t>(PTRDIFF_MAX / layout->panels)) return EB_OK;
  return fail(context, EB_INVALID_ARGUMENT, "QuantLinear: %d x %d %s weights are more bytes than fit 63 bits",
              desc->out_features, desc->in_features, dtype_name(desc->format));
}

eb_status check_rows(const eb_context* context, const QuantLinearLayout& layout, int64_t rows) {
  constexpr int64_t kAddressable = int64_t{1} << 47;  // bytes, of x86-64; threads' buffers of it still add up
  const size_t widest =
      static_cast<size_t>(std::max(layout.in_features, layout.out_features)) * sizeof(float);
  const int64_t most = kAddressable / static_cast<int64_t>(std::max(widest, tile_bytes(layout, 1)));
  if (rows >= 0 && rows <= most) return EB_OK;
  return fail(context, EB_INVALID_ARGUMENT,
              "QuantLinear: %lld rows of x; weights of %lld x %lld take 0 to %lld rows",
              static_cast<long long>(rows), static_cast<long long>(layout.out_features),
              static_cast<long long>(layout.in_features), static_cast<long long>(most));
}

eb_status check_pointer(const eb_context* context, const char* name, const void* pointer, size_t alignment) {
  if (pointer == nullptr) return fail(context, EB_INVALID_ARGUMENT, "QuantLinear: %s is NULL", name);
  if (reinterpret_cast<uintptr_t>(pointer) % alignment == 0) return EB_OK;
  return fail(context, EB_INVALID_ARGUMENT, "QuantLinear: %s at %p is not aligned to %zu bytes", name,
              pointer, alignment);
}

eb_status check_packed(const eb_context* context, const QuantLinearLayout& layout, const void* packed,
                       size_t bytes) {
  EB_RETURN_IF_ERROR(check_pointer(context, "packed", packed, kPointerAlignment));
  if (bytes == packed_bytes(layout)) return EB_OK;
  return fail(
      context, EB_INVALID_ARGUMENT,
      "QuantLinear: %zu bytes of packed weights, but %lld x %lld %s weights take %zu; pack them again with "
      "this library",
      bytes, static_cast<long long>(layout.out_features), static_cast<long long>(layout.in_features),
      dtype_name(layout.format), packed_bytes(layout));
}

}  // namespace enginebay

extern "C" const char* eb_quant_linear_layout(const eb_quant_linear_desc* desc) {
  using namespace enginebay;
  eb_context context{};
  context.abi_version = EB_ABI_VERSION;
  QuantLinearLayout layout{};
  if (make_layout(&context, desc, &layout) != EB_OK) return nullptr;
  struct Name {
    eb_dtype format;
    int block;
    bool minimum;
    const char* name;
  };
  static constexpr Name kNames[] = {
      {EB_F32, 0, false, "cpu-panel16-f32-v1"},         {EB_F16, 0, false, "cpu-panel16-f16-v1"},
      {EB_BF16, 0, false, "cpu-panel16-bf16-v1"},       {EB_F8E4M3, 32, false, "cpu-panel16-f8b32-v1"},
      {EB_F8E4M3, 64, false, "cpu-panel16-f8b64-v1"},   {EB_F8E4M3, 128, false, "cpu-panel16-f8b128-v1"},
      {EB_F8E4M3, 256, false, "cpu-panel16-f8b256-v1"}, {EB_F8E4M3, 512, false, "cpu-panel16-f8b512-v1"},
      {EB_I8, 32, false, "cpu-panel16-i8b32-v1"},       {EB_I8, 64, false, "cpu-panel16-i8b64-v1"},
      {EB_I8, 128, false, "cpu-panel16-i8b128-v1"},     {EB_I4, 32, false, "cpu-panel16-i4b32-v1"},
      {EB_I4, 64, false, "cpu-panel16-i4b64-v1"},       {EB_I4, 128, false, "cpu-panel16-i4b128-v1"},
      {EB_I4, 32, true, "cpu-panel16-i4b32m-v1"},       {EB_I4, 64, true, "cpu-panel16-i4b64m-v1"},
      {EB_I4, 128, true, "cpu-panel16-i4b128m-v1"},
  };
  for (const Name& name : kNames) {
    if (name.format == layout.format && name.block == layout.block && name.minimum == layout.minimum) {
      return name.name;
    }
  }
  return nullptr;
}
