"""What most families share: names of weights, head size, activations, the assembly of a spec."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from enginebay.export.config import Config
from enginebay.export.families.base import Names
from enginebay.export.spec import Activation, Layer, ModelSpec, Norm, Rope, paged_group

LLAMA_NAMES: Names = {
    "embed": "model.embed_tokens",
    "pre_attention_norm": "model.layers.{layer}.input_layernorm",
    "attention.qkv": (
        "model.layers.{layer}.self_attn.q_proj",
        "model.layers.{layer}.self_attn.k_proj",
        "model.layers.{layer}.self_attn.v_proj",
    ),
    "attention.out": "model.layers.{layer}.self_attn.o_proj",
    "attention.q_norm": "model.layers.{layer}.self_attn.q_norm",
    "attention.k_norm": "model.layers.{layer}.self_attn.k_norm",
    "pre_mlp_norm": "model.layers.{layer}.post_attention_layernorm",
    "mlp.gate_up": ("model.layers.{layer}.mlp.gate_proj", "model.layers.{layer}.mlp.up_proj"),
    "mlp.down": "model.layers.{layer}.mlp.down_proj",
    "final_norm": "model.norm",
    "lm_head": "lm_head",
}

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}


def activation(config: Config, key: str, default: str) -> Activation:
    """The activation named by `key`; refused by name where it is not known."""
    name = config.text(key, default)
    if name not in _ACTIVATIONS:
        raise config.refusal(key, name, f"known activations are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def head_dim(config: Config, heads: int) -> int:
    """`head_dim`, or hidden_size/heads where it is absent or null."""
    hidden = config.count("hidden_size")
    if not config.has("head_dim") and hidden % heads:
        raise config.refusal(
            "num_attention_heads", heads, f"does not divide hidden_size {hidden} and there is no head_dim"
        )
    return config.count("head_dim", hidden // heads)


def decoder(
    config: Config,
    layers: Sequence[Layer],
    final_norm: Norm,
    positions: int,
    ropes: Sequence[Rope],
    *,
    tied: bool = False,
    **fields: Any,
) -> ModelSpec:
    """A ModelSpec from its parts and the keys that every config has. `tied` is the family's default."""
    extended = [
        int(rope.original_positions * rope.factor) for rope in ropes if rope.kind in ("yarn", "dynamic")
    ]
    return ModelSpec(
        family=config.text("model_type"),
        architecture=str(config.items("architectures")[0]),
        vocab_size=config.count("vocab_size"),
        hidden_size=config.count("hidden_size"),
        max_positions=max([positions, *extended]),
        layers=tuple(layers),
        final_norm=final_norm,
        cache_groups=paged_group(tuple(layers)),
        ropes=tuple(ropes),
        tied_embeddings=config.flag("tie_word_embeddings", tied),
        **fields,
    )
