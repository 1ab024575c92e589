"""SmolLM3: Llama with layers that have no RoPE."""

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
    count = config.count("num_hidden_layers")
    interval = config.count("no_rope_layer_interval", 4)
    turned = config.items("no_rope_layers", [int((index + 1) % interval != 0) for index in range(count)])
    if len(turned) < count or any(value not in (0, 1) for value in turned):
        raise config.refusal("no_rope_layers", turned, f"must be {count} of 0 and 1")
    window = config.nullable("sliding_window", None) if config.flag("use_sliding_window", False) else None
    config.ignore("sliding_window", "max_window_layers")
    sliding = layer_kinds(config, lambda index: window is not None and not turned[index])
    bias = config.flag("attention_bias", False)
    norm = Norm("rms", config.number("rms_norm_eps", 1e-6))
    mlp = gated_mlp(config, bias=config.flag("mlp_bias", False))
    layers = [
        Layer(
            attention(config, rope=0 if turned[index] else None, window=size, qkv_bias=bias, out_bias=bias),
            mlp,
            pre_attention_norm=norm,
            pre_mlp_norm=norm,
        )
        for index, size in enumerate(windows(config, sliding, window))
    ]
    config.ignore("pretraining_tp")
    rope = read_rope(config, attention(config).head_dim, theta=2e6)
    return decoder(config, layers, norm, [rope], tied=True)


FAMILY = Family("smollm3", "SmolLM3ForCausalLM", spec, LLAMA_NAMES)
