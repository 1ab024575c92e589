"""Granite 3 (dense): Llama with multipliers on embeddings, attention scores, residual branches and logits."""

from __future__ import annotations

from enginebay.export.config import Config
from enginebay.export.families.base import Family
from enginebay.export.families.common import LLAMA_NAMES, attention, decoder, gated_mlp
from enginebay.export.rope import read_rope
from enginebay.export.spec import Layer, ModelSpec, Norm


def spec(config: Config) -> ModelSpec:
    bias = config.flag("attention_bias", False)
    norm = Norm("rms", config.number("rms_norm_eps", 1e-6))
    attend = attention(config, scale=config.number("attention_multiplier", 1.0), qkv_bias=bias, out_bias=bias)
    layer = Layer(
        attend,
        gated_mlp(config, bias=config.flag("mlp_bias", False)),
        pre_attention_norm=norm,
        pre_mlp_norm=norm,
        residual_scale=config.number("residual_multiplier", 1.0),
    )
    return decoder(
        config,
        [layer] * config.count("num_hidden_layers"),
        norm,
        [read_rope(config, attend.head_dim)],
        embedding_scale=config.number("embedding_multiplier", 1.0),
        logits_scale=1.0 / config.positive("logits_scaling", 1.0),
    )


FAMILY = Family("granite", "GraniteForCausalLM", spec, LLAMA_NAMES)
