"""The parts of a decoder layer as ONNX nodes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from enginebay.export.emitter import Emitter
from enginebay.export.errors import UnsupportedModelError
from enginebay.export.spec import Activation, Attention, Mlp, ModelSpec, Norm


@dataclass(frozen=True)
class StepValues:
    """The inputs that describe one step, as docs/ARCHITECTURE.md lists them.

    Tables and slots by cache group.
    """

    input_ids: ir.Value
    position_ids: ir.Value
    query_start: ir.Value
    kv_len: ir.Value
    logits_index: ir.Value
    block_tables: tuple[ir.Value, ...]
    slot_mappings: tuple[ir.Value, ...]

    def all(self) -> list[ir.Value]:
        tables = [value for pair in zip(self.block_tables, self.slot_mappings, strict=True) for value in pair]
        return [self.input_ids, self.position_ids, self.query_start, self.kv_len, *tables, self.logits_index]


def decoder_layer(
    emit: Emitter,
    spec: ModelSpec,
    index: int,
    hidden: ir.Value,
    *,
    step: StepValues,
    cache: ir.Value,
) -> tuple[ir.Value, ir.Value]:
    """One block: float32 [T, hidden] in and out, and the layer's cache after this step."""
    layer, at = spec.layers[index], f"layers.{index}"
    normed = norm(emit, f"{at}.pre_attention_norm", layer.pre_attention_norm, hidden)
    attended, cache_out = _attention(emit, spec, index, normed, step=step, cache=cache)
    attended = norm(emit, f"{at}.post_attention_norm", layer.post_attention_norm, attended)
    attended = _scaled(emit, f"{at}.attention.scaled", attended, layer.residual_scale)
    if layer.parallel:
        if layer.pre_mlp_norm is not None:
            normed = norm(emit, f"{at}.pre_mlp_norm", layer.pre_mlp_norm, hidden)
        hidden = emit.op(f"{at}.attention.residual", "Add", [attended, hidden])
    else:
        hidden = emit.op(f"{at}.attention.residual", "Add", [attended, hidden])
        normed = norm(emit, f"{at}.pre_mlp_norm", layer.pre_mlp_norm, hidden)
    if not isinstance(layer.mlp, Mlp):
        raise UnsupportedModelError(f"layer {index}: mixture of experts is not exported yet")
    fed = _mlp(emit, f"{at}.mlp", layer.mlp, normed)
    fed = norm(emit, f"{at}.post_mlp_norm", layer.post_mlp_norm, fed)
    fed = _scaled(emit, f"{at}.mlp.scaled", fed, layer.residual_scale)
    return emit.op(f"{at}.mlp.residual", "Add", [fed, hidden]), cache_out


def norm(emit: Emitter, name: str, spec: Norm | None, value: ir.Value) -> ir.Value:
    """Normalises the last axis; None is the identity."""
    if spec is None:
        return value
    weight = emit.weight32(f"{name}.weight")
    if spec.kind == "rms":
        return _shaped(
            emit.op(name, "RMSNormalization", [value, weight], axis=-1, epsilon=spec.epsilon), value
        )
    inputs = [value, weight] + ([emit.weight32(f"{name}.bias")] if spec.bias else [])
    return _shaped(emit.op(name, "LayerNormalization", inputs, axis=-1, epsilon=spec.epsilon), value)


def linear(emit: Emitter, name: str, value: ir.Value) -> ir.Value:
    """value · Wᵀ + bias, where the role `name` has a bias."""
    inputs = [value, emit.weight32(f"{name}.weight")]
    if emit.has(f"{name}.bias"):
        inputs.append(emit.weight32(f"{name}.bias"))
    return emit.op(name, "Gemm", inputs, transB=1)


def activate(emit: Emitter, name: str, kind: Activation, value: ir.Value) -> ir.Value:
    if kind == "silu":
        return emit.op(name, "Swish", [value])
    if kind == "gelu":
        return emit.op(name, "Gelu", [value], approximate="none")
    if kind == "gelu_tanh":
        return emit.op(name, "Gelu", [value], approximate="tanh")
    rectified = emit.op(name, "Relu", [value])
    return rectified if kind == "relu" else emit.op(f"{name}.squared", "Mul", [rectified, rectified])


