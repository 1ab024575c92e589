"""Qwen2 and Qwen2.5 (biases on q, k and v) and Qwen3 (q and k normalised by head)."""

from __future__ import annotations

from enginebay.export.config import Config
from enginebay.export.families.base import Family
from enginebay.export.families.common import (
    LLAMA_NAMES,
    attention,
    decoder,
    gated_mlp,
    head_dim,
    layer_kinds,
    windows,
)
from enginebay.export.rope import read_rope
from enginebay.export.spec import Attention, Layer, Mlp, ModelSpec, Moe, Norm


def window_in_use(config: Config) -> int | None:
    """`sliding_window`, which counts only where `use_sliding_window` says so."""
    if not config.flag("use_sliding_window", False):
        config.ignore("sliding_window")
        return None
    return config.nullable("sliding_window", 4096)


def qwen_windows(config: Config) -> list[int]:
    """Layers from `max_window_layers` on have a window, if `use_sliding_window` says so."""
    window = window_in_use(config)
    first = config.integer("max_window_layers", 28)
    return windows(config, layer_kinds(config, lambda index: window is not None and index >= first), window)


def qwen2_attention(config: Config, window: int) -> Attention:
    return attention(config, window=window, qkv_bias=True)


def qwen3_attention(config: Config, window: int) -> Attention:
    bias = config.flag("attention_bias", False)
    return attention(
        config,
        head_dim(config, config.count("num_attention_heads"), 128),
        window=window,
        qk_norm="head",
        qk_norm_epsilon=config.number("rms_norm_eps", 1e-6),
        qkv_bias=bias,
        out_bias=bias,
    )


def assemble(config: Config, attentions: list[Attention], mlps: list[Mlp | Moe]) -> ModelSpec:
    config.expect("use_mrope", False)
    norm = Norm("rms", config.number("rms_norm_eps", 1e-6))
    layers = [
        Layer(attend, mlp, pre_attention_norm=norm, pre_mlp_norm=norm)
        for attend, mlp in zip(attentions, mlps, strict=True)
    ]
    return decoder(config, layers, norm, [read_rope(config, attentions[0].head_dim)])


def qwen2(config: Config) -> ModelSpec:
    attentions = [qwen2_attention(config, window) for window in qwen_windows(config)]
    return assemble(config, attentions, [gated_mlp(config)] * len(attentions))


def qwen3(config: Config) -> ModelSpec:
    attentions = [qwen3_attention(config, window) for window in qwen_windows(config)]
    return assemble(config, attentions, [gated_mlp(config)] * len(attentions))


QWEN2 = Family("qwen2", "Qwen2ForCausalLM", qwen2, LLAMA_NAMES)
QWEN3 = Family("qwen3", "Qwen3ForCausalLM", qwen3, LLAMA_NAMES)
