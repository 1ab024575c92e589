"""Qwen1.5/2-MoE (a gated shared expert) and Qwen3-MoE: experts on every nth layer, renormalised or not."""

from __future__ import annotations

from enginebay.export.config import Config
from enginebay.export.families.base import Family, Names
from enginebay.export.families.common import LLAMA_NAMES, activation, gated_mlp, layer_kinds, windows
from enginebay.export.families.qwen import assemble, qwen2_attention, qwen3_attention, window_in_use
from enginebay.export.spec import Mlp, ModelSpec, Moe

_BLOCK = "model.layers.{layer}.mlp."
EXPERT_NAMES: Names = {
    "moe.router": _BLOCK + "gate",
    "moe.gate_up": (_BLOCK + "experts.{expert}.gate_proj", _BLOCK + "experts.{expert}.up_proj"),
    "moe.down": _BLOCK + "experts.{expert}.down_proj",
}
NAMES: Names = {
    **LLAMA_NAMES,
    **EXPERT_NAMES,
    "moe.shared.gate_up": (_BLOCK + "shared_expert.gate_proj", _BLOCK + "shared_expert.up_proj"),
    "moe.shared.down": _BLOCK + "shared_expert.down_proj",
    "moe.shared_gate": _BLOCK + "shared_expert_gate",
}


def experts(config: Config, shared: Mlp | None) -> Moe:
    return Moe(
        type="moe",
        num_experts=config.count("num_local_experts" if config.has("num_local_experts") else "num_experts"),
        top_k=config.count("num_experts_per_tok"),
        intermediate=config.count("moe_intermediate_size"),
        activation=activation(config, "hidden_act", "silu"),
        routing="softmax",
        normalise=config.flag("norm_topk_prob", False),
        shared=shared,
        shared_gate=shared is not None,
    )


def sparse_layers(config: Config, dense: Mlp, moe: Moe) -> list[Mlp | Moe]:
    """Experts on every `decoder_sparse_step`-th layer but those in `mlp_only_layers`."""
    step, only = config.count("decoder_sparse_step", 1), config.items("mlp_only_layers", [])
    return [
        moe if index not in only and (index + 1) % step == 0 else dense
        for index in range(config.count("num_hidden_layers"))
    ]


def qwen2_moe(config: Config) -> ModelSpec:
    config.expect("qkv_bias", True)
    window = window_in_use(config)
    last = config.integer("max_window_layers", 28)
    kinds = layer_kinds(config, lambda index: window is not None and index % 2 == 0 and index < last)
    attentions = [qwen2_attention(config, size) for size in windows(config, kinds, window)]
    dense = gated_mlp(config)
    shared = Mlp("mlp", config.count("shared_expert_intermediate_size"), dense.activation)
    return assemble(config, attentions, sparse_layers(config, dense, experts(config, shared)))


def qwen3_moe(config: Config) -> ModelSpec:
    window = window_in_use(config)
    config.ignore("max_window_layers")  # all layers have the window, or none
    count = config.count("num_hidden_layers")
    attentions = [qwen3_attention(config, window or 0) for _ in range(count)]
    return assemble(config, attentions, sparse_layers(config, gated_mlp(config), experts(config, None)))


QWEN2_MOE = Family("qwen2_moe", "Qwen2MoeForCausalLM", qwen2_moe, NAMES)
QWEN3_MOE = Family("qwen3_moe", "Qwen3MoeForCausalLM", qwen3_moe, NAMES)
