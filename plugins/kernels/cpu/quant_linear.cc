// y = x.W^T + bias: checks, the ISA's kernels, and how the work is cut into tasks.
#include <algorithm>

#include "cpu_features.h"
#include "parallel.h"
#include "quant_linear_choice.h"
#include "status.h"

namespace enginebay {
namespace {

// How one product is computed.
struct Kernels {
  PrepareRows prepare;
  TileKernel tile;
  int tile_rows;
  TileKernel f32 = nullptr;      // for weights after `widen`
  WidenWeights widen = nullptr;  // NULL: weights are multiplied as they are stored
};

eb_status choose_kernels(const eb_context* context, const QuantLinearLayout& layout, int64_t rows,
                         Kernels* kernels) {
  if (layout.integer) {
    const IntegerKernels* integer;
    EB_RETURN_IF_ERROR(choose_integer(context, layout, rows, &integer));
    *kernels = {integer->prepare, tile_kernel(*integer, layout), integer->tile_rows};
    return EB_OK;
  }
  CpuFeatures features;
  EB_RETURN_IF_ERROR(cpu_features(context, &features));
  const QuantLinearKernels& table = features.isa >= Isa::kAvx512 ? kQuantLinearAvx512
                                    : features.isa >= Isa::kAvx2 ? kQuantLinearAvx2
                                                                 : kQuantLinearBaseline;
  *kernels = {table.prepare_float, table.f32, kTileRows, table.f32};
  if (layout.format == EB_F16) kernels->tile = table.f16, kernels->widen = table.widen_f16;
  if (layout.format == EB_BF16) kernels->tile = table.bf16, kernels->widen = table.widen_bf16;
  if (layout.format == EB_F8E4M3) kernels->tile = table.f8, kernels->widen = table.widen_f8;
  return EB_OK;
}

// M rows cut into tiles of nearly equal height.
struct Tiles {
  int64_t rows, count;
  size_t bytes;  // of the highest tile

  Tiles(const QuantLinearLayout& layout, int64_t rows_of_x, int most)
      : rows(rows_of_x),
        count((rows_of_x + most - 1) / most),
        bytes(tile_bytes(layout, static_cast<int>((rows_of_x + count - 1) / count))) {}

  int64_t begin(int64_t tile) const { return tile * (rows / count) + std::min(tile, rows % count); }
  int height(int64_t tile) const { return static_cast<int>(begin(tile + 1) - begin(tile)); }
};

// The grid of tasks: groups of panels times runs of tiles. Tasks are small enough that a thread which loses
// its core holds nobody up for long, and large enough that handing them out costs nothing that shows.
struct Grid {
  int64_t panels, tiles;              // of a task
  int64_t panel_groups, tile_groups;  // how many
};

Grid make_grid(const QuantLinearLayout& layout, const Tiles& tiles, unsigned threads) {
  constexpr double kBytesPerNs = 30, kIntegerPerNs = 160, kFloatPerNs = 40;  // of one core
  constexpr double kShortestNs = 2000, kLongestNs = 400000, kTasksPerThread = 8;
  constexpr size_t kCached = 384 << 10;  // bytes of panels that stay near while all tiles pass
  const double products = static_cast<double>(tiles.rows * kPanel * layout.in_features);
  const double panel_ns = std::max(static_cast<double>(layout.panel_bytes) / kBytesPerNs,
                                   products / (layout.integer ? kIntegerPerNs : kFloatPerNs));
  const double total_ns = panel_ns * static_cast<double>(layout.panels);
  Grid grid{layout.panels, tiles.count, 1, 1};
  const double task_ns = std::min(std::max(total_ns / (threads * kTasksPerThread), kShortestNs), kLongestNs);
  if (threads > 1 || tiles.count > 1) {
    // A multiple of the panels that the widest kernels take at a time.
    const int rows = tiles.height(0);
    const int64_t together = layout.integer ? (rows <= 3 ? 1 : 2) : rows == 1 ? 4 : rows > 6 ? 2 : 3;
    int64_t panels = static_cast<int64_t>(task_ns / panel_ns);
    if (tiles.count > 1) panels = std::min(panels, static_cast<int64_t>(kCached / layout.panel_bytes));
    panels = std::max<int64_t>((panels + together - 1) / together, 1) * together;
    grid.panels = std::min(panels, layout.panels);
  }
  grid.panel_groups = (layout.panels + grid.panels - 1) / grid.panels;
  const int64_t wanted = static_cast<int64_t>(threads * kTasksPerThread);
  if (threads > 1 && grid.panel_groups < wanted) {
    const int64_t runs = std::min((wanted + grid.panel_groups - 1) / grid.panel_groups, tiles.count);
    grid.tiles = (tiles.count + runs - 1) / runs;
  }
  grid.tile_groups = (tiles.count + grid.tiles - 1) / grid.tiles;
  return grid;
}

// One product: what every task needs.
struct Run {
  const QuantLinearLayout& layout;
  const Tiles& tiles;
  const Grid& grid;
  const Kernels& kernels;
  const uint8_t* x;  // prepared tiles
  const uint8_t* packed;
  const float* bias;
  float* y;

