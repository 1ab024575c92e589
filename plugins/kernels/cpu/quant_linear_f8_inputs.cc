// y = E4M3(x).W^T + bias: rows of x are rounded, some inputs twice, then multiplied in fp32.
//
// Float formats go to eb_quant_linear_run as they are. Integer weights would meet int8 inputs there, so
// groups of their panels are widened to fp32 first: sixteen columns of fp32 weights are a packed f32 panel.
#include "enginebay/quant_linear_f8_inputs.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>

#include "float16.h"
#include "parallel.h"
#include "quant_linear_layout.h"
#include "status.h"

namespace enginebay {
namespace {

constexpr float kLargestF8 = 448.0f;
constexpr float kSmallestScale = 0x1p-100f;
constexpr float kSmallestNormalF8 = 0x1p-6f;
constexpr float kRoundsToSubnormals = 0x1p14f;  // its last bit is worth 2^-9, E4M3's smallest step
constexpr int64_t kWidenedBytes = 1 << 20;      // of a group of panels: stays in the second-level cache
constexpr float kResidualSteps = 16.0f;         // what rounding leaves is at most 16 of the row's steps
constexpr int64_t kMostPanels = 8;              // rows of x are prepared again for each group

// The nearest E4M3 number, ties to even; at most 448 in magnitude.
inline float to_f8(float value) {
  const uint32_t sign = float_to_bits(value) & 0x80000000u;
  const float magnitude = std::min(std::fabs(value), kLargestF8);
  const uint32_t bits = float_to_bits(magnitude);
  const uint32_t normal = (bits + 0x7ffffu + (bits >> 20 & 1u)) & 0xfff00000u;
  const uint32_t subnormal = float_to_bits((magnitude + kRoundsToSubnormals) - kRoundsToSubnormals);
  return bits_to_float(sign | (magnitude < kSmallestNormalF8 ? subnormal : normal));
}

// Inputs that are multiplied twice.
struct Repeated {
  const int32_t* at;
  int64_t count;
};

// `count` inputs, and behind them what is left of those `repeated`.
void round_row(const float* x, int64_t count, float input_scale, const Repeated& repeated, float* out) {
  uint32_t top = 0;  // magnitudes are ordered as their bits are, NaN above infinity
  for (int64_t i = 0; i < count; ++i) top = std::max(top, float_to_bits(x[i]) & 0x7fffffffu);
  const float largest = bits_to_float(top);
  const bool zero = input_scale == 0.0f && largest < kSmallestScale;
  if (zero || !std::isfinite(largest)) {
    std::fill_n(out, count + repeated.count, zero ? 0.0f : std::numeric_limits<float>::quiet_NaN());
    return;
  }
  const float scale = input_scale == 0.0f ? largest / kLargestF8 : input_scale;
  const float inverse = input_scale == 0.0f ? kLargestF8 / largest : 1.0f / input_scale;
  for (int64_t i = 0; i < count; ++i) out[i] = scale * to_f8(x[i] * inverse);
  for (int64_t r = 0; r < repeated.count; ++r) {
    const int64_t i = repeated.at[r];
    out[count + r] = scale / kResidualSteps * to_f8(kResidualSteps * inverse * (x[i] - out[i]));
  }
}

// A panel of integer weights as packed f32: [K][16]. Exact, but for one rounding where there is a minimum.
void widen_panel(const QuantLinearLayout& layout, const uint8_t* panel, float* out) {
  const bool nibbles = layout.format == EB_I4;
  const int64_t together = nibbles ? 8 : 4;  // values of a feature in four bytes
  const uint32_t mask = nibbles ? 0xfu : 0xffu;
  const float* multipliers = reinterpret_cast<const float*>(panel);
  const uint16_t* halves = reinterpret_cast<const uint16_t*>(panel + kAlignment);
  const uint8_t* values = panel + layout.values_offset;
  for (int64_t b = 0; b < layout.blocks; ++b) {
    float scale[kPanel], low[kPanel];
    for (int c = 0; c < kPanel; ++c) {
      scale[c] = fp16_to_float(*halves++) * multipliers[c];
      low[c] = (nibbles ? -8.0f : -128.0f) * scale[c];
    }
    for (int c = 0; layout.minimum && c < kPanel; ++c) low[c] = fp16_to_float(*halves++) * multipliers[c];
    for (int64_t k = 0; k < layout.block; k += together, values += 4 * kPanel) {
      uint32_t words[kPanel];
      std::memcpy(words, values, sizeof words);
      for (int64_t i = 0; i < together; ++i, out += kPanel) {
        const uint32_t shift = static_cast<uint32_t>(i % 4 * 8 + i / 4 * 4);
        for (int c = 0; c < kPanel; ++c) {
          out[c] = scale[c] * static_cast<float>(static_cast<int32_t>(words[c] >> shift & mask)) + low[c];
        }
      }
    }
  }
}

eb_quant_linear_desc widened_desc(const eb_quant_linear_desc& desc, int64_t columns) {
  return {desc.in_features, static_cast<int32_t>(columns), EB_F32, 0, 1, EB_F32};
}

eb_status check_repeated(const eb_context* context, const QuantLinearLayout& layout, const int32_t* repeated,
                         int64_t repeats) {
  if (repeats < 0 || repeats >= layout.in_features || (repeats > 0 && repeated == nullptr)) {
    return fail(context, EB_INVALID_ARGUMENT,
                "QuantLinearF8Inputs: %lld repeated inputs among in_features %lld, or `repeated` is NULL",
                static_cast<long long>(repeats), static_cast<long long>(layout.in_features));
  }
  for (int64_t r = 0; r < repeats; ++r) {
    if (repeated[r] < 0 || repeated[r] >= layout.in_features - repeats) {
      return fail(context, EB_INVALID_ARGUMENT,
                  "QuantLinearF8Inputs: repeated[%lld] is %d, x has %lld columns", static_cast<long long>(r),
                  repeated[r], static_cast<long long>(layout.in_features - repeats));
    }
  }
  return EB_OK;
}

// Where things lie in the workspace: rounded rows, then for integer weights what each task has to itself.
struct Room {
  size_t x_bytes, weights_bytes, y_bytes, inner_bytes;  // inner: of eb_quant_linear_run
  int64_t group, groups, tasks;  // panels at a time, how many times, on how many threads

