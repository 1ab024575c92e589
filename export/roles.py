"""Which weights a ModelSpec needs: roles with shapes, before any checkpoint's names."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from enginebay.export.spec import Attention, LatentAttention, Mlp, ModelSpec, Moe, Norm

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Role:
    """A weight of the graph. `parts` are concatenated along axis 0; with `experts` the whole is stacked
    that often.

    `key` is the name a family maps to checkpoint tensors; `layer` fills its templates. `head_dim` is that
    of a qkv role.
    """

    key: str
    layer: int | None
    parts: tuple[Shape, ...]
    experts: int = 0
    head_dim: int = 0

    @property
    def name(self) -> str:
        return self.key if self.layer is None else f"layers.{self.layer}.{self.key}"

    @property
    def fused(self) -> Shape:
        """Shape of the parts after concatenation, without experts."""
        return (sum(part[0] for part in self.parts), *self.parts[0][1:])

    @property
    def shape(self) -> Shape:
        return (self.experts, *self.fused) if self.experts else self.fused

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def required(spec: ModelSpec) -> Iterator[Role]:
    """Every weight of the model, in the order of the graph. A tied head is not among them."""
    hidden = spec.hidden_size
    yield Role("embed.weight", None, ((spec.vocab_size, hidden),))
    if spec.learned_positions:
        yield Role("positions.weight", None, ((spec.learned_positions, hidden),))
    for index, layer in enumerate(spec.layers):
        yield from _norm("pre_attention_norm", index, layer.pre_attention_norm, hidden)
        if isinstance(layer.attention, Attention):
            yield from _attention(layer.attention, index, hidden)
        else:
            yield from _latent(layer.attention, index, hidden)
        yield from _norm("post_attention_norm", index, layer.post_attention_norm, hidden)
        yield from _norm("pre_mlp_norm", index, layer.pre_mlp_norm, hidden)
        if isinstance(layer.mlp, Mlp):
            yield from _mlp("mlp", index, layer.mlp, hidden)
        elif isinstance(layer.mlp, Moe):
            yield from _moe(layer.mlp, index, hidden)
        yield from _norm("post_mlp_norm", index, layer.post_mlp_norm, hidden)
    yield from _norm("final_norm", None, spec.final_norm, hidden)
    if not spec.tied_embeddings:
        yield Role("lm_head.weight", None, ((spec.vocab_size, hidden),))
    if spec.lm_head_bias:
        yield Role("lm_head.bias", None, ((spec.vocab_size,),))


def _norm(key: str, layer: int | None, norm: Norm | None, size: int) -> Iterator[Role]:
    if norm is not None:
        yield Role(f"{key}.weight", layer, ((size,),))
    if norm is not None and norm.bias:
        yield Role(f"{key}.bias", layer, ((size,),))


def _linear(
    key: str, layer: int, rows: tuple[int, ...], columns: int, *, bias: bool, head_dim: int = 0
) -> Iterator[Role]:
    yield Role(f"{key}.weight", layer, tuple((count, columns) for count in rows), head_dim=head_dim)
    if bias:
        yield Role(f"{key}.bias", layer, tuple((count,) for count in rows), head_dim=head_dim)


def _attention(attention: Attention, layer: int, hidden: int) -> Iterator[Role]:
    queries, keys = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
    yield from _linear(
        "attention.qkv",
        layer,
        (queries, keys, keys),
        hidden,
        bias=attention.qkv_bias,
        head_dim=attention.head_dim,
    )
    if attention.qk_norm != "none":
        per_head = attention.qk_norm == "head"
        yield Role("attention.q_norm.weight", layer, ((attention.head_dim if per_head else queries,),))
        yield Role("attention.k_norm.weight", layer, ((attention.head_dim if per_head else keys,),))
    if attention.sinks:
        yield Role("attention.sinks", layer, ((attention.num_heads,),))
    yield from _linear("attention.out", layer, (hidden,), queries, bias=attention.out_bias)


def _latent(attention: LatentAttention, layer: int, hidden: int) -> Iterator[Role]:
    queries = attention.num_heads * (attention.nope_dim + attention.rope_dim)
    if attention.q_rank:
        yield from _linear("attention.q_down", layer, (attention.q_rank,), hidden, bias=attention.bias)
        yield Role("attention.q_latent_norm.weight", layer, ((attention.q_rank,),))
        yield from _linear("attention.q_up", layer, (queries,), attention.q_rank, bias=False)
    else:
        yield from _linear("attention.q", layer, (queries,), hidden, bias=False)
    yield from _linear(
        "attention.kv_down", layer, (attention.kv_rank + attention.rope_dim,), hidden, bias=attention.bias
    )
    yield Role("attention.kv_latent_norm.weight", layer, ((attention.kv_rank,),))
    rows = attention.num_heads * (attention.nope_dim + attention.value_dim)
    yield from _linear("attention.kv_up", layer, (rows,), attention.kv_rank, bias=False)
    columns = attention.num_heads * attention.value_dim
    yield from _linear("attention.out", layer, (hidden,), columns, bias=attention.bias)


def _mlp(key: str, layer: int, mlp: Mlp, hidden: int) -> Iterator[Role]:
    first, rows = ("gate_up", (mlp.intermediate,) * 2) if mlp.gated else ("up", (mlp.intermediate,))
    yield from _linear(f"{key}.{first}", layer, rows, hidden, bias=mlp.up_bias)
    yield from _linear(f"{key}.down", layer, (hidden,), mlp.intermediate, bias=mlp.down_bias)


def _moe(moe: Moe, layer: int, hidden: int) -> Iterator[Role]:
    yield from _linear("moe.router", layer, (moe.num_experts,), hidden, bias=moe.router_bias)
    if moe.correction_bias:
        yield Role("moe.correction_bias", layer, ((moe.num_experts,),))
    rows = (moe.intermediate, moe.intermediate)
    yield Role("moe.gate_up.weight", layer, tuple((count, hidden) for count in rows), moe.num_experts)
    if moe.expert_bias:
        yield Role("moe.gate_up.bias", layer, tuple((count,) for count in rows), moe.num_experts)
    yield Role("moe.down.weight", layer, ((hidden, moe.intermediate),), moe.num_experts)
    if moe.expert_bias:
        yield Role("moe.down.bias", layer, ((hidden,),), moe.num_experts)
    if moe.shared is not None:
        yield from _mlp("moe.shared", layer, moe.shared, hidden)
        if moe.shared_gate:
            yield from _linear("moe.shared_gate", layer, (1,), hidden, bias=False)
