// Any x86-64, in plain C++: the same operations in the same order as the other tables, without fused
// multiply-adds.
#include <cmath>
#include <cstring>

#include "float16.h"
#include "quant_linear_prepare.h"

namespace enginebay {

void prepare_float_baseline(const QuantLinearLayout& layout, const float* x, int rows, uint8_t* tile) {
  const int64_t features = layout.in_features;
  float* out = reinterpret_cast<float*>(tile);
  if (rows == 1) {
    std::memcpy(out, x, static_cast<size_t>(features) * sizeof(float));
    return;
  }
  constexpr int64_t kStrip = 64;  // of k: source and destination stay in the first-level cache
  for (int64_t begin = 0; begin < features; begin += kStrip) {
    const int64_t end = begin + kStrip < features ? begin + kStrip : features;
    for (int r = 0; r < rows; ++r) {
      for (int64_t k = begin; k < end; ++k) out[k * rows + r] = x[r * features + k];
    }
  }
}

namespace {

template <typename T>
inline T load(const uint8_t* bytes) {
  T value;
  std::memcpy(&value, bytes, sizeof value);
  return value;
}

struct F32 {
  static constexpr size_t kBytes = 4;
  static float load(const uint8_t* value) { return enginebay::load<float>(value); }
};
struct F16 {
  static constexpr size_t kBytes = 2;
  static float load(const uint8_t* value) { return fp16_to_float(enginebay::load<uint16_t>(value)); }
};
struct Bf16 {
  static constexpr size_t kBytes = 2;
  static float load(const uint8_t* value) { return bf16_to_float(enginebay::load<uint16_t>(value)); }
};

struct F8 {
  static constexpr size_t kBytes = 1;
  static float load(const uint8_t* value) {
    return fp16_to_float(static_cast<uint16_t>((*value & 0x80) << 8 | (*value & 0x7f) << 7));
  }
};

int columns_of(const TileTask& task, int64_t panel) {
  const int64_t left = task.columns - panel * kPanel;
  return left < kPanel ? static_cast<int>(left) : kPanel;
}

template <class Format>
void float_tile(const TileTask& task) {
  for (int64_t p = 0; p < task.panel_count; ++p) {
    const uint8_t* panel = task.panels + static_cast<size_t>(p) * task.panel_stride;
    float acc[kTileRows][kPanel] = {};
    for (int64_t k = 0; k < task.depth; ++k) {
      float w[kPanel];
      for (int c = 0; c < kPanel; ++c) {
        w[c] = Format::load(panel + static_cast<size_t>(k * kPanel + c) * Format::kBytes);
      }
      const float* x = reinterpret_cast<const float*>(task.x) + k * task.rows;
      for (int r = 0; r < task.rows; ++r) {
        for (int c = 0; c < kPanel; ++c) acc[r][c] += x[r] * w[c];
      }
    }
    const uint8_t* scales =
        task.scales == nullptr ? nullptr : task.scales + static_cast<size_t>(p) * task.scale_stride;
    for (int r = 0; r < task.rows; ++r) {
      float* y = task.y + r * task.y_stride + p * kPanel;
      for (int c = 0; c < columns_of(task, p); ++c) {
        const float scale = scales == nullptr ? 1.0f : load<float>(scales + 4 * c) * kF8Unshift;
        const float sum = (task.first ? 0.0f : y[c]) + scale * acc[r][c];
        y[c] = task.last && task.bias != nullptr ? sum + task.bias[p * kPanel + c] : sum;
      }
    }
  }
}

template <bool Minimum>
void integer_tile(const TileTask& task) {
  const QuantLinearLayout& layout = *task.layout;
  const int rows = task.rows, groups = layout.block / 4;
  const bool nibbles = layout.format == EB_I4;
  for (int64_t p = 0; p < task.panel_count; ++p) {
    const uint8_t* panel = task.panels + static_cast<size_t>(p) * task.panel_stride;
    const Visit* visits = visits_of(task.x);
    const uint8_t* x = task.x + visits_bytes(layout);
    float acc[kTileRows][kPanel] = {};
    for (int64_t v = 0; v < visit_count(task.x); ++v) {
      const size_t b = static_cast<size_t>(visits[v].block);
      const uint8_t* scales = panel + kAlignment + b * block_scales_bytes(layout);
      const uint8_t* values = panel + layout.values_offset + b * block_values_bytes(layout);
      const uint8_t* x_scales = x + rows * layout.block;
      const uint8_t* x_terms = x_scales + 4 * rows;
      int32_t dot[kTileRows][kPanel];
      for (int r = 0; r < rows; ++r) {
        const int32_t term = Minimum ? 0 : load<int32_t>(x_terms + 4 * r);
        for (int c = 0; c < kPanel; ++c) dot[r][c] = term;
      }
      for (int g = 0; g < groups; ++g) {
        uint8_t w[kPanel * 4];
        for (int i = 0; i < kPanel * 4; ++i) w[i] = nibbles ? (values[i] >> (g % 2 * 4)) & 15 : values[i];
        if (!nibbles || g % 2 == 1) values += kPanel * 4;
        for (int r = 0; r < rows; ++r) {
          const int8_t* q = reinterpret_cast<const int8_t*>(x + 4 * (rows * g + r));
          for (int c = 0; c < kPanel; ++c) {
            dot[r][c] += w[4 * c] * q[0] + w[4 * c + 1] * q[1] + w[4 * c + 2] * q[2] + w[4 * c + 3] * q[3];
          }
        }
      }
      for (int r = 0; r < rows; ++r) {
        const float x_scale = load<float>(x_scales + 4 * r), x_term = load<float>(x_terms + 4 * r);
        for (int c = 0; c < kPanel; ++c) {
          const float scale = fp16_to_float(load<uint16_t>(scales + 2 * c));
          acc[r][c] += scale * x_scale * static_cast<float>(dot[r][c]);
          if (Minimum) acc[r][c] += fp16_to_float(load<uint16_t>(scales + 32 + 2 * c)) * x_term;
        }
      }
      x = x_terms + 4 * rows;
    }
    for (int r = 0; r < rows; ++r) {
      for (int c = 0; c < columns_of(task, p); ++c) {
        const float y = acc[r][c] * load<float>(panel + 4 * c);
        const int64_t column = p * kPanel + c;
        task.y[r * task.y_stride + column] = task.bias != nullptr ? y + task.bias[column] : y;
      }
    }
  }
}

template <class Format>
void widen(const uint8_t* weights, int64_t count, float* out) {
  for (int64_t i = 0; i < count; ++i)
    out[i] = Format::load(weights + static_cast<size_t>(i) * Format::kBytes);
}

struct Scalar {
  static float sum_squares(const float* x, int64_t count) {
    float sum = 0.0f;
    for (int64_t i = 0; i < count; ++i) sum += x[i] * x[i];
    return sum;
  }

