"""Engines without kernels: a packing library whose bytes can be read back, and ONNX's own evaluator over
plugins/reference.py. Slow, and derived from no kernel."""

from __future__ import annotations

from typing import Any

import numpy as np
from ml_dtypes import bfloat16, float8_e4m3fn
from numpy.typing import NDArray
from onnx.reference.op_run import OpRun
from tiny_llama import TinyLlama

from enginebay.builder.quant.formats import WeightFormat
from enginebay.builder.quant.rtn import QuantizedRows
from enginebay.plugins import ops, reference

MODEL = TinyLlama(hidden=64, inner=128, heads=4, kv_heads=2, head_dim=16, layers=2, vocab=128)
KV_HEADS, VOCAB, LAYERS = MODEL.kv_heads, MODEL.vocab, MODEL.layers
DTYPES = {
    "f32": np.float32,
    "f16": np.float16,
    "bf16": bfloat16,
    "f8": float8_e4m3fn,
    "i8": np.int8,
    "i4": np.uint8,
}


class PlainLibrary:
    """Packs a row's values, scales and minimums side by side."""

    sha256 = "0" * 64

    def packed_bytes(self, fmt: WeightFormat, shape: tuple[int, int]) -> int:
        rows, columns = shape
        blocks = 0 if fmt.is_float else columns // fmt.scale_block(columns)
        width = np.dtype(DTYPES[fmt.kind]).itemsize
        return rows * (columns * width + 4 * blocks * (1 if fmt.symmetric else 2))

    def layout(self, fmt: WeightFormat, shape: tuple[int, int]) -> str:
        return f"plain-{fmt.kind}@1"

    def pack(self, weights: QuantizedRows) -> NDArray[np.uint8]:
        parts = [weights.values, weights.scales, weights.minimums]
        flat = [np.ascontiguousarray(p).view(np.uint8).reshape(len(p), -1) for p in parts if p is not None]
        return np.concatenate(flat, axis=1).reshape(-1)


def unpack(packed: NDArray[np.uint8], attributes: dict[str, Any]) -> NDArray[np.float64]:
    """Weights [N, K] out of PlainLibrary's bytes."""
    rows, columns = attributes["out_features"], attributes["in_features"]
    block, dtype = attributes["block_size"], np.dtype(DTYPES[attributes["format"]])
    table = packed.reshape(rows, -1)
    values = np.ascontiguousarray(table[:, : columns * dtype.itemsize]).view(dtype)
    if not block:
        return reference.dequantise(values, None, None, attributes["format"])
    rest = np.ascontiguousarray(table[:, columns * dtype.itemsize :]).view(np.float32).astype(np.float64)
    scales, minimums = rest[:, : columns // block], rest[:, columns // block :]
    return reference.dequantise(
        values, scales, None if attributes["symmetric"] else minimums, attributes["format"]
    )


class QuantLinear(OpRun):
    op_domain = "enginebay"

    def _run(self, x: Any, packed: Any, bias: Any = None, **attributes: Any) -> tuple[Any]:
        return (reference.quant_linear(x, unpack(packed, attributes), bias).astype(np.float32),)


class QuantLinearF8Inputs(OpRun):
    op_domain = "enginebay"

    def _run(
        self,
        x: Any,
        packed: Any,
        bias: Any = None,
        repeated: Any = None,
        input_scale: float = 0.0,
        **attributes: Any,
    ) -> tuple[Any]:
        twice = () if repeated is None else repeated
        rounded = reference.f8_inputs(x.astype(np.float64), input_scale, twice)
        return (reference.quant_linear(rounded, unpack(packed, attributes), bias).astype(np.float32),)


class Embedding(OpRun):
    op_domain = "enginebay"

    def _run(self, ids: Any, packed: Any, **attributes: Any) -> tuple[Any]:
        return (reference.embedding(ids, unpack(packed, attributes)).astype(np.float32),)


class AddRMSNorm(OpRun):
    op_domain = "enginebay"

    def _run(self, x: Any, residual: Any, weight: Any, epsilon: float = 1e-6) -> tuple[Any, Any]:
        y, total = reference.add_rms_norm(x.astype(float), residual.astype(float), weight, epsilon)
        return y.astype(np.float32), total.astype(np.float32)


class GatedActivation(OpRun):
    op_domain = "enginebay"

    def _run(self, gate_up: Any, activation: str = "") -> tuple[Any]:
        return (reference.gated_activation(gate_up.astype(float), activation).astype(np.float32),)


class LayerTail(OpRun):
    op_domain = "enginebay"

    def _run(self, x: Any, residual: Any, *constants: Any, **attributes: Any) -> tuple[Any, Any]:
        mlp_norm, next_norm, *packed = constants[:6]
        biases = [*constants[6:], None, None, None, None][:4]
        a, i = attributes, attributes["intermediate"]
        shapes = ((a["hidden"], a["attended"]), (2 * i, a["hidden"]), (a["hidden"], i))
        weights = []
        for name, bits, (n, k) in zip(
            ops.TAIL_PRODUCTS, packed, (*shapes, (a["next_features"], a["hidden"])), strict=True
        ):
            keys = ("format", "block_size", "symmetric")
            layer = {key: a[f"{name}_{key}"] for key in keys} | {"out_features": n, "in_features": k}
            weights.append(unpack(bits, layer))
        y, total = reference.layer_tail(
            *(x.astype(float), residual.astype(float), (mlp_norm, next_norm), weights, biases),
            name=a["activation"],
            epsilons=(a["mlp_epsilon"], a["next_epsilon"]),
        )
        return y.astype(np.float32), total.astype(np.float32)


class PagedAttention(OpRun):
    op_domain = "enginebay"

    def _run(self, *arrays: Any, **attributes: Any) -> tuple[Any, Any]:
        names = [param.name for param in ops.PAGED_ATTENTION.inputs]
        named = dict(zip(names, arrays, strict=False))
        attention, cache = reference.paged_attention(**named, **attributes)
        return attention.astype(np.float32), cache


OPS = [QuantLinear, QuantLinearF8Inputs, Embedding, AddRMSNorm, GatedActivation, LayerTail, PagedAttention]


def ragged_step(rng: np.random.Generator, vocab: int, rows: list[int]) -> dict[str, NDArray[Any]]:
    """A step of three fresh sequences of 5, 1 and 9 tokens in blocks of 4; `rows` need logits."""
    lengths = [5, 1, 9]
    blocks = [[7, 2], [0], [5, 3, 1]]
    slots = [blocks[s][p // 4] * 4 + p % 4 for s, n in enumerate(lengths) for p in range(n)]
    return {
        "input_ids": rng.integers(0, vocab, sum(lengths)).astype(np.int32),
        "position_ids": np.concatenate([np.arange(n) for n in lengths]).astype(np.int32),
        "query_start": np.cumsum([0, *lengths]).astype(np.int32),
        "kv_len": np.array(lengths, np.int32),
        "block_table.0": np.array([[*b, 0, 0][:3] for b in blocks], np.int32),
        "slot_mapping.0": np.array(slots, np.int32),
        "logits_index": np.array(rows, np.int32),
    }