  void operator()(size_t task) const {
    const int64_t group = static_cast<int64_t>(task) / grid.tile_groups;
    const int64_t run = static_cast<int64_t>(task) % grid.tile_groups;
    const int64_t panel = group * grid.panels, panel_end = std::min(panel + grid.panels, layout.panels);
    const int64_t tile = run * grid.tiles, tile_end = std::min(tile + grid.tiles, tiles.count);
    if (layout.integer) return run_tiles(kernels.tile, part_of(panel, panel_end), 0, tile, tile_end);
    for (int64_t k = 0; k < layout.in_features; k += chunk()) {
      if (kernels.widen != nullptr && tile_end - tile >= kWidenTiles) {
        run_widened(k, panel, panel_end, tile, tile_end);
      } else {
        run_tiles(kernels.tile, chunk_of(part_of(panel, panel_end), k), k, tile, tile_end);
      }
    }
  }

 private:
  static constexpr int64_t kWidenTiles = 8;  // fewer repay neither the stores nor the loads of wide weights

  TileTask part_of(int64_t panel, int64_t panel_end) const {
    const int64_t column = panel * kPanel;
    TileTask part{};
    part.layout = &layout;
    part.panels = packed + static_cast<size_t>(panel) * layout.panel_bytes;
    part.panel_stride = layout.panel_bytes;
    part.panel_count = panel_end - panel;
    part.columns = layout.out_features - column;
    part.y = y + column;
    part.y_stride = layout.out_features;
    part.bias = bias == nullptr ? nullptr : bias + column;
    return part;
  }

  int64_t chunk() const { return layout.block > 0 ? layout.block : kChunk; }

  // The part's chunk of K that begins at k.
  TileTask chunk_of(TileTask part, int64_t k) const {
    if (layout.block > 0) {
      part.scales = part.panels + static_cast<size_t>(k / layout.block) * kPanel * sizeof(float);
      part.scale_stride = layout.panel_bytes;
    }
    part.panels += layout.values_offset + static_cast<size_t>(k * kPanel) * weight_bytes(layout);
    part.depth = std::min(chunk(), layout.in_features - k);
    part.first = k == 0;
    part.last = k + part.depth == layout.in_features;
    return part;
  }

  void run_tiles(TileKernel multiply, const TileTask& part, int64_t k, int64_t tile, int64_t tile_end) const {
    for (; tile < tile_end; ++tile) {
      TileTask task = part;
      task.rows = tiles.height(tile);
      task.x =
          x + static_cast<size_t>(tile) * tiles.bytes + static_cast<size_t>(k * task.rows) * sizeof(float);
      task.y += tiles.begin(tile) * layout.out_features;
      multiply(task);
    }
  }

