"""GPT-NeoX and Pythia.

Parallel branches behind a LayerNorm each, partial rotary, q, k and v fused head by head.
"""

from __future__ import annotations

from enginebay.export.config import Config
from enginebay.export.families.base import Family
from enginebay.export.families.common import activation, attention, decoder
from enginebay.export.rope import read_rope
from enginebay.export.spec import Layer, Mlp, ModelSpec, Norm

NAMES = {
    "embed": "gpt_neox.embed_in",
    "pre_attention_norm": "gpt_neox.layers.{layer}.input_layernorm",
    "attention.qkv": "gpt_neox.layers.{layer}.attention.query_key_value",
    "attention.out": "gpt_neox.layers.{layer}.attention.dense",
    "pre_mlp_norm": "gpt_neox.layers.{layer}.post_attention_layernorm",
    "mlp.up": "gpt_neox.layers.{layer}.mlp.dense_h_to_4h",
    "mlp.down": "gpt_neox.layers.{layer}.mlp.dense_4h_to_h",
    "final_norm": "gpt_neox.final_layer_norm",
    "lm_head": "embed_out",
}


def spec(config: Config) -> ModelSpec:
    bias = config.flag("attention_bias", True)
    norm = Norm("layer", config.number("layer_norm_eps", 1e-5), bias=True)
    attend = attention(config, qkv_bias=bias, out_bias=bias)
    if attend.num_kv_heads != attend.num_heads:
        raise config.refusal("num_key_value_heads", attend.num_kv_heads, "GPT-NeoX has one per head")
    mlp = Mlp(
        type="mlp",
        intermediate=config.count("intermediate_size"),
        activation=activation(config, "hidden_act", "gelu"),
        gated=False,
        up_bias=True,
        down_bias=True,
    )
    layer = Layer(
        attend,
        mlp,
        pre_attention_norm=norm,
        pre_mlp_norm=norm,
        parallel=config.flag("use_parallel_residual", True),
    )
    rope = read_rope(
        config,
        attend.head_dim,
        theta=config.number("rotary_emb_base", 10000.0),
        partial=config.number("rotary_pct", 0.25),
    )
    return decoder(config, [layer] * config.count("num_hidden_layers"), norm, [rope])


FAMILY = Family(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    spec,
    NAMES,
    {"attention.qkv": "head_qkv"},
    ignorable=(r"\.rotary_emb\.inv_freq$", r"\.attention\.(masked_)?bias$"),
)
