#include "quant_linear_choice.h"

#include <algorithm>
#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <vector>

#include "cpu_features.h"
#include "status.h"

namespace enginebay {
namespace {

constexpr int64_t kRows[] = {1, 16, 64};  // what is timed
constexpr int kClasses = 3;
constexpr int kTurns = 5;              // the best counts
constexpr double kTurnSeconds = 2e-5;  // at least
constexpr double kWorthwhile = 0.9;    // of the wider kernel's time
constexpr int kCandidates = 3;

int class_of(int64_t rows) { return rows < 8 ? 0 : rows < 32 ? 1 : 2; }

// A layer of random weights and rows of x, prepared and multiplied as eb_quant_linear_run does on one thread.
class Trial {
 public:
  explicit Trial(const QuantLinearLayout& like) : layout_(like) {
    layout_.in_features = 4 * kLargestBlock;
    layout_.panels = 4;
    layout_.out_features = layout_.panels * kPanel;
    layout_.blocks = layout_.in_features / layout_.block;
    layout_.values_offset =
        kAlignment + align_up(static_cast<size_t>(layout_.blocks) * block_scales_bytes(layout_));
    layout_.panel_bytes =
        layout_.values_offset + static_cast<size_t>(layout_.blocks) * block_values_bytes(layout_);
    packed_.resize(packed_bytes(layout_) + kAlignment);
    for (int64_t p = 0; p < layout_.panels; ++p)
      fill(packed() + static_cast<size_t>(p) * layout_.panel_bytes);
    x_.resize(static_cast<size_t>(kRows[kClasses - 1] * layout_.in_features));
    for (float& value : x_) {
      value = static_cast<float>(static_cast<int32_t>(random())) * 0x1p-31f;
      if (random() % 64 == 0) value *= 20.0f;  // an outlier: its block is visited twice
    }
  }

  // y [rows][N]
  std::vector<float> run(const IntegerKernels& kernels, int64_t rows) {
    std::vector<float> y(static_cast<size_t>(rows * layout_.out_features));
    const int64_t height = std::min<int64_t>(rows, kernels.tile_rows);
    tile_.resize(tile_bytes(layout_, static_cast<int>(height)) + kAlignment);
    TileTask task{};
    task.layout = &layout_;
    task.panels = packed();
    task.panel_stride = layout_.panel_bytes;
    task.panel_count = layout_.panels;
    task.columns = task.y_stride = layout_.out_features;
    for (int64_t row = 0; row < rows; row += height) {
      task.rows = static_cast<int>(std::min(height, rows - row));
      task.x = aligned(tile_);
      task.y = y.data() + row * layout_.out_features;
      kernels.prepare(layout_, x_.data() + row * layout_.in_features, task.rows, aligned(tile_));
      const TileKernel kernel = tile_kernel(kernels, layout_);
      kernel(task);
    }
    return y;
  }

  // Seconds a product takes.
  double time(const IntegerKernels& kernels, int64_t rows) {
    using Clock = std::chrono::steady_clock;
    double best = 1e9;
    for (int turn = 0; turn < kTurns; ++turn) {
      const auto begin = Clock::now();
      int calls = 0;
      double spent = 0;
      do {
        run(kernels, rows);
        ++calls;
        spent = std::chrono::duration<double>(Clock::now() - begin).count();
      } while (spent < kTurnSeconds);
      best = std::min(best, spent / calls);
    }
    return best;
  }

 private:
  static uint8_t* aligned(std::vector<uint8_t>& bytes) {
    return reinterpret_cast<uint8_t*>(align_up(reinterpret_cast<size_t>(bytes.data())));
  }
  uint8_t* packed() { return aligned(packed_); }

  uint32_t random() {  // xorshift32
    state_ ^= state_ << 13;
    state_ ^= state_ >> 17;
    return state_ ^= state_ << 5;
  }

  void fill(uint8_t* panel) {
    for (size_t i = 0; i < layout_.panel_bytes; ++i) panel[i] = static_cast<uint8_t>(random() >> 11);
    const float one = 1.0f;
    for (size_t i = 0; i < kAlignment; i += sizeof one) std::memcpy(panel + i, &one, sizeof one);
    // Scales and minimums in [1, 2) and its negatives, as fp16.
    for (size_t i = kAlignment; i < layout_.values_offset; i += 2) {
      panel[i + 1] = static_cast<uint8_t>(0x3c | (panel[i + 1] & 0x83));
    }
  }

