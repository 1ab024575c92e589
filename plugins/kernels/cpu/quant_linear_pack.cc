// Plain weights to panels and back (quant_linear_layout.h). Runs when an engine is built, and for embeddings.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <initializer_list>

#include "float16.h"
#include "parallel.h"
#include "quant_linear_layout.h"
#include "status.h"

namespace enginebay {
namespace {

// Where a value of output feature `c` of a panel lies, in elements (float), bytes (i8) or nibbles (i4).
size_t float_index(int64_t k, int c) { return static_cast<size_t>(k) * kPanel + static_cast<size_t>(c); }
size_t int8_index(int64_t k, int c) {
  return static_cast<size_t>(k / 4) * 64 + static_cast<size_t>(c) * 4 + static_cast<size_t>(k % 4);
}
size_t int4_byte(int64_t k, int c) {
  return static_cast<size_t>(k / 8) * 64 + static_cast<size_t>(c) * 4 + static_cast<size_t>(k % 4);
}
int int4_shift(int64_t k) { return k / 4 % 2 * 4; }

// The lowest index reported by any thread.
class FirstBad {
 public:
  void report(int64_t index) {
    int64_t seen = first_.load(std::memory_order_relaxed);
    while (index < seen && !first_.compare_exchange_weak(seen, index, std::memory_order_relaxed)) {
    }
  }
  bool any() const { return get() != kNone; }
  int64_t get() const { return first_.load(std::memory_order_relaxed); }

