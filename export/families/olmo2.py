"""OLMo 2: norms after each branch instead of before it, q and k normalised over all heads together."""

from __future__ import annotations

from enginebay.export.config import Config
from enginebay.export.families.base import Family
from enginebay.export.families.common import LLAMA_NAMES, attention, decoder, gated_mlp
from enginebay.export.rope import read_rope
from enginebay.export.spec import Layer, ModelSpec, Norm

NAMES = {
    **LLAMA_NAMES,
    "post_attention_norm": "model.layers.{layer}.post_attention_layernorm",
    "post_mlp_norm": "model.layers.{layer}.post_feedforward_layernorm",
}


def spec(config: Config) -> ModelSpec:
    bias = config.flag("attention_bias", False)
    norm = Norm("rms", config.number("rms_norm_eps", 1e-5))
    attend = attention(
        config, qk_norm="projection", qk_norm_epsilon=norm.epsilon, qkv_bias=bias, out_bias=bias
    )
    layer = Layer(attend, gated_mlp(config), post_attention_norm=norm, post_mlp_norm=norm)
    layers = [layer] * config.count("num_hidden_layers")
    return decoder(config, layers, norm, [read_rope(config, attend.head_dim)])


FAMILY = Family("olmo2", "Olmo2ForCausalLM", spec, NAMES)