  QuantLinearLayout layout_;
  std::vector<uint8_t> packed_, tile_;
  std::vector<float> x_;
  uint32_t state_ = 2463534242u;
};

struct Choice {
  const IntegerKernels* kernels[kClasses];
  char text[256] = "";

  // Candidates come widest first.
  Choice(const QuantLinearLayout& layout, const IntegerKernels* const* candidates, int count) {
    Trial trial(layout);
    const IntegerKernels& reference = *candidates[count - 1];
    bool right[kCandidates];
    for (int i = 0; i < count; ++i) {
      right[i] = true;
      for (const int64_t rows : kRows)
        right[i] &= trial.run(*candidates[i], rows) == trial.run(reference, rows);
      if (!right[i]) say("%s gives other answers and is not used; ", candidates[i]->name);
    }
    for (int c = 0; c < kClasses; ++c) {
      double best = 0;
      kernels[c] = nullptr;
      for (int i = 0; i < count; ++i) {
        if (!right[i]) continue;
        const double time = trial.time(*candidates[i], kRows[c]);
        if (kernels[c] != nullptr && time >= kWorthwhile * best) continue;
        kernels[c] = candidates[i];
        best = time;
      }
    }
    if (std::equal(kernels + 1, kernels + kClasses, kernels)) {
      say("%s", kernels[0]->name);
      return;
    }
    for (int c = 0; c < kClasses; ++c) {
      say("%s%s for %d", c > 0 ? ", " : "", kernels[c]->name, static_cast<int>(kRows[c]));
    }
    say(" rows of x");
  }

  explicit Choice(const IntegerKernels& only) {
    for (auto& each : kernels) each = &only;
    say("%s", only.name);
  }

 private:
  __attribute__((format(printf, 2, 3))) void say(const char* format, ...) {
    const size_t used = std::strlen(text);
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(text + used, sizeof text - used, format, arguments);
    va_end(arguments);
  }
};

Choice make_choice(const CpuFeatures& features, const QuantLinearLayout& layout) {
  if (features.emulate_amx) return Choice(kIntegerEmulated);
  const IntegerKernels* candidates[kCandidates];
  int count = 0;
  if (features.isa >= Isa::kAmx) candidates[count++] = &kIntegerAmx;
  if (features.isa >= Isa::kAvx512Vnni) candidates[count++] = &kIntegerAvx512Vnni;
  if (features.isa >= Isa::kAvx2) candidates[count++] = &kIntegerAvx2;
  if (count == 0) return Choice(kIntegerBaseline);
  if (features.forced || count == 1) return Choice(*candidates[0]);
  return Choice(layout, candidates, count);
}

eb_status choice_of(const eb_context* context, const QuantLinearLayout& layout, const Choice** choice) {
  CpuFeatures features;
  EB_RETURN_IF_ERROR(cpu_features(context, &features));
  constexpr int kKinds = 3, kBlocks = 3;
  static std::once_flag made[kKinds * kBlocks];
  static const Choice* choices[kKinds * kBlocks];
  const int kind = layout.format == EB_I8 ? 0 : layout.minimum ? 2 : 1;
  const int slot = kind * kBlocks + (layout.block == 32 ? 0 : layout.block == 64 ? 1 : 2);
  std::call_once(made[slot], [&] { choices[slot] = new Choice(make_choice(features, layout)); });
  *choice = choices[slot];
  return EB_OK;
}

}  // namespace

eb_status choose_integer(const eb_context* context, const QuantLinearLayout& layout, int64_t rows,
                         const IntegerKernels** kernels) {
  const Choice* choice;
  EB_RETURN_IF_ERROR(choice_of(context, layout, &choice));
  *kernels = choice->kernels[class_of(rows)];
  return EB_OK;
}

}  // namespace enginebay

using namespace enginebay;  // NOLINT: the C entry point below

extern "C" eb_status eb_quant_linear_kernels(const eb_context* context, const eb_quant_linear_desc* desc,
                                             const char** text) {
  QuantLinearLayout layout{};
  EB_RETURN_IF_ERROR(make_layout(context, desc, &layout));
  if (text == nullptr) return fail(context, EB_INVALID_ARGUMENT, "QuantLinear: `text` is NULL");
  if (!layout.integer) {
    return fail(context, EB_UNSUPPORTED, "QuantLinear: kernels of %s weights are not chosen by measurement",
                dtype_name(layout.format));
  }
  const Choice* choice;
  EB_RETURN_IF_ERROR(choice_of(context, layout, &choice));
  *text = choice->text;
  return EB_OK;
}
