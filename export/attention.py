"""Attention over the paged cache as ONNX nodes: grouped-query, and multi-head latent."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from enginebay.export.emitter import Emitter
from enginebay.export.nodes import linear, norm
from enginebay.export.spec import Attention, LatentAttention, ModelSpec, Norm


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


def attend(
    emit: Emitter, spec: ModelSpec, index: int, value: ir.Value, *, step: StepValues, cache: ir.Value
) -> tuple[ir.Value, ir.Value]:
    attention, group, at = spec.layers[index].attention, spec.group_of(index), f"layers.{index}.attention"
    if isinstance(attention, LatentAttention):
        return _latent(emit, index, attention, value, _cache_inputs(step, group, cache))
    qkv = linear(emit, f"{at}.qkv", value)
    if attention.qk_norm == "projection":
        qkv = _projection_norm(emit, at, attention, qkv)
    inputs: dict[str, ir.Value | None] = {
        "qkv": qkv,
        **_cache_inputs(step, group, cache),
    }
    if attention.rope is not None:
        inputs["rope_cos"] = emit.weight(f"rope.{attention.rope}.cos")
        inputs["rope_sin"] = emit.weight(f"rope.{attention.rope}.sin")
    if attention.qk_norm == "head":
        inputs["q_norm"] = emit.weight32(f"{at}.q_norm.weight")
        inputs["k_norm"] = emit.weight32(f"{at}.k_norm.weight")
    if attention.sinks:
        inputs["sinks"] = emit.weight32(f"{at}.sinks")
    attended, cache_out = _results(index, attention.num_heads * attention.head_dim, cache)
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


def _latent(
    emit: Emitter, index: int, attention: LatentAttention, value: ir.Value, inputs: dict[str, ir.Value | None]
) -> tuple[ir.Value, ir.Value]:
    """Queries meet the cached latents directly.

    Each head's key projection is applied to its query, and its value projection to what it attended to, so
    that keys and values of single heads never exist.
    """
    at, heads = f"layers.{index}.attention", attention.num_heads
    kind = Norm("rms", attention.norm_epsilon)
    if attention.q_rank:
        low = norm(emit, f"{at}.q_latent_norm", kind, linear(emit, f"{at}.q_down", value))
        query = linear(emit, f"{at}.q_up", low)
    else:
        query = linear(emit, f"{at}.q", value)
    down = linear(emit, f"{at}.kv_down", value)
    latent, rope_key = emit.split(f"{at}.kv_split", down, [attention.kv_rank, attention.rope_dim])
    latent = norm(emit, f"{at}.kv_latent_norm", kind, latent)
    latent = emit.op(f"{at}.latent", "Concat", [latent, rope_key], axis=-1)

    rows = attention.nope_dim + attention.value_dim
    up = _reshape(emit, f"{at}.kv_up", emit.weight32(f"{at}.kv_up.weight"), [heads, rows, attention.kv_rank])
    lengths = emit.constant(np.asarray([attention.nope_dim, attention.value_dim], np.int64))
    key_up, value_up = emit.outputs(f"{at}.kv_up_split", "Split", [up, lengths], 2, axis=1)

    query = _reshape(emit, f"{at}.q_heads", query, [-1, heads, attention.nope_dim + attention.rope_dim])
    plain, turned = emit.split(f"{at}.q_split", query, [attention.nope_dim, attention.rope_dim])
    plain = emit.transpose(f"{at}.q_by_head", plain, [1, 0, 2])
    plain = emit.transpose(
        f"{at}.q_by_token", emit.op(f"{at}.q_absorbed", "MatMul", [plain, key_up]), [1, 0, 2]
    )
    query = emit.op(f"{at}.query_heads", "Concat", [plain, turned], axis=-1)
    width = attention.kv_rank + attention.rope_dim
    query = _reshape(emit, f"{at}.query", query, [-1, heads * width])
    inputs["qkv"] = emit.op(f"{at}.query_latent", "Concat", [query, latent], axis=-1)
    inputs["rope_cos"] = emit.weight(f"rope.{attention.rope}.cos")
    inputs["rope_sin"] = emit.weight(f"rope.{attention.rope}.sin")
    cache = inputs["cache"]
    assert cache is not None
    attended, cache_out = _results(index, heads * attention.kv_rank, cache)
    emit.custom(
        at,
        "PagedAttention",
        inputs,
        {
            "num_heads": heads,
            "num_kv_heads": 1,
            "head_dim": width,
            "latent_dim": attention.kv_rank,
            "scale": attention.scale,
            "rope_interleaved": int(attention.rope_interleaved),
        },
        [attended, cache_out],
    )
    values = _reshape(emit, f"{at}.attended_heads", attended, [-1, heads, attention.kv_rank])
    values = emit.transpose(f"{at}.attended_by_head", values, [1, 0, 2])
    turned_up = emit.transpose(f"{at}.value_up", value_up, [0, 2, 1])
    values = emit.op(f"{at}.values", "MatMul", [values, turned_up])
    values = emit.transpose(f"{at}.values_by_token", values, [1, 0, 2])
    values = _reshape(emit, f"{at}.values_row", values, [-1, heads * attention.value_dim])
    return linear(emit, f"{at}.out", values), cache_out


def _cache_inputs(step: StepValues, group: int, cache: ir.Value) -> dict[str, ir.Value | None]:
    return {
        "cache": cache,
        "query_start": step.query_start,
        "kv_len": step.kv_len,
        "block_table": step.block_tables[group],
        "slot_mapping": step.slot_mappings[group],
        "position_ids": step.position_ids,
    }


def _results(index: int, width: int, cache: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The outputs of an attention op: float32 [T, width] and the cache."""
    attended = ir.Value(
        name=f"layers.{index}.attention.attended",
        type=ir.TensorType(ir.DataType.FLOAT),
        shape=ir.Shape(["T", width]),
    )
    return attended, ir.Value(name=f"cache_out.{index}", type=cache.type, shape=cache.shape)


def _reshape(emit: Emitter, name: str, value: ir.Value, shape: list[int]) -> ir.Value:
    return emit.op(name, "Reshape", [value, emit.constant(np.asarray(shape, np.int64))])
