"""GPT-2: learned positions, LayerNorm, one fused projection stored transposed, a plain MLP."""

from __future__ import annotations

from enginebay.export.config import Config
from enginebay.export.families.base import Family
from enginebay.export.families.common import activation, decoder
from enginebay.export.spec import Attention, Layer, Mlp, ModelSpec, Norm

NAMES = {
    "embed": "transformer.wte",
    "positions": "transformer.wpe",
    "pre_attention_norm": "transformer.h.{layer}.ln_1",
    "attention.qkv": "transformer.h.{layer}.attn.c_attn",
    "attention.out": "transformer.h.{layer}.attn.c_proj",
    "pre_mlp_norm": "transformer.h.{layer}.ln_2",
    "mlp.up": "transformer.h.{layer}.mlp.c_fc",
    "mlp.down": "transformer.h.{layer}.mlp.c_proj",
    "final_norm": "transformer.ln_f",
    "lm_head": "lm_head",
}
TRANSPOSED = ("attention.qkv.weight", "attention.out.weight", "mlp.up.weight", "mlp.down.weight")


def spec(config: Config) -> ModelSpec:
    hidden, heads = config.count("n_embd"), config.count("n_head")
    if hidden % heads:
        raise config.refusal("n_head", heads, f"does not divide n_embd {hidden}")
    size = hidden // heads
    config.expect("add_cross_attention", False)
    config.ignore("reorder_and_upcast_attn")  # the order of a product in half precision
    config.ignore("n_ctx")  # the old name of n_positions
    scale = size**-0.5 if config.flag("scale_attn_weights", True) else 1.0
    by_depth = config.flag("scale_attn_by_inverse_layer_idx", False)
    norm = Norm("layer", config.number("layer_norm_epsilon", 1e-5), bias=True)
    mlp = Mlp(
        type="mlp",
        intermediate=config.count("n_inner", 4 * hidden),
        activation=activation(config, "activation_function", "gelu_new"),
        gated=False,
        up_bias=True,
        down_bias=True,
    )
    layers = [
        Layer(
            Attention(
                type="attention",
                num_heads=heads,
                num_kv_heads=heads,
                head_dim=size,
                scale=scale / (index + 1) if by_depth else scale,
                rope=None,
                qkv_bias=True,
                out_bias=True,
            ),
            mlp,
            pre_attention_norm=norm,
            pre_mlp_norm=norm,
        )
        for index in range(config.count("n_layer"))
    ]
    positions = config.count("n_positions", 1024)
    return decoder(
        config, layers, norm, hidden="n_embd", positions=positions, learned_positions=positions, tied=True
    )


FAMILY = Family(
    "gpt2",
    "GPT2LMHeadModel",
    spec,
    NAMES,
    dict.fromkeys(TRANSPOSED, "transposed"),
    ignorable=(r"\.attn\.(masked_)?bias$",),
    prefix="transformer.",
)
