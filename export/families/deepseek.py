"""DeepSeek-V2 and V3/R1: multi-head latent attention, shared experts, group-limited routing."""

from __future__ import annotations

from enginebay.export.config import Config
from enginebay.export.families.base import Family, Names
from enginebay.export.families.common import LLAMA_NAMES, activation, decoder
from enginebay.export.families.qwen_moe import EXPERT_NAMES
from enginebay.export.rope import magnitude, read_rope
from enginebay.export.spec import LatentAttention, Layer, Mlp, ModelSpec, Moe, Norm, Rope

_ATTENTION = "model.layers.{layer}.self_attn."
_SHARED = "model.layers.{layer}.mlp.shared_experts."
NAMES: Names = {
    **LLAMA_NAMES,
    **EXPERT_NAMES,
    "attention.q": _ATTENTION + "q_proj",
    "attention.q_down": _ATTENTION + "q_a_proj",
    "attention.q_latent_norm": _ATTENTION + "q_a_layernorm",
    "attention.q_up": _ATTENTION + "q_b_proj",
    "attention.kv_down": _ATTENTION + "kv_a_proj_with_mqa",
    "attention.kv_latent_norm": _ATTENTION + "kv_a_layernorm",
    "attention.kv_up": _ATTENTION + "kv_b_proj",
    "moe.correction_bias": "model.layers.{layer}.mlp.gate.e_score_correction_bias",
    "moe.shared.gate_up": (_SHARED + "gate_proj", _SHARED + "up_proj"),
    "moe.shared.down": _SHARED + "down_proj",
}
# Training's balancing losses and parallelism; the number of devices changes no value.
TRAINING = (
    "aux_loss_alpha",
    "seq_aux",
    "ep_size",
    "pretraining_tp",
    "num_nextn_predict_layers",
    "num_mtp_layers",
)
# Layers after the last are multi-token prediction heads, which plain decoding does not use.
IGNORABLE = (r"\.rotary_emb\.inv_freq$", r"^model\.layers\.{layers}\.")


def _attention(config: Config, rope: Rope, interleaved: bool) -> LatentAttention:
    nope, turned = config.count("qk_nope_head_dim"), config.count("qk_rope_head_dim")
    scale = (nope + turned) ** -0.5
    table = config.table("rope_parameters" if config.has("rope_parameters") else "rope_scaling")
    if rope.kind != "default" and table.raw("mscale_all_dim", 0):
        scale *= magnitude(rope.factor, table.number("mscale_all_dim")) ** 2
    heads = config.count("num_attention_heads")
    config.expect("num_key_value_heads", heads)
    config.ignore("head_dim", "qk_head_dim")  # what the sizes of the parts say again
    return LatentAttention(
        type="latent_attention",
        num_heads=heads,
        q_rank=config.nullable("q_lora_rank", 1536) or 0,
        kv_rank=config.count("kv_lora_rank"),
        nope_dim=nope,
        rope_dim=turned,
        value_dim=config.count("v_head_dim"),
        scale=scale,
        norm_epsilon=1e-6,  # these norms take no epsilon from the config
        rope_interleaved=interleaved,
        bias=config.flag("attention_bias", False),
    )


def _assemble(config: Config, moe: Moe, bias: bool, interleaved: bool, dense: int) -> ModelSpec:
    """`dense`: the family's default of how many first layers have no experts."""
    config.ignore(*TRAINING)
    config.expect("moe_layer_freq", 1)
    norm = Norm("rms", config.number("rms_norm_eps", 1e-6))
    rope = read_rope(config, config.count("qk_rope_head_dim"))
    attend = _attention(config, rope, interleaved)
    mlp = Mlp("mlp", config.count("intermediate_size"), moe.activation, up_bias=bias, down_bias=bias)
    first = config.integer("first_k_dense_replace", dense)
    layers = [
        Layer(attend, moe if index >= first else mlp, pre_attention_norm=norm, pre_mlp_norm=norm)
        for index in range(config.count("num_hidden_layers"))
    ]
    return decoder(config, layers, norm, [rope])


def _shared(config: Config, bias: bool) -> Mlp:
    width = config.count("moe_intermediate_size") * config.count("n_shared_experts")
    return Mlp("mlp", width, activation(config, "hidden_act", "silu"), up_bias=bias, down_bias=bias)


def v2(config: Config) -> ModelSpec:
    config.expect("scoring_func", "softmax")
    config.expect("norm_topk_prob", False)
    method = config.text("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise config.refusal("topk_method", method, "only 'greedy' or 'group_limited_greedy' is supported")
    grouped = method != "greedy"
    bias = config.flag("mlp_bias", False)
    shared = _shared(config, bias)
    groups, top_groups = config.nullable("n_group", None), config.nullable("topk_group", None)
    moe = Moe(
        type="moe",
        num_experts=config.count("n_routed_experts"),
        top_k=config.count("num_experts_per_tok"),
        intermediate=config.count("moe_intermediate_size"),
        activation=shared.activation,
        routing="softmax",
        normalise=False,
        scale=config.number("routed_scaling_factor", 1.0),
        groups=(groups or 1) if grouped else 1,
        top_groups=(top_groups or 1) if grouped else 1,
        shared=shared,
    )
    return _assemble(config, moe, bias, interleaved=True, dense=0)


def v3(config: Config) -> ModelSpec:
    config.expect("scoring_func", "sigmoid")
    config.expect("topk_method", "noaux_tc")
    shared = _shared(config, bias=False)
    moe = Moe(
        type="moe",
        num_experts=config.count("n_routed_experts"),
        top_k=config.count("num_experts_per_tok"),
        intermediate=config.count("moe_intermediate_size"),
        activation=shared.activation,
        routing="sigmoid",
        normalise=config.flag("norm_topk_prob", True),
        scale=config.number("routed_scaling_factor", 2.5),
        groups=config.count("n_group"),
        top_groups=config.count("topk_group"),
        correction_bias=True,
        shared=shared,
    )
    return _assemble(config, moe, bias=False, interleaved=config.flag("rope_interleave", True), dense=3)


V2 = Family("deepseek_v2", "DeepseekV2ForCausalLM", v2, NAMES, ignorable=IGNORABLE)
V3 = Family("deepseek_v3", "DeepseekV3ForCausalLM", v3, NAMES, ignorable=IGNORABLE)
