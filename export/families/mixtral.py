"""Mixtral: Mistral with a mixture of experts whose chosen scores are always renormalised."""

from __future__ import annotations

from enginebay.export.config import Config
from enginebay.export.families.base import Family
from enginebay.export.families.common import LLAMA_NAMES, activation, attention, decoder
from enginebay.export.rope import read_rope
from enginebay.export.spec import Layer, ModelSpec, Moe, Norm

_BLOCK = "model.layers.{layer}.block_sparse_moe."
NAMES = {
    **LLAMA_NAMES,
    "moe.router": _BLOCK + "gate",
    "moe.gate_up": (_BLOCK + "experts.{expert}.w1", _BLOCK + "experts.{expert}.w3"),
    "moe.down": _BLOCK + "experts.{expert}.w2",
}


def spec(config: Config) -> ModelSpec:
    norm = Norm("rms", config.number("rms_norm_eps", 1e-5))
    moe = Moe(
        type="moe",
        num_experts=config.count("num_local_experts", 8),
        top_k=config.count("num_experts_per_tok", 2),
        intermediate=config.count("intermediate_size"),
        activation=activation(config, "hidden_act", "silu"),
        routing="softmax",
        normalise=True,
    )
    attend = attention(config, window=config.nullable("sliding_window", None) or 0)
    layer = Layer(attend, moe, pre_attention_norm=norm, pre_mlp_norm=norm)
    rope = read_rope(config, attend.head_dim, theta=1e6)
    return decoder(config, [layer] * config.count("num_hidden_layers"), norm, [rope])


FAMILY = Family("mixtral", "MixtralForCausalLM", spec, NAMES)