  size_t task_bytes() const { return weights_bytes + y_bytes + inner_bytes; }
  size_t total() const { return x_bytes + static_cast<size_t>(tasks) * task_bytes(); }
};

eb_context on_one_thread(const eb_context* context) {
  eb_context alone = *context;
  alone.parallel_for = nullptr;
  alone.threads = 1;
  return alone;
}

eb_status make_room(const eb_context* context, const eb_quant_linear_desc& desc,
                    const QuantLinearLayout& layout, int64_t rows, Room* room) {
  *room = {};
  const size_t count = static_cast<size_t>(rows);
  room->x_bytes = align_up(count * static_cast<size_t>(layout.in_features) * sizeof(float));
  room->tasks = 1;
  if (!layout.integer) return eb_quant_linear_workspace_size(context, &desc, rows, &room->inner_bytes);
  const int64_t panel_bytes = layout.in_features * kPanel * static_cast<int64_t>(sizeof(float));
  room->group = std::clamp<int64_t>(kWidenedBytes / panel_bytes, 1, std::min(kMostPanels, layout.panels));
  room->groups = (layout.panels + room->group - 1) / room->group;
  room->tasks = std::min<int64_t>(thread_count(context), room->groups);
  room->weights_bytes = static_cast<size_t>(room->group * panel_bytes);
  room->y_bytes = align_up(count * static_cast<size_t>(room->group * kPanel) * sizeof(float));
  const eb_context alone = on_one_thread(context);
  const eb_quant_linear_desc wide = widened_desc(desc, room->group * kPanel);
  EB_RETURN_IF_ERROR(eb_quant_linear_workspace_size(&alone, &wide, rows, &room->inner_bytes));
  room->inner_bytes = align_up(room->inner_bytes);
  return EB_OK;
}

// One call over integer weights; x is rounded.
struct Run {
  const eb_context* context;
  const eb_quant_linear_desc& desc;
  const QuantLinearLayout& layout;
  const Room& room;
  int64_t rows;
  const float* x;
  const uint8_t* packed;
  const float* bias;
  float* y;
  uint8_t* memory;  // of all tasks
  std::atomic<int32_t>* failure;

  void operator()(size_t task) const {
    uint8_t* mine = memory + task * room.task_bytes();
    for (int64_t group = static_cast<int64_t>(task); group < room.groups; group += room.tasks) {
      const eb_status status = columns_of(group, mine);
      if (status != EB_OK) failure->store(status);
    }
  }

 private:
  eb_status columns_of(int64_t group, uint8_t* mine) const {
    const int64_t panel = group * room.group, panels = std::min(room.group, layout.panels - panel);
    const int64_t column = panel * kPanel, columns = std::min(panels * kPanel, layout.out_features - column);
    float* weights = reinterpret_cast<float*>(mine);
    float* part = reinterpret_cast<float*>(mine + room.weights_bytes);
    const int64_t size = layout.in_features * kPanel;
    for (int64_t p = 0; p < panels; ++p) {
      widen_panel(layout, packed + static_cast<size_t>(panel + p) * layout.panel_bytes, weights + p * size);
    }
    eb_context alone = on_one_thread(context);
    alone.message = nullptr;  // other tasks would write it at the same time
    alone.message_bytes = 0;
    const eb_quant_linear_desc wide = widened_desc(desc, columns);
    EB_RETURN_IF_ERROR(eb_quant_linear_run(&alone, &wide, rows, x, weights,
                                           static_cast<size_t>(panels * size) * sizeof(float),
                                           bias == nullptr ? nullptr : bias + column, part,
                                           mine + room.weights_bytes + room.y_bytes, room.inner_bytes));
    for (int64_t row = 0; row < rows; ++row) {
      std::memcpy(y + row * layout.out_features + column, part + row * columns,
                  static_cast<size_t>(columns) * sizeof(float));
    }
    return EB_OK;
  }
};

}  // namespace
}  // namespace enginebay

