"""ModelSpec to the canonical ONNX graph of docs/ARCHITECTURE.md: built node by node, never traced."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from enginebay.export.attention import StepValues
from enginebay.export.blocks import decoder_layer
from enginebay.export.emitter import Emitter
from enginebay.export.nodes import norm
from enginebay.export.spec import CacheGroup, ModelSpec
from enginebay.export.weights import Initializer


def build_graph(spec: ModelSpec, weights: Mapping[str, Initializer]) -> ir.Model:
    """The model with `weights` (by role) as external initializers in `weights.bin`.

    Computes in float32; T, B, W, R, blocks and block_size are symbolic.
    """
    emit = Emitter(weights)
    step = StepValues(
        input_ids=_input("input_ids", "T"),
        position_ids=_input("position_ids", "T"),
        query_start=_input("query_start", "B+1"),
        kv_len=_input("kv_len", "B"),
        logits_index=_input("logits_index", "R"),
        block_tables=tuple(
            _input(f"block_table.{group}", "B", "W") for group in range(len(spec.cache_groups))
        ),
        slot_mappings=tuple(_input(f"slot_mapping.{group}", "T") for group in range(len(spec.cache_groups))),
    )
    caches = [
        ir.Value(
            name=f"cache.{layer}",
            type=ir.TensorType(ir.DataType.FLOAT),
            shape=cache_shape(spec.cache_groups[spec.group_of(layer)]),
        )
        for layer in range(spec.num_layers)
    ]
    hidden = _embed(emit, spec, step)
    cache_outputs = []
    for index, cache in enumerate(caches):
        hidden, cache_out = decoder_layer(emit, spec, index, hidden, step=step, cache=cache)
        cache_outputs.append(cache_out)
    logits = _head(emit, spec, hidden, step)
    return emit.model(
        [*step.all(), *caches],
        [logits, *cache_outputs],
        {
            "enginebay.graph": "canonical",
            "enginebay.family": spec.family,
            "enginebay.architecture": spec.architecture,
        },
    )


def _embed(emit: Emitter, spec: ModelSpec, step: StepValues) -> ir.Value:
    hidden = _rows(emit, "embed", step.input_ids)
    if spec.embedding_scale != 1.0:
        hidden = emit.op("embed.scaled", "Mul", [hidden, emit.scalar(spec.embedding_scale)])
    if spec.learned_positions:
        positions = step.position_ids
        if spec.position_offset:
            offset = emit.constant(np.asarray(spec.position_offset, np.int32))
            positions = emit.op("positions.index", "Add", [positions, offset])
        hidden = emit.op("embed.positioned", "Add", [hidden, _rows(emit, "positions", positions)])
    return hidden


def _rows(emit: Emitter, role: str, ids: ir.Value) -> ir.Value:
    """Rows of an embedding table as float32: gathered first, so that only the rows are cast."""
    weight = emit.weight(f"{role}.weight")
    rows = emit.op(role, "Gather", [weight, ids], axis=0)
    if weight.dtype == ir.DataType.FLOAT:
        return rows
    return emit.op(f"{role}.float", "Cast", [rows], to=int(ir.DataType.FLOAT))


def _head(emit: Emitter, spec: ModelSpec, hidden: ir.Value, step: StepValues) -> ir.Value:
    hidden = emit.op("logits_rows", "Gather", [hidden, step.logits_index], axis=0)
    hidden = norm(emit, "final_norm", spec.final_norm, hidden)
    weight = "embed" if spec.tied_embeddings else "lm_head"
    inputs = [hidden, emit.weight32(f"{weight}.weight")]
    if spec.lm_head_bias:
        inputs.append(emit.weight32("lm_head.bias"))
    logits = emit.op("lm_head", "Gemm", inputs, transB=1)
    if spec.logits_scale != 1.0:
        logits = emit.op("logits.scaled", "Mul", [logits, emit.scalar(spec.logits_scale)])
    if spec.logits_softcap:
        cap = emit.scalar(spec.logits_softcap)
        logits = emit.op("logits.tanh", "Tanh", [emit.op("logits.over_cap", "Div", [logits, cap])])
        logits = emit.op("logits.capped", "Mul", [logits, cap])
    logits.name = "logits"
    logits.type, logits.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(["R", spec.vocab_size])
    return logits


def _input(name: str, *shape: str) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(ir.DataType.INT32), shape=ir.Shape(shape))


def cache_shape(group: CacheGroup) -> ir.Shape:
    """Of a layer's pool: [blocks, 2, block_size, Hkv, D] or [blocks, block_size, D]."""
    shape = group.block_shape(0)
    return ir.Shape(["blocks", *(size if size else "block_size" for size in shape)])
