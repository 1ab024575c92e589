"""Phi-3, Phi-3.5 and Phi-4(-mini): fused projections, partial rotary, longrope."""

from __future__ import annotations

from enginebay.export.config import Config
from enginebay.export.families.base import Family
from enginebay.export.families.common import LLAMA_NAMES, attention, decoder, gated_mlp
from enginebay.export.rope import read_rope
from enginebay.export.spec import Layer, ModelSpec, Norm

NAMES = {
    **LLAMA_NAMES,
    "attention.qkv": "model.layers.{layer}.self_attn.qkv_proj",
    "mlp.gate_up": "model.layers.{layer}.mlp.gate_up_proj",
}


def spec(config: Config) -> ModelSpec:
    for flag in ("attention_bias", "mlp_bias", "lm_head_bias"):
        config.expect(flag, False)
    for key in ("full_attn_mod", "interpolate_factor"):
        config.expect(key, 1)
    norm = Norm("rms", config.number("rms_norm_eps", 1e-5))
    attend = attention(config, window=config.nullable("sliding_window", None) or 0)
    layer = Layer(attend, gated_mlp(config), pre_attention_norm=norm, pre_mlp_norm=norm)
    rope = read_rope(config, attend.head_dim, aliases={"su": "longrope", "yarn": "longrope"})
    return decoder(config, [layer] * config.count("num_hidden_layers"), norm, [rope])


FAMILY = Family("phi3", "Phi3ForCausalLM", spec, NAMES)
