"""ModelSpec: what a decoder is, as plain frozen data.

A family (`enginebay.export.families`) makes one from an HF config; the graph, the weights' plan, the
builder and the manifest read nothing else. `to_json` and `from_json` round-trip exactly; a document of
another schema or with unknown keys is refused.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import Literal

from enginebay.export.spec_json import SpecError, decode

SCHEMA = 1

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]
RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]


@dataclass(frozen=True)
class Norm:
    """RMS or layer normalisation over the last axis. The stored weight is what multiplies (no 1+w left)."""

    kind: Literal["rms", "layer"]
    epsilon: float
    bias: bool = False


@dataclass(frozen=True)
class Rope:
    """One RoPE table: `rotary_dim` of each head turned by position·frequency, cos and sin times
    `attention_factor`.

    `short_factors` and `long_factors` (longrope) divide the frequencies, one value per pair. Kinds with a
    switch (longrope, dynamic) hold two tables, see `ModelSpec.rope_switch`.
    """

    kind: RopeKind
    theta: float
    rotary_dim: int
    factor: float = 1.0
    original_positions: int = 0
    attention_factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    @property
    def switches(self) -> bool:
        """Whether sequences longer than `original_positions` read another table."""
        return self.kind in ("longrope", "dynamic")


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention over the paged cache. `rope` indexes ModelSpec.ropes; None: no positions here.

    qk_norm `head`: one weight [head_dim] for every head; `projection`: one over all heads together (before
    RoPE both).
    """

    type: Literal["attention"]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: int | None = 0
    rope_interleaved: bool = False
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    qk_norm: Literal["none", "head", "projection"] = "none"
    qk_norm_epsilon: float = 1e-6
    qkv_bias: bool = False
    out_bias: bool = False


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2): the cache holds one latent and one rotary key for all heads.

    `q_rank` 0: queries come from one projection, else from a low-rank pair with a norm between.
    """

    type: Literal["latent_attention"]
    num_heads: int
    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    scale: float
    norm_epsilon: float
    rope: int = 0
    rope_interleaved: bool = True
    bias: bool = False


@dataclass(frozen=True)
class Mlp:
    """Feed-forward block; gated: activation(gate)·up."""

    type: Literal["mlp"]
    intermediate: int
    activation: Activation
    gated: bool = True
    up_bias: bool = False
    down_bias: bool = False


@dataclass(frozen=True)
class Moe:
    """Mixture of experts, each a gated MLP of width `intermediate`.

    Routing, in fp32: scores = softmax or sigmoid of the router's logits; `correction_bias` is added for the
    choice only; with `groups` > 1 only the best `top_groups` groups compete (a group's worth: its best
    score, or with a correction bias the sum of its two best); the top_k scores, divided by their sum where
    `normalise`, times `scale`, weigh the experts. `softmax_topk`: softmax over the chosen logits. `clamp` >
    0: gate is clamped from above and up on both sides, then (up+1)·gate·sigmoid(clamp_alpha·gate).
    """

    type: Literal["moe"]
    num_experts: int
    top_k: int
    intermediate: int
    activation: Activation
    routing: Literal["softmax", "sigmoid", "softmax_topk"]
    normalise: bool
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    correction_bias: bool = False
    router_bias: bool = False
    expert_bias: bool = False
    clamp: float = 0.0
    clamp_alpha: float = 1.702
    shared: Mlp | None = None
    shared_gate: bool = False


@dataclass(frozen=True)
class Traced:
    """What a traced graph holds beside attention; there is no description of it."""

    type: Literal["traced"]


@dataclass(frozen=True)
class Layer:
    """One decoder block.

    x += residual_scale · post_attention_norm(attention(pre_attention_norm(x))), the same with the MLP;
    absent norms are the identity. `parallel`: both read the block's input and are added together; without
    pre_mlp_norm the MLP reads what the attention reads.
    """

    attention: Attention | LatentAttention
    mlp: Mlp | Moe | Traced
    pre_attention_norm: Norm | None = None
    post_attention_norm: Norm | None = None
    pre_mlp_norm: Norm | None = None
    post_mlp_norm: Norm | None = None
    parallel: bool = False
    residual_scale: float = 1.0


@dataclass(frozen=True)
class CacheGroup:
    """Layers whose caches share a block table.

    A `paged` block is [2, block_size, kv_heads, head_dim]; a `latent` block [block_size, head_dim], where
    head_dim is rank + rope. `window` and `state` are reserved for groups that free blocks on their own and
    for recurrent layers.
    """

    kind: Literal["paged", "latent", "window", "state"]
    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int

    def block_shape(self, block_size: int) -> tuple[int, ...]:
        """Shape of one block of `block_size` tokens; the pool of a layer is [blocks, *block_shape]."""
        if self.kind == "latent":
            return (block_size, self.head_dim)
        return (2, block_size, self.kv_heads, self.head_dim)


@dataclass(frozen=True)
class CacheScales:
    """What the checkpoint divides a layer's keys and values by for an FP8 cache: one scale, or one a head."""

    layer: int
    keys: tuple[float, ...]
    values: tuple[float, ...]


