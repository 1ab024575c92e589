"""What most families share: names of weights, head size, activations, the assembly of a spec."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from enginebay.export.config import Config
from enginebay.export.families.base import Names
from enginebay.export.spec import Activation, Attention, Layer, Mlp, ModelSpec, Norm, Rope, paged_group

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


def head_dim(config: Config, heads: int, default: int | None = None) -> int:
    """`head_dim`.

    Where it is absent the family's default, or hidden_size/heads; where it is null, the latter.
    """
    if default is not None and not config.has_key("head_dim"):
        return default
    hidden = config.count("hidden_size")
    if not config.has("head_dim") and hidden % heads:
        raise config.refusal(
            "num_attention_heads", heads, f"does not divide hidden_size {hidden} and there is no head_dim"
        )
    return config.count("head_dim", hidden // heads)


def attention(config: Config, size: int | None = None, **fields: Any) -> Attention:
    """Grouped-query attention from the usual keys.

    `size` is the head size, `fields` what else the family sets.
    """
    heads = config.count("num_attention_heads")
    size = size or head_dim(config, heads)
    usual: dict[str, Any] = {
        "num_heads": heads,
        "num_kv_heads": config.count("num_key_value_heads", heads),
        "head_dim": size,
        "scale": size**-0.5,
    }
    return Attention(type="attention", **{**usual, **fields})


def gated_mlp(config: Config, key: str = "hidden_act", default: str = "silu", *, bias: bool = False) -> Mlp:
    """The usual gated MLP; `key` names the activation."""
    return Mlp(
        type="mlp",
        intermediate=config.count("intermediate_size"),
        activation=activation(config, key, default),
        up_bias=bias,
        down_bias=bias,
    )


def layer_kinds(config: Config, default: Callable[[int], bool]) -> list[bool]:
    """For each layer whether it attends to a sliding window.

    `layer_types`, or the family's rule by layer index.
    """
    count = config.count("num_hidden_layers")
    if not config.has("layer_types"):
        return [default(index) for index in range(count)]
    names = config.items("layer_types")
    known = {"full_attention": False, "sliding_attention": True}
    if len(names) != count or any(not isinstance(name, str) or name not in known for name in names):
        raise config.refusal("layer_types", names, f"must be {count} of {', '.join(known)}")
    return [known[name] for name in names]


def windows(config: Config, kinds: Sequence[bool], window: int | None) -> list[int]:
    """The window of each layer (0: none) from its kind."""
    if any(kinds) and window is None:
        raise config.refusal("sliding_window", None, "layers with sliding attention need one")
    return [window or 0 if sliding else 0 for sliding in kinds]


def decoder(
    config: Config,
    layers: Sequence[Layer],
    final_norm: Norm,
    ropes: Sequence[Rope] = (),
    *,
    hidden: str = "hidden_size",
    positions: int | None = None,
    tied: bool = False,
    **fields: Any,
) -> ModelSpec:
    """A ModelSpec from its parts and the keys that every config has. `tied` is the family's default.

    `positions`: max_position_embeddings where the family reads another key for it.
    """
    limits = [positions or config.count("max_position_embeddings")]
    limits += [
        int(rope.original_positions * rope.factor) for rope in ropes if rope.kind in ("yarn", "dynamic")
    ]
    return ModelSpec(
        family=config.text("model_type"),
        architecture=str(config.items("architectures")[0]),
        vocab_size=config.count("vocab_size"),
        hidden_size=config.count(hidden),
        max_positions=max(limits),
        layers=tuple(layers),
        final_norm=final_norm,
        cache_groups=paged_group(tuple(layers)),
        ropes=tuple(ropes),
        tied_embeddings=config.flag("tie_word_embeddings", tied),
        **fields,
    )