using namespace enginebay;

extern "C" eb_status eb_quant_linear_f8_inputs_check(const eb_context* context, float input_scale) {
  EB_RETURN_IF_ERROR(check_context(context));
  if (input_scale == 0.0f || (std::isfinite(input_scale) && input_scale >= kSmallestScale)) return EB_OK;
  return fail(context, EB_INVALID_ARGUMENT,
              "QuantLinearF8Inputs: input_scale %g is neither 0 (of each row) nor a positive finite number",
              static_cast<double>(input_scale));
}

extern "C" eb_status eb_quant_linear_f8_inputs_workspace_size(const eb_context* context,
                                                              const eb_quant_linear_desc* desc, int64_t rows,
                                                              size_t* workspace_bytes) {
  QuantLinearLayout layout{};
  EB_RETURN_IF_ERROR(make_layout(context, desc, &layout));
  if (rows < 0 || workspace_bytes == nullptr) {
    return fail(context, EB_INVALID_ARGUMENT,
                "QuantLinearF8Inputs: %lld rows of x, or `workspace_bytes` is NULL",
                static_cast<long long>(rows));
  }
  *workspace_bytes = 0;
  if (rows == 0) return EB_OK;
  Room room{};
  EB_RETURN_IF_ERROR(make_room(context, *desc, layout, rows, &room));
  *workspace_bytes = room.total();
  return EB_OK;
}

extern "C" eb_status eb_quant_linear_f8_inputs_run(const eb_context* context,
                                                   const eb_quant_linear_desc* desc, int64_t rows,
                                                   const void* x, float input_scale, const int32_t* repeated,
                                                   int64_t repeats, const void* packed, size_t packed_bytes,
                                                   const float* bias, void* y, void* workspace,
                                                   size_t workspace_bytes) {
  EB_RETURN_IF_ERROR(eb_quant_linear_f8_inputs_check(context, input_scale));
  QuantLinearLayout layout{};
  EB_RETURN_IF_ERROR(make_layout(context, desc, &layout));
  if (rows < 0) {
    return fail(context, EB_INVALID_ARGUMENT, "QuantLinearF8Inputs: %lld rows of x",
                static_cast<long long>(rows));
  }
  EB_RETURN_IF_ERROR(check_repeated(context, layout, repeated, repeats));
  EB_RETURN_IF_ERROR(check_packed(context, layout, packed, packed_bytes));
  if (rows == 0) return EB_OK;
  EB_RETURN_IF_ERROR(check_pointer(context, "x", x, alignof(float)));
  EB_RETURN_IF_ERROR(check_pointer(context, "y", y, alignof(float)));
  if (bias != nullptr) EB_RETURN_IF_ERROR(check_pointer(context, "bias", bias, alignof(float)));
  EB_RETURN_IF_ERROR(check_pointer(context, "workspace", workspace, kPointerAlignment));
  Room room{};
  EB_RETURN_IF_ERROR(make_room(context, *desc, layout, rows, &room));
  if (workspace_bytes < room.total()) {
    return fail(context, EB_INVALID_ARGUMENT,
                "QuantLinearF8Inputs: the workspace has %zu bytes, but this call needs %zu; ask "
                "workspace_size with the same rows and threads",
                workspace_bytes, room.total());
  }
  float* rounded = static_cast<float*>(workspace);
  uint8_t* rest = static_cast<uint8_t*>(workspace) + room.x_bytes;
  constexpr int64_t kRows = 16;  // of a task
  const int64_t inputs = layout.in_features - repeats;
  parallel_for(context, static_cast<size_t>((rows + kRows - 1) / kRows), [&](size_t task) {
    const int64_t begin = static_cast<int64_t>(task) * kRows, end = std::min(begin + kRows, rows);
    for (int64_t row = begin; row < end; ++row) {
      round_row(static_cast<const float*>(x) + row * inputs, inputs, input_scale, {repeated, repeats},
                rounded + row * layout.in_features);
    }
  });
  if (!layout.integer) {
    return eb_quant_linear_run(context, desc, rows, rounded, packed, packed_bytes, bias, y, rest,
                               room.inner_bytes);
  }
  std::atomic<int32_t> failure{EB_OK};
  const Run run{context,
                *desc,
                layout,
                room,
                rows,
                rounded,
                static_cast<const uint8_t*>(packed),
                bias,
                static_cast<float*>(y),
                rest,
                &failure};
  parallel_for(context, static_cast<size_t>(room.tasks), run);
  if (failure.load() == EB_OK) return EB_OK;
  return fail(context, static_cast<eb_status>(failure.load()),
              "QuantLinearF8Inputs: a product of widened weights failed");
}
