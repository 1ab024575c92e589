"""Llama 1 to 3.3 and every checkpoint that calls itself Llama (SmolLM2, TinyLlama, Yi, DeepSeek-LLM, ...)."""

from __future__ import annotations

from enginebay.export.config import Config
from enginebay.export.families.base import Family
from enginebay.export.families.common import LLAMA_NAMES, activation, decoder, head_dim
from enginebay.export.rope import read_rope
from enginebay.export.spec import Attention, Layer, Mlp, ModelSpec, Norm


def spec(config: Config) -> ModelSpec:
    heads = config.count("num_attention_heads")
    size = head_dim(config, heads)
    attention_bias, mlp_bias = config.flag("attention_bias", False), config.flag("mlp_bias", False)
    config.ignore("pretraining_tp")  # how the original training split its products; the sum is the same
    norm = Norm("rms", config.number("rms_norm_eps", 1e-6))
    layer = Layer(
        attention=Attention(
            type="attention",
            num_heads=heads,
            num_kv_heads=config.count("num_key_value_heads", heads),
            head_dim=size,
            scale=size**-0.5,
            qkv_bias=attention_bias,
            out_bias=attention_bias,
        ),
        mlp=Mlp(
            type="mlp",
            intermediate=config.count("intermediate_size"),
            activation=activation(config, "hidden_act", "silu"),
            up_bias=mlp_bias,
            down_bias=mlp_bias,
        ),
        pre_attention_norm=norm,
        pre_mlp_norm=norm,
    )
    positions = config.count("max_position_embeddings", 2048)
    return decoder(
        config,
        [layer] * config.count("num_hidden_layers"),
        norm,
        positions,
        [read_rope(config, size, positions)],
    )


FAMILY = Family("llama", "LlamaForCausalLM", spec, LLAMA_NAMES)