 private:
  static constexpr int64_t kNone = INT64_MAX;
  std::atomic<int64_t> first_{kNone};
};

struct Packing {
  const QuantLinearLayout& layout;
  const eb_quant_linear_weights& weights;
  FirstBad scale, minimum, value;
};

// The power of two that brings the largest of `count` numbers into [2^14, 2^15), as far as fp32 has it.
float multiplier_for(const float* scales, const float* minimums, int64_t count) {
  float largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    largest = std::max(largest, std::fabs(scales[i]));
    if (minimums != nullptr) largest = std::max(largest, std::fabs(minimums[i]));
  }
  if (largest == 0) return 1;
  return std::ldexp(1.0f, std::max(std::ilogb(largest) - 14, -126));
}

template <typename T>
void pack_floats(const QuantLinearLayout& layout, const void* values, int64_t panel, uint8_t* out) {
  const int64_t features = layout.in_features;
  T* to = reinterpret_cast<T*>(out);
  for (int c = 0; c < kPanel; ++c) {
    const int64_t n = panel * kPanel + c;
    if (n >= layout.out_features) break;
    const T* from = static_cast<const T*>(values) + n * features;
    for (int64_t k = 0; k < features; ++k) to[float_index(k, c)] = from[k];
  }
}

// The fp32 scales and the E4M3 values of output feature `n`.
void pack_f8(Packing* packing, int64_t n, int c, uint8_t* out) {
  const QuantLinearLayout& layout = packing->layout;
  const int64_t features = layout.in_features, groups = layout.blocks / layout.blocks_per_scale;
  const float* scales = packing->weights.scales + n * groups;
  for (int64_t g = 0; g < groups; ++g) {
    if (!std::isfinite(scales[g])) packing->scale.report(n * groups + g);
  }
  for (int64_t b = 0; b < layout.blocks; ++b) {
    reinterpret_cast<float*>(out)[b * kPanel + c] = scales[b / layout.blocks_per_scale];
  }
  uint8_t* values = out + layout.values_offset;
  const uint8_t* from = static_cast<const uint8_t*>(packing->weights.values) + n * features;
  for (int64_t k = 0; k < features; ++k) {
    if ((from[k] & 0x7f) == 0x7f) packing->value.report(n * features + k);
    values[float_index(k, c)] = from[k];
  }
}

// Scales and minimums of output feature `n`, then its values.
void pack_integers(Packing* packing, int64_t n, int c, uint8_t* out) {
  const QuantLinearLayout& layout = packing->layout;
  const int64_t features = layout.in_features, groups = layout.blocks / layout.blocks_per_scale;
  const float* scales = packing->weights.scales + n * groups;
  const float* minimums = layout.minimum ? packing->weights.minimums + n * groups : nullptr;
  for (int64_t g = 0; g < groups; ++g) {
    if (!std::isfinite(scales[g])) packing->scale.report(n * groups + g);
    if (minimums != nullptr && !std::isfinite(minimums[g])) packing->minimum.report(n * groups + g);
  }
  if (packing->scale.any() || packing->minimum.any()) return;
  const float multiplier = multiplier_for(scales, minimums, groups);
  reinterpret_cast<float*>(out)[c] = multiplier;
  uint16_t* halves = reinterpret_cast<uint16_t*>(out + kAlignment);
  const int64_t step = layout.minimum ? 2 * kPanel : kPanel;
  for (int64_t b = 0; b < layout.blocks; ++b) {
    const int64_t g = b / layout.blocks_per_scale;
    halves[b * step + c] = float_to_fp16(scales[g] / multiplier);
    if (minimums != nullptr) halves[b * step + kPanel + c] = float_to_fp16(minimums[g] / multiplier);
  }
  uint8_t* values = out + layout.values_offset;
  if (layout.format == EB_I8) {
    const int8_t* from = static_cast<const int8_t*>(packing->weights.values) + n * features;
    for (int64_t k = 0; k < features; ++k) values[int8_index(k, c)] = static_cast<uint8_t>(from[k] + 128);
    return;
  }
  const uint8_t* from = static_cast<const uint8_t*>(packing->weights.values) + n * features;
  for (int64_t k = 0; k < features; ++k) {
    if (from[k] > 15) packing->value.report(n * features + k);
    values[int4_byte(k, c)] |= static_cast<uint8_t>((from[k] & 15) << int4_shift(k));
  }
}

void pack_panel(Packing* packing, int64_t panel, uint8_t* out) {
  const QuantLinearLayout& layout = packing->layout;
  std::memset(out, 0, layout.panel_bytes);
  if (layout.format == EB_F32) return pack_floats<uint32_t>(layout, packing->weights.values, panel, out);
  if (layout.block == 0) return pack_floats<uint16_t>(layout, packing->weights.values, panel, out);
  for (int c = 0; c < kPanel && panel * kPanel + c < layout.out_features; ++c) {
    (layout.integer ? pack_integers : pack_f8)(packing, panel * kPanel + c, c, out);
  }
}

float f8_to_float(uint8_t bits) {
  return 256.0f * fp16_to_float(static_cast<uint16_t>((bits & 0x80) << 8 | (bits & 0x7f) << 7));
}

// W[n] in fp32, [K].
void unpack_row(const QuantLinearLayout& layout, const uint8_t* packed, int64_t n, float* out) {
  const uint8_t* panel = packed + static_cast<size_t>(n / kPanel) * layout.panel_bytes;
  const int c = static_cast<int>(n % kPanel);
  const int64_t features = layout.in_features;
  if (layout.format == EB_F8E4M3) {
    const float* scales = reinterpret_cast<const float*>(panel);
    const uint8_t* values = panel + layout.values_offset;
    for (int64_t k = 0; k < features; ++k) {
      out[k] = scales[k / layout.block * kPanel + c] * f8_to_float(values[float_index(k, c)]);
    }
    return;
  }
  if (!layout.integer) {
    const uint32_t* words = reinterpret_cast<const uint32_t*>(panel);
    const uint16_t* halves = reinterpret_cast<const uint16_t*>(panel);
    for (int64_t k = 0; k < features; ++k) {
      const size_t i = float_index(k, c);
      out[k] = layout.format == EB_F32   ? bits_to_float(words[i])
               : layout.format == EB_F16 ? fp16_to_float(halves[i])
                                         : bf16_to_float(halves[i]);
    }
    return;
  }
  const float multiplier = reinterpret_cast<const float*>(panel)[c];
  const uint16_t* halves = reinterpret_cast<const uint16_t*>(panel + kAlignment);
  const uint8_t* values = panel + layout.values_offset;
  const int64_t step = layout.minimum ? 2 * kPanel : kPanel;
  for (int64_t b = 0; b < layout.blocks; ++b) {
    const float scale = fp16_to_float(halves[b * step + c]);
    const float minimum = layout.minimum ? fp16_to_float(halves[b * step + kPanel + c]) : 0.0f;
    const int offset = layout.minimum ? 0 : layout.format == EB_I8 ? 128 : 8;
    for (int64_t k = b * layout.block; k < (b + 1) * layout.block; ++k) {
      const int stored =
          layout.format == EB_I8 ? values[int8_index(k, c)] : (values[int4_byte(k, c)] >> int4_shift(k)) & 15;
      out[k] = multiplier * (scale * static_cast<float>(stored - offset) + minimum);
    }
  }
}

eb_status check_weights(const eb_context* context, const QuantLinearLayout& layout,
                        const eb_quant_linear_weights* weights) {
  if (weights == nullptr) return fail(context, EB_INVALID_ARGUMENT, "QuantLinear: the weights are NULL");
  const size_t alignment = layout.integer ? 1 : weight_bytes(layout);
  EB_RETURN_IF_ERROR(check_pointer(context, "values", weights->values, alignment));
  if (layout.block > 0) EB_RETURN_IF_ERROR(check_pointer(context, "scales", weights->scales, alignof(float)));
  if (layout.minimum)
    EB_RETURN_IF_ERROR(check_pointer(context, "minimums", weights->minimums, alignof(float)));
  return EB_OK;
}

eb_status report(const eb_context* context, const Packing& packing) {
  const QuantLinearLayout& layout = packing.layout;
  const int64_t groups = layout.block > 0 ? layout.blocks / layout.blocks_per_scale : 1;
  for (const bool scale : {true, false}) {
    const FirstBad& bad = scale ? packing.scale : packing.minimum;
    if (!bad.any()) continue;
    const float* from = scale ? packing.weights.scales : packing.weights.minimums;
    return fail(context, EB_INVALID_ARGUMENT,
                "QuantLinear: the %s of output feature %lld, block %lld is %g; it must be finite",
                scale ? "scale" : "minimum", static_cast<long long>(bad.get() / groups),
                static_cast<long long>(bad.get() % groups), static_cast<double>(from[bad.get()]));
  }
  if (!packing.value.any()) return EB_OK;
  const int64_t at = packing.value.get();
  return fail(context, EB_INVALID_ARGUMENT,
              "QuantLinear: %s value %d of output feature %lld, input feature %lld is not %s",
              dtype_name(layout.format), static_cast<const uint8_t*>(packing.weights.values)[at],
              static_cast<long long>(at / layout.in_features),
              static_cast<long long>(at % layout.in_features),
              layout.format == EB_I4 ? "in 0..15" : "a number");
}

}  // namespace
}  // namespace enginebay

