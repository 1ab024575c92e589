"""Llama 1 to 3.3 and every checkpoint that calls itself Llama (SmolLM2, TinyLlama, Yi, DeepSeek-LLM, ...)."""

from __future__ import annotations

from enginebay.export.config import Config
from enginebay.export.families.base import Family
from enginebay.export.families.common import LLAMA_NAMES, attention, decoder, gated_mlp
from enginebay.export.rope import read_rope
from enginebay.export.spec import Layer, ModelSpec, Norm


def spec(config: Config) -> ModelSpec:
    bias = config.flag("attention_bias", False)
    config.ignore("pretraining_tp")  # how the original training split its products; the sum is the same
    attend = attention(config, qkv_bias=bias, out_bias=bias)
    norm = Norm("rms", config.number("rms_norm_eps", 1e-6))
    mlp = gated_mlp(config, bias=config.flag("mlp_bias", False))
    layer = Layer(attend, mlp, pre_attention_norm=norm, pre_mlp_norm=norm)
    layers = [layer] * config.count("num_hidden_layers")
    return decoder(config, layers, norm, [read_rope(config, attend.head_dim)])


FAMILY = Family("llama", "LlamaForCausalLM", spec, LLAMA_NAMES)