  void run_widened(int64_t k, int64_t panel, int64_t panel_end, int64_t tile, int64_t tile_end) const {
    constexpr int64_t kPanels = 6;  // at a time: 192 KiB, a multiple of what a kernel takes
    alignas(kAlignment) float wide[kPanels * kChunk * kPanel];
    for (int64_t p = panel; p < panel_end; p += kPanels) {
      TileTask part = chunk_of(part_of(p, std::min(p + kPanels, panel_end)), k);
      const int64_t weights = part.depth * kPanel;
      for (int64_t i = 0; i < part.panel_count; ++i) {
        kernels.widen(part.panels + static_cast<size_t>(i) * part.panel_stride, weights, wide + i * weights);
      }
      part.panels = reinterpret_cast<const uint8_t*>(wide);
      part.panel_stride = static_cast<size_t>(weights) * sizeof(float);
      run_tiles(kernels.f32, part, k, tile, tile_end);
    }
  }
};

size_t workspace_bytes_of(const QuantLinearLayout& layout, int64_t rows) {
  if (rows == 0) return 0;
  size_t most = 0;  // whichever kernels are chosen
  for (const int tile_rows : {kTileRows, layout.integer ? kMostTileRows : kTileRows}) {
    const Tiles tiles(layout, rows, tile_rows);
    most = std::max(most, tiles.bytes * static_cast<size_t>(tiles.count));
  }
  return most;
}

eb_status check_workspace(const eb_context* context, size_t needed, const void* workspace, size_t bytes) {
  EB_RETURN_IF_ERROR(check_pointer(context, "workspace", workspace, kPointerAlignment));
  if (bytes >= needed) return EB_OK;
  return fail(
      context, EB_INVALID_ARGUMENT,
      "QuantLinear: the workspace has %zu bytes, but this call needs %zu; ask workspace_size with the same "
      "rows",
      bytes, needed);
}

}  // namespace
}  // namespace enginebay

using namespace enginebay;

extern "C" eb_status eb_quant_linear_workspace_size(const eb_context* context,
                                                    const eb_quant_linear_desc* desc, int64_t rows,
                                                    size_t* workspace_bytes) {
  QuantLinearLayout layout{};
  EB_RETURN_IF_ERROR(make_layout(context, desc, &layout));
  EB_RETURN_IF_ERROR(check_rows(context, layout, rows));
  if (workspace_bytes == nullptr) {
    return fail(context, EB_INVALID_ARGUMENT, "QuantLinear: `workspace_bytes` is NULL");
  }
  *workspace_bytes = workspace_bytes_of(layout, rows);
  return EB_OK;
}

extern "C" eb_status eb_quant_linear_run(const eb_context* context, const eb_quant_linear_desc* desc,
                                         int64_t rows, const void* x, const void* packed, size_t packed_bytes,
                                         const float* bias, void* y, void* workspace,
                                         size_t workspace_bytes) {
  QuantLinearLayout layout{};
  EB_RETURN_IF_ERROR(make_layout(context, desc, &layout));
  EB_RETURN_IF_ERROR(check_rows(context, layout, rows));
  EB_RETURN_IF_ERROR(check_packed(context, layout, packed, packed_bytes));
  if (rows == 0) return EB_OK;
  EB_RETURN_IF_ERROR(check_pointer(context, "x", x, alignof(float)));
  EB_RETURN_IF_ERROR(check_pointer(context, "y", y, alignof(float)));
  if (bias != nullptr) EB_RETURN_IF_ERROR(check_pointer(context, "bias", bias, alignof(float)));
  EB_RETURN_IF_ERROR(check_workspace(context, workspace_bytes_of(layout, rows), workspace, workspace_bytes));
  Kernels kernels;
  EB_RETURN_IF_ERROR(choose_kernels(context, layout, rows, &kernels));

  const Tiles tiles(layout, rows, kernels.tile_rows);
  uint8_t* prepared = static_cast<uint8_t*>(workspace);
  constexpr int64_t kPrepareAtOnce = 4096;  // values of x, some 1.3 us
  const int64_t tile_values = tiles.height(0) * layout.in_features;
  const int64_t step = std::max<int64_t>(kPrepareAtOnce / tile_values, 1);  // tiles of a task
  parallel_for(context, static_cast<size_t>((tiles.count + step - 1) / step), [&](size_t task) {
    const int64_t begin = static_cast<int64_t>(task) * step, end = std::min(begin + step, tiles.count);
    for (int64_t tile = begin; tile < end; ++tile) {
      kernels.prepare(layout, static_cast<const float*>(x) + tiles.begin(tile) * layout.in_features,
                      tiles.height(tile), prepared + static_cast<size_t>(tile) * tiles.bytes);
    }
  });

  const Grid grid = make_grid(layout, tiles, thread_count(context));
  const Run run{layout,   tiles,
                grid,     kernels,
                prepared, static_cast<const uint8_t*>(packed),
                bias,     static_cast<float*>(y)};
  parallel_for(context, static_cast<size_t>(grid.panel_groups * grid.tile_groups), run);
  return EB_OK;
}
