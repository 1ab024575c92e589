"""Cohere Command R7B and later (Cohere 2).

Parallel branches behind one LayerNorm without bias, RoPE in interleaved pairs on the layers with a window
and none on the others, scaled logits.
"""

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
    for key in ("use_embedding_sharing", "use_gated_activation", "use_parallel_block"):
        config.expect(key, True)
    config.expect("use_qk_norm", False)
    config.expect("position_embedding_type", "rope_gptj")
    config.expect("order_of_interleaved_layers", "local_attn_first")
    config.expect("rotary_pct", 1.0, 1)
    config.ignore(
        "use_parallel_embedding", "layer_switch"
    )  # how training was laid out; the old name of the pattern
    pattern = config.count("sliding_window_pattern", config.count("_sliding_window_pattern", 4))
    sliding = layer_kinds(config, lambda index: (index + 1) % pattern != 0)
    bias = config.flag("attention_bias", False)
    norm = Norm("layer", config.number("layer_norm_eps", 1e-5))
    mlp = gated_mlp(config)
    layers = [
        Layer(
            attention(
                config,
                window=window,
                rope=0 if window else None,
                rope_interleaved=True,
                qkv_bias=bias,
                out_bias=bias,
            ),
            mlp,
            pre_attention_norm=norm,
            parallel=True,
        )
        for window in windows(config, sliding, config.nullable("sliding_window", 4096))
    ]
    rope = read_rope(config, attention(config).head_dim)
    return decoder(config, layers, norm, [rope], tied=True, logits_scale=config.number("logit_scale", 0.0625))


FAMILY = Family("cohere2", "Cohere2ForCausalLM", spec, LLAMA_NAMES)
