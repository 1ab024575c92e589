"""GPT-OSS.

Attention sinks, windows on alternate layers, experts with biases and a clamped gate, MXFP4 weights.
"""

from __future__ import annotations

from enginebay.export.config import Config
from enginebay.export.families.base import Family
from enginebay.export.families.common import (
    LLAMA_NAMES,
    attention,
    decoder,
    head_dim,
    layer_kinds,
    windows,
)
from enginebay.export.rope import read_rope
from enginebay.export.spec import Layer, ModelSpec, Moe, Norm

_BLOCK = "model.layers.{layer}.mlp."
NAMES = {
    **LLAMA_NAMES,
    "attention.sinks": "model.layers.{layer}.self_attn.sinks",
    "moe.router": _BLOCK + "router",
    "moe.gate_up.weight": _BLOCK + "experts.gate_up_proj",
    "moe.gate_up.bias": _BLOCK + "experts.gate_up_proj_bias",
    "moe.down.weight": _BLOCK + "experts.down_proj",
    "moe.down.bias": _BLOCK + "experts.down_proj_bias",
}
MXFP4_NAMES = {
    **NAMES,
    "moe.gate_up.weight": (_BLOCK + "experts.gate_up_proj_blocks", _BLOCK + "experts.gate_up_proj_scales"),
    "moe.down.weight": (_BLOCK + "experts.down_proj_blocks", _BLOCK + "experts.down_proj_scales"),
}


def spec(config: Config) -> ModelSpec:
    config.expect("hidden_act", "silu")
    config.ignore(
        "initial_context_length", "experts_per_token"
    )  # what the RoPE and num_experts_per_tok say again
    size = head_dim(config, config.count("num_attention_heads"), 64)
    bias = config.flag("attention_bias", True)
    norm = Norm("rms", config.number("rms_norm_eps", 1e-5))
    moe = Moe(
        type="moe",
        num_experts=config.count("num_local_experts"),
        top_k=config.count("num_experts_per_tok", 4),
        intermediate=config.count("intermediate_size"),
        activation="silu",
        routing="softmax_topk",
        normalise=False,
        router_bias=True,
        expert_bias=True,
        clamp=config.number("swiglu_limit", 7.0),
        clamp_alpha=config.number("swiglu_alpha", 1.702),
    )
    sliding = layer_kinds(config, lambda index: index % 2 == 0)
    layers = [
        Layer(
            attention(config, size, window=window, sinks=True, qkv_bias=bias, out_bias=bias),
            moe,
            pre_attention_norm=norm,
            pre_mlp_norm=norm,
        )
        for window in windows(config, sliding, config.nullable("sliding_window", 128))
    ]
    return decoder(config, layers, norm, [read_rope(config, size, theta=150000.0)])


def mxfp4_spec(config: Config) -> ModelSpec:
    table = config.table("quantization_config")
    table.expect("quant_method", "mxfp4")
    table.ignore("modules_to_not_convert")  # the tensors' own names say which they are
    table.finish()
    return spec(config)


FAMILY = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    spec,
    NAMES,
    {
        "moe.gate_up.weight": "transposed_alternating",
        "moe.gate_up.bias": "alternating",
        "moe.down.weight": "transposed",
    },
)
MXFP4 = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    mxfp4_spec,
    MXFP4_NAMES,
    {
        "moe.gate_up.weight": "mxfp4_alternating",
        "moe.gate_up.bias": "alternating",
        "moe.down.weight": "mxfp4",
    },
    quantization="mxfp4",
)
