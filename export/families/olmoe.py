"""OLMoE: experts in every layer, q and k normalised over all heads together."""

from __future__ import annotations

from enginebay.export.config import Config
from enginebay.export.families.base import Family
from enginebay.export.families.common import LLAMA_NAMES, activation, attention, decoder
from enginebay.export.families.qwen_moe import EXPERT_NAMES
from enginebay.export.rope import read_rope
from enginebay.export.spec import Layer, ModelSpec, Moe, Norm


def spec(config: Config) -> ModelSpec:
    config.expect("clip_qkv")
    bias = config.flag("attention_bias", False)
    norm = Norm("rms", config.number("rms_norm_eps", 1e-5))
    attend = attention(
        config, qk_norm="projection", qk_norm_epsilon=norm.epsilon, qkv_bias=bias, out_bias=bias
    )
    moe = Moe(
        type="moe",
        num_experts=config.count("num_local_experts" if config.has("num_local_experts") else "num_experts"),
        top_k=config.count("num_experts_per_tok", 8),
        intermediate=config.count("intermediate_size"),
        activation=activation(config, "hidden_act", "silu"),
        routing="softmax",
        normalise=config.flag("norm_topk_prob", False),
    )
    layer = Layer(attend, moe, pre_attention_norm=norm, pre_mlp_norm=norm)
    layers = [layer] * config.count("num_hidden_layers")
    return decoder(config, layers, norm, [read_rope(config, attend.head_dim)])


FAMILY = Family("olmoe", "OlmoeForCausalLM", spec, {**LLAMA_NAMES, **EXPERT_NAMES})