def int32(value: int) -> NDArray[np.int32]:
    return np.asarray(value, np.int32)


def _attention(
    emit: Emitter, spec: ModelSpec, index: int, value: ir.Value, *, step: StepValues, cache: ir.Value
) -> tuple[ir.Value, ir.Value]:
    attention, group, at = spec.layers[index].attention, spec.group_of(index), f"layers.{index}.attention"
    if not isinstance(attention, Attention):
        raise UnsupportedModelError(f"layer {index}: latent attention is not exported yet")
    qkv = linear(emit, f"{at}.qkv", value)
    if attention.qk_norm == "projection":
        qkv = _projection_norm(emit, at, attention, qkv)
    inputs: dict[str, ir.Value | None] = {
        "qkv": qkv,
        "cache": cache,
        "query_start": step.query_start,
        "kv_len": step.kv_len,
        "block_table": step.block_tables[group],
        "slot_mapping": step.slot_mappings[group],
        "position_ids": step.position_ids,
    }
    if attention.rope is not None:
        inputs["rope_cos"] = emit.weight(f"rope.{attention.rope}.cos")
        inputs["rope_sin"] = emit.weight(f"rope.{attention.rope}.sin")
    if attention.qk_norm == "head":
        inputs["q_norm"] = emit.weight32(f"{at}.q_norm.weight")
        inputs["k_norm"] = emit.weight32(f"{at}.k_norm.weight")
    if attention.sinks:
        inputs["sinks"] = emit.weight32(f"{at}.sinks")
    width = attention.num_heads * attention.head_dim
    attended = ir.Value(
        name=f"{at}.attended", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["T", width])
    )
    cache_out = ir.Value(name=f"cache_out.{index}", type=cache.type, shape=cache.shape)
    emit.custom(
        at,
        "PagedAttention",
        inputs,
        {
            "num_heads": attention.num_heads,
            "num_kv_heads": attention.num_kv_heads,
            "head_dim": attention.head_dim,
            "scale": attention.scale,
            "causal": 1,
            "window": attention.window,
            "softcap": attention.softcap,
            "rope_interleaved": int(attention.rope_interleaved),
            "norm_epsilon": attention.qk_norm_epsilon,
        },
        [attended, cache_out],
    )
    return linear(emit, f"{at}.out", attended), cache_out


def _projection_norm(emit: Emitter, at: str, attention: Attention, qkv: ir.Value) -> ir.Value:
    """Queries and keys normalised over all their heads together (OLMo 2)."""
    queries, keys = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
    q, k, v = emit.split(f"{at}.qkv_split", qkv, [queries, keys, keys])
    kind = Norm("rms", attention.qk_norm_epsilon)
    q, k = norm(emit, f"{at}.q_norm", kind, q), norm(emit, f"{at}.k_norm", kind, k)
    return emit.op(f"{at}.qkv_normed", "Concat", [q, k, v], axis=-1)


def _mlp(emit: Emitter, name: str, mlp: Mlp, value: ir.Value) -> ir.Value:
    if mlp.gated:
        gate_up = linear(emit, f"{name}.gate_up", value)
        gate, up = emit.split(f"{name}.split", gate_up, [mlp.intermediate, mlp.intermediate])
        activated = emit.op(
            f"{name}.gated", "Mul", [activate(emit, f"{name}.activation", mlp.activation, gate), up]
        )
    else:
        activated = activate(emit, f"{name}.activation", mlp.activation, linear(emit, f"{name}.up", value))
    return linear(emit, f"{name}.down", activated)


def _scaled(emit: Emitter, name: str, value: ir.Value, factor: float) -> ir.Value:
    return value if factor == 1.0 else emit.op(name, "Mul", [value, emit.scalar(factor)])


def _shaped(result: ir.Value, like: ir.Value) -> ir.Value:
    result.shape = like.shape
    return result