@dataclass(frozen=True)
class ModelSpec:
    """A decoder. Logits = softcap(logits_scale · head(final_norm(x))); embeddings are multiplied by
    `embedding_scale`.

    `learned_positions` > 0: rows of a learned position table added to the embeddings (row = position +
    offset).
    """

    family: str
    architecture: str
    vocab_size: int
    hidden_size: int
    max_positions: int
    layers: tuple[Layer, ...]
    final_norm: Norm
    cache_groups: tuple[CacheGroup, ...]
    ropes: tuple[Rope, ...] = ()
    tied_embeddings: bool = False
    lm_head_bias: bool = False
    embedding_scale: float = 1.0
    learned_positions: int = 0
    position_offset: int = 0
    logits_scale: float = 1.0
    logits_softcap: float = 0.0
    cache_scales: tuple[CacheScales, ...] = ()
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        _check(self)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def rope_switch(self) -> int:
        """Longest sequence that reads the first RoPE table; 0: there is one table.

        Where it is not 0 the tables hold `rope_switch` short rows, then `max_positions` long rows: a
        sequence longer than `rope_switch` adds `rope_switch` to its position_ids and recomputes its whole
        cache when it crosses.
        """
        return next((rope.original_positions for rope in self.ropes if rope.switches), 0)

    def group_of(self, layer: int) -> int:
        """Index of the cache group that holds `layer`."""
        for index, group in enumerate(self.cache_groups):
            if layer in group.layers:
                return index
        raise SpecError(f"layer {layer} is in no cache group")

    def to_json(self) -> str:
        """Two-space indented JSON; `from_json` gives the same spec back."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @staticmethod
    def from_json(text: str) -> ModelSpec:
        """Raises SpecError for another schema, unknown or missing keys and wrong types."""
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise SpecError(f"spec is not JSON: {error}") from error
        found = document.get("schema") if isinstance(document, dict) else None
        if found != SCHEMA:
            raise SpecError(f"spec has schema {found!r}, this version reads {SCHEMA}: export the model again")
        spec = decode(ModelSpec, document, "spec")
        assert isinstance(spec, ModelSpec)
        return spec


def paged_group(layers: tuple[Layer, ...]) -> tuple[CacheGroup, ...]:
    """The one cache group of a model whose layers all have the same head counts and sizes."""
    shapes: set[tuple[Literal["paged", "latent"], int, int]] = set()
    for layer in layers:
        attention = layer.attention
        if isinstance(attention, Attention):
            shapes.add(("paged", attention.num_kv_heads, attention.head_dim))
        else:
            shapes.add(("latent", 1, attention.kv_rank + attention.rope_dim))
    if len(shapes) != 1:
        raise SpecError(
            f"layers need caches of different shapes, one group holds one shape: {sorted(shapes)}"
        )
    kind, kv_heads, head_dim = shapes.pop()
    return (CacheGroup(kind, tuple(range(len(layers))), kv_heads, head_dim),)


def _check(spec: ModelSpec) -> None:
    """Raises SpecError naming the first field that makes no sense."""

    def need(condition: bool, message: str) -> None:
        if not condition:
            raise SpecError(message)

    for name in ("vocab_size", "hidden_size", "max_positions"):
        size = getattr(spec, name)
        need(0 < size < 2**31, f"{name} is {size}, must be positive and less than 2^31")
    need(len(spec.layers) > 0, "the model has no layers")
    need(
        sorted(layer for group in spec.cache_groups for layer in group.layers)
        == list(range(len(spec.layers))),
        f"cache groups {[group.layers for group in spec.cache_groups]} must hold each of "
        f"{len(spec.layers)} layers once",
    )
    for rope in spec.ropes:
        need(rope.rotary_dim > 0 and rope.rotary_dim % 2 == 0, f"rotary_dim {rope.rotary_dim} must be even")
        need(rope.theta > 0 and math.isfinite(rope.theta), f"rope theta {rope.theta} must be positive")
        pairs = rope.rotary_dim // 2
        if rope.kind == "longrope":
            for label, factors in (("short", rope.short_factors), ("long", rope.long_factors)):
                need(
                    len(factors) == pairs,
                    f"longrope {label}_factor has {len(factors)} values, rotary_dim {rope.rotary_dim} "
                    f"needs {pairs}",
                )
        if rope.switches:
            need(
                0 < rope.original_positions <= spec.max_positions,
                f"{rope.kind} rope switches at {rope.original_positions}, outside 1..{spec.max_positions}",
            )
            need(
                all(
                    other.switches and other.original_positions == rope.original_positions
                    for other in spec.ropes
                ),
                "rope tables that switch must all switch at the same length",
            )
    for index, layer in enumerate(spec.layers):
        where = f"layer {index}"
        attention, mlp = layer.attention, layer.mlp
        if attention.rope is not None:
            need(
                0 <= attention.rope < len(spec.ropes),
                f"{where} names rope {attention.rope} of {len(spec.ropes)}",
            )
        if isinstance(attention, Attention):
            heads, kv_heads = attention.num_heads, attention.num_kv_heads
            need(
                kv_heads > 0 and heads > 0 and heads % kv_heads == 0,
                f"{where}: {heads} heads are not a multiple of {kv_heads} key/value heads",
            )
            need(attention.head_dim > 0, f"{where}: head_dim is {attention.head_dim}")
            need(attention.window >= 0, f"{where}: window is {attention.window}")
            if attention.rope is not None:
                rotary = spec.ropes[attention.rope].rotary_dim
                need(
                    rotary <= attention.head_dim,
                    f"{where}: rotary_dim {rotary} > head_dim {attention.head_dim}",
                )
        if not isinstance(mlp, Traced):
            need(mlp.intermediate > 0, f"{where}: intermediate size is {mlp.intermediate}")
        if isinstance(mlp, Moe):
            need(
                0 < mlp.top_k <= mlp.num_experts,
                f"{where}: top_k {mlp.top_k} of {mlp.num_experts} experts",
            )
            need(
                0 < mlp.top_groups <= mlp.groups and mlp.num_experts % mlp.groups == 0,
                f"{where}: {mlp.top_groups} of {mlp.groups} groups of {mlp.num_experts} experts",
            )
