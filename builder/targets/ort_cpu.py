"""ort-cpu: ONNX Runtime on the CPU with EngineBay's kernel library."""

from __future__ import annotations

from functools import cached_property
from typing import ClassVar

import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass

from enginebay.builder.lower.add_rms_norm import fuse_add_rms_norm
from enginebay.builder.lower.cache import set_cache_layout
from enginebay.builder.lower.embedding import lower_embeddings
from enginebay.builder.lower.fold_casts import fold_casts
from enginebay.builder.lower.gated_activation import fuse_gated_activation
from enginebay.builder.lower.graph import RewriteReport, remove_dead, through_cast
from enginebay.builder.lower.head_products import pad_head_products
from enginebay.builder.lower.layer_tail import fuse_layer_tails
from enginebay.builder.lower.moe import lower_moe
from enginebay.builder.lower.quant_linear import lower_linears
from enginebay.builder.lower.select_rows import select_rows_early
from enginebay.builder.manifest import TargetRecord
from enginebay.builder.packing import WeightPacker
from enginebay.builder.packing_library import CpuPackingLibrary
from enginebay.builder.targets.base import CacheLayout, PluginLibrary, TargetError
from enginebay.plugins import ops

# What may remain beside our own ops: cheap, and computed row by row in float32.
STANDARD_OPS = frozenset(
    {
        "RMSNormalization",
        "LayerNormalization",
        "Gather",
        "Add",
        "Sub",
        "Mul",
        "Div",
        "Tanh",
        "Sigmoid",
        "Swish",
    }
    | {"Gelu", "Relu", "Split", "Concat", "Cast", "Reshape", "Transpose", "MatMul", "Pad", "Slice"}
)


class OrtCpu:
    """Every product of rows with weights becomes QuantLinear; norms, activations and lookups are fused."""

    name: ClassVar[str] = "ort-cpu"

    @cached_property
    def record(self) -> TargetRecord:
        import onnxruntime  # type: ignore[import-untyped]

        return TargetRecord(self.name, "onnxruntime", onnxruntime.__version__)

    @cached_property
    def plugins(self) -> PluginLibrary:
        return CpuPackingLibrary()

    def lower(self, model: ir.Model, packer: WeightPacker, cache: CacheLayout) -> list[RewriteReport]:
        graph = model.graph
        ShapeInferencePass()(model)
        reports = [
            select_rows_early(graph),
            lower_linears(graph, packer),
            lower_embeddings(graph, packer),
            lower_moe(graph, packer),
            pad_head_products(graph),
            fold_casts(graph),
            fuse_gated_activation(graph),
            fuse_add_rms_norm(graph),
            set_cache_layout(graph, cache.format, cache.block_size, cache.constants),
        ]
        remove_dead(graph)
        reports.append(fuse_layer_tails(graph))  # what is dead must not seem to be read
        # A traced graph computes RoPE, norms and whatever else its model does with standard ops.
        traced = model.metadata_props.get("enginebay.exporter") == "traced"
        _check_runnable(graph, reports, any_standard=traced)
        return reports


def _check_runnable(graph: ir.Graph, reports: list[RewriteReport], *, any_standard: bool) -> None:
    """TargetError listing every node that this target has no kernel for, with what the rewrites said of
    it."""
    ours = {op.name for op in ops.OPS}
    said = {miss.node: f"{report.rewrite}: {miss.reason}" for report in reports for miss in report.misses}
    stuck = []
    for node in graph:
        if node.domain == ops.DOMAIN:
            runnable = node.op_type in ours
        else:
            runnable = any_standard or node.op_type in STANDARD_OPS
        wide_cast = node.op_type == "Cast" and through_cast(node.outputs[0]) is not node.outputs[0]
        if not runnable or node.domain not in ("", ops.DOMAIN) or wide_cast:
            domain = f"{node.domain}::" if node.domain else ""
            stuck.append(
                f"{node.name} ({domain}{node.op_type}): {said.get(node.name or '', 'no kernel for it')}"
            )
    if stuck:
        raise TargetError(
            f"{len(stuck)} nodes cannot run on {OrtCpu.name}: "
            + "; ".join(stuck[:5])
            + (" …" if stuck[5:] else "")
        )
