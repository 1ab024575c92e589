"""Gemma 2 and Gemma 3 (text).

Norms on both sides of each branch that multiply by 1 + weight, scaled embeddings, soft caps, windows on
most layers and, in Gemma 3, q/k norms and a RoPE of its own for those layers.
"""

from __future__ import annotations

from enginebay.export.config import Config
from enginebay.export.families.base import Family, LayoutName
from enginebay.export.families.common import (
    LLAMA_NAMES,
    attention,
    decoder,
    gated_mlp,
    head_dim,
    layer_kinds,
    windows,
)
from enginebay.export.rope import read_rope, rope_from_table
from enginebay.export.spec import Layer, ModelSpec, Norm, Rope

NAMES = {
    **LLAMA_NAMES,
    "post_attention_norm": "model.layers.{layer}.post_attention_layernorm",
    "pre_mlp_norm": "model.layers.{layer}.pre_feedforward_layernorm",
    "post_mlp_norm": "model.layers.{layer}.post_feedforward_layernorm",
}
NORMS = ("pre_attention_norm", "post_attention_norm", "pre_mlp_norm", "post_mlp_norm", "final_norm")


def _spec(
    config: Config, sliding: list[bool], ropes: list[Rope], caps: tuple[float, float], **fields: object
) -> ModelSpec:
    """`ropes`.

    Of full attention, then where it differs of sliding attention; `caps`: of attention and logits.
    """
    config.expect("use_bidirectional_attention", False)
    config.expect("sliding_window_size", config.nullable("sliding_window", 4096))  # its older name
    norm = Norm("rms", config.number("rms_norm_eps", 1e-6))
    bias = config.flag("attention_bias", False)
    mlp = gated_mlp(config, "hidden_activation", "gelu_pytorch_tanh")
    if config.has("hidden_act"):
        config.expect(
            "hidden_act", config.text("hidden_activation", "gelu_pytorch_tanh"), "gelu_pytorch_tanh", "gelu"
        )
    layers = [
        Layer(
            attention(
                config,
                head_dim(config, config.count("num_attention_heads"), 256),
                scale=config.positive("query_pre_attn_scalar", 256) ** -0.5,
                window=window,
                softcap=caps[0],
                rope=len(ropes) - 1 if window else 0,
                qkv_bias=bias,
                out_bias=bias,
                **fields,
            ),
            mlp,
            pre_attention_norm=norm,
            post_attention_norm=norm,
            pre_mlp_norm=norm,
            post_mlp_norm=norm,
        )
        for window in windows(config, sliding, config.nullable("sliding_window", 4096))
    ]
    return decoder(
        config,
        layers,
        norm,
        ropes,
        tied=True,
        embedding_scale=config.count("hidden_size") ** 0.5,
        logits_softcap=caps[1],
    )


def _cap(config: Config, key: str, default: float) -> float:
    """0 where the key is null."""
    return config.number(key, 0.0 if config.has_key(key) else default)


def gemma2(config: Config) -> ModelSpec:
    sliding = layer_kinds(config, lambda index: index % 2 == 0)
    size = head_dim(config, config.count("num_attention_heads"), 256)
    caps = _cap(config, "attn_logit_softcapping", 50.0), _cap(config, "final_logit_softcapping", 30.0)
    return _spec(config, sliding, [read_rope(config, size)], caps)


def gemma3(config: Config) -> ModelSpec:
    pattern = config.count("sliding_window_pattern", config.count("_sliding_window_pattern", 6))
    sliding = layer_kinds(config, lambda index: (index + 1) % pattern != 0)
    size = head_dim(config, config.count("num_attention_heads"), 256)
    positions = config.count("max_position_embeddings")
    local = config.number("rope_local_base_freq", 10000.0)
    if config.has("rope_parameters"):
        table = config.table("rope_parameters")
        ropes = [
            rope_from_table(table.table(kind), size, positions, theta=theta)
            for kind, theta in (("full_attention", 1e6), ("sliding_attention", local))
        ]
        table.finish()
        config.ignore("rope_theta")
    else:
        ropes = [
            read_rope(config, size, theta=1e6),
            Rope("default", local, size, original_positions=positions),
        ]
    caps = _cap(config, "attn_logit_softcapping", 0.0), _cap(config, "final_logit_softcapping", 0.0)
    return _spec(
        config, sliding, ropes, caps, qk_norm="head", qk_norm_epsilon=config.number("rms_norm_eps", 1e-6)
    )


# What a published text_config leaves out, because it equals its config class's own value.
TEXT_DEFAULTS = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3_text",
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
}


def gemma3_text_of_images(config: Config) -> ModelSpec:
    """The language model of a Gemma 3 that also takes images."""
    config.ignore("vision_config", "mm_tokens_per_image")
    config.ignore("image_token_index", "boi_token_index", "eoi_token_index")
    config.expect("tie_word_embeddings", True)
    text = config.table("text_config", TEXT_DEFAULTS)
    spec = gemma3(text)
    text.finish()
    return spec


GEMMA2 = Family("gemma2", "Gemma2ForCausalLM", gemma2, NAMES, dict.fromkeys(NORMS, "plus_one"))
GEMMA3_LAYOUTS: dict[str, LayoutName] = dict.fromkeys(
    (*NORMS, "attention.q_norm", "attention.k_norm"), "plus_one"
)
GEMMA3 = Family("gemma3_text", "Gemma3ForCausalLM", gemma3, NAMES, GEMMA3_LAYOUTS)
_PREFIX = "language_model."
GEMMA3_IMAGES = Family(
    "gemma3",
    "Gemma3ForConditionalGeneration",
    gemma3_text_of_images,
    {
        key: _PREFIX + name if isinstance(name, str) else tuple(_PREFIX + part for part in name)
        for key, name in NAMES.items()
    },
    GEMMA3_LAYOUTS,
    ignorable=(r"\.rotary_emb\.inv_freq$", r"^vision_tower\.", r"^multi_modal_projector\."),
    prefix=_PREFIX,
)