  static float largest(const float* x, int count) {
    uint32_t most = 0;  // as integers, NaN comes after infinity and that after the rest
    for (int i = 0; i < count; ++i) {
      const uint32_t bits = float_to_bits(x[i]) & 0x7fffffffu;
      if (bits > most) most = bits;
    }
    return bits_to_float(most);
  }

  static int quantise(const float* x, int count, float inverse, float scale, uint8_t* out, size_t stride,
                      float* rest) {
    int total = 0;
    for (int i = 0; i < count; ++i) {
      const float q = std::nearbyint(x[i] * inverse);
      out[static_cast<size_t>(i / 4) * stride + static_cast<size_t>(i % 4)] =
          static_cast<uint8_t>(static_cast<int>(q));
      // In double the product is exact, as in the other tables' fused operation.
      rest[i] = static_cast<float>(static_cast<double>(x[i]) - static_cast<double>(scale) * q);
      total += static_cast<int>(q);
    }
    return total;
  }
};

void prepare_integer(const QuantLinearLayout& layout, const float* x, int rows, uint8_t* tile) {
  IntegerRows<Scalar>{layout, rows, tile}.prepare(x);
}

}  // namespace

const QuantLinearKernels kQuantLinearBaseline = {
    prepare_float_baseline, float_tile<F32>, float_tile<F16>, float_tile<Bf16>,
    float_tile<F8>,         widen<F16>,      widen<Bf16>,     widen<F8>,
};

const IntegerKernels kIntegerBaseline = {
    "baseline", kTileRows, prepare_integer, integer_tile<false>, integer_tile<false>, integer_tile<true>,
};

}  // namespace enginebay