using namespace enginebay;

extern "C" eb_status eb_quant_linear_packed_bytes(const eb_context* context, const eb_quant_linear_desc* desc,
                                                  size_t* bytes) {
  QuantLinearLayout layout{};
  EB_RETURN_IF_ERROR(make_layout(context, desc, &layout));
  if (bytes == nullptr) return fail(context, EB_INVALID_ARGUMENT, "QuantLinear: `bytes` is NULL");
  *bytes = packed_bytes(layout);
  return EB_OK;
}

extern "C" eb_status eb_quant_linear_pack(const eb_context* context, const eb_quant_linear_desc* desc,
                                          const eb_quant_linear_weights* weights, void* packed,
                                          size_t bytes) {
  QuantLinearLayout layout{};
  EB_RETURN_IF_ERROR(make_layout(context, desc, &layout));
  EB_RETURN_IF_ERROR(check_weights(context, layout, weights));
  EB_RETURN_IF_ERROR(check_packed(context, layout, packed, bytes));
  Packing packing{layout, *weights, {}, {}, {}};
  uint8_t* out = static_cast<uint8_t*>(packed);
  parallel_for(context, static_cast<size_t>(layout.panels), [&](size_t panel) {
    pack_panel(&packing, static_cast<int64_t>(panel), out + panel * layout.panel_bytes);
  });
  return report(context, packing);
}

extern "C" eb_status eb_quant_linear_unpack(const eb_context* context, const eb_quant_linear_desc* desc,
                                            const void* packed, size_t bytes, float* weights) {
  QuantLinearLayout layout{};
  EB_RETURN_IF_ERROR(make_layout(context, desc, &layout));
  EB_RETURN_IF_ERROR(check_packed(context, layout, packed, bytes));
  EB_RETURN_IF_ERROR(check_pointer(context, "weights", weights, alignof(float)));
  parallel_for(context, static_cast<size_t>(layout.out_features), [&](size_t n) {
    const int64_t row = static_cast<int64_t>(n);
    unpack_row(layout, static_cast<const uint8_t*>(packed), row, weights + row * layout.in_features);
  });
  return EB_OK;
}

extern "C" eb_status eb_embedding_run(const eb_context* context, const eb_quant_linear_desc* desc,
                                      int64_t rows, const int32_t* ids, const void* packed,
                                      size_t packed_bytes, void* y) {
  QuantLinearLayout layout{};
  EB_RETURN_IF_ERROR(make_layout(context, desc, &layout));
  if (rows < 0) {
    return fail(context, EB_INVALID_ARGUMENT, "Embedding: %lld rows", static_cast<long long>(rows));
  }
  EB_RETURN_IF_ERROR(check_packed(context, layout, packed, packed_bytes));
  if (rows == 0) return EB_OK;
  EB_RETURN_IF_ERROR(check_pointer(context, "ids", ids, alignof(int32_t)));
  EB_RETURN_IF_ERROR(check_pointer(context, "y", y, alignof(float)));
  for (int64_t i = 0; i < rows; ++i) {
    if (ids[i] < 0 || ids[i] >= layout.out_features) {
      return fail(context, EB_INVALID_ARGUMENT, "Embedding: id %d of row %lld is not in [0, %lld)", ids[i],
                  static_cast<long long>(i), static_cast<long long>(layout.out_features));
    }
  }
  constexpr int64_t kRows = 16;  // of a task: a row takes about a microsecond
  parallel_for(context, static_cast<size_t>((rows + kRows - 1) / kRows), [&](size_t task) {
    const int64_t begin = static_cast<int64_t>(task) * kRows, end = std::min(begin + kRows, rows);
    for (int64_t i = begin; i < end; ++i) {
      unpack_row(layout, static_cast<const uint8_t*>(packed), ids[i],
                 static_cast<float*>(y) + i * layout.in_features);
    }
  });
  return EB_OK;
}
