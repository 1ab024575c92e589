"""Mistral (one window for all layers or none) and Ministral (a window on some layers)."""

from __future__ import annotations

from enginebay.export.config import Config
from enginebay.export.families.base import Family
from enginebay.export.families.common import (
    LLAMA_NAMES,
    attention,
    decoder,
    gated_mlp,
    layer_kinds,
    windows,
)
from enginebay.export.rope import read_rope
from enginebay.export.spec import Layer, ModelSpec, Norm


def spec(config: Config) -> ModelSpec:
    window = config.nullable("sliding_window", 4096)
    kinds = layer_kinds(config, lambda _: window is not None)
    norm = Norm("rms", config.number("rms_norm_eps", 1e-6))
    mlp = gated_mlp(config)
    layers = [
        Layer(attention(config, window=size), mlp, pre_attention_norm=norm, pre_mlp_norm=norm)
        for size in windows(config, kinds, window)
    ]
    return decoder(config, layers, norm, [read_rope(config, attention(config).head_dim)])


MISTRAL = Family("mistral", "MistralForCausalLM", spec, LLAMA_NAMES)
MINISTRAL = Family("ministral", "MinistralForCausalLM", spec, LLAMA_NAMES)
