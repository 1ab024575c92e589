"""Every dense family against transformers: tiny random models, ragged steps, every position.

Sequences reach beyond each window and each original_max_position.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers as hf
from export_support import check_against_oracle, make_model, save

SMALL: dict[str, Any] = {
    "vocab_size": 103,
    "hidden_size": 48,
    "intermediate_size": 52,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.3, 1.7],
    "long_factor": [2.0, 3.5, 5.0],
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e4}

MODELS: dict[str, tuple[type, dict[str, Any]]] = {
    "mistral_window": (hf.MistralConfig, {"sliding_window": 7}),
    "mistral_full": (hf.MistralConfig, {"sliding_window": None, "head_dim": 12}),
    "ministral": (
        hf.MinistralConfig,
        {"head_dim": 8, "sliding_window": 6, "layer_types": ["full_attention", "sliding_attention"] * 2},
    ),
    "qwen2": (hf.Qwen2Config, {"tie_word_embeddings": True}),
    "qwen2_window": (
        hf.Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2, "rope_parameters": YARN},
    ),
    "qwen3": (hf.Qwen3Config, {"head_dim": 14}),
    "qwen3_biases": (
        hf.Qwen3Config,
        {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True, "rms_norm_eps": 1e-3},
    ),
    "gemma2": (
        hf.Gemma2Config,
        {
            "head_dim": 10,
            "sliding_window": 8,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 4.0,
            "attention_bias": True,
        },
    ),
    "gemma2_no_caps": (
        hf.Gemma2Config,
        {"head_dim": 8, "sliding_window": 8, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma3": (
        hf.Gemma3TextConfig,
        {
            "head_dim": 10,
            "sliding_window": 6,
            "num_hidden_layers": 6,
            "query_pre_attn_scalar": 20,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "phi3": (hf.Phi3Config, {"sliding_window": 11}),
    "phi3_longrope": (
        hf.Phi3Config,
        {"original_max_position_embeddings": 24, "rope_parameters": LONGROPE, "tie_word_embeddings": True},
    ),
    "smollm3": (
        hf.SmolLM3Config,
        {"no_rope_layers": [1, 0, 1, 0], "rope_parameters": {"rope_theta": 5e4, "rope_type": "default"}},
    ),
    "smollm3_window": (
        hf.SmolLM3Config,
        {
            "no_rope_layer_interval": 2,
            "use_sliding_window": True,
            "sliding_window": 7,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "olmo2": (hf.Olmo2Config, {}),
    "olmo2_biases": (hf.Olmo2Config, {"attention_bias": True, "rms_norm_eps": 1e-2}),
    "granite": (
        hf.GraniteConfig,
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.21,
            "residual_multiplier": 0.4,
            "logits_scaling": 1.7,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "cohere2": (hf.Cohere2Config, {"sliding_window": 9, "logit_scale": 0.6}),
    "cohere2_biases": (
        hf.Cohere2Config,
        {
            "sliding_window": 5,
            "attention_bias": True,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "gpt_neox": (
        hf.GPTNeoXConfig,
        {"rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 1e4, "rope_type": "default"}},
    ),
    "gpt_neox_sequential": (
        hf.GPTNeoXConfig,
        {
            "use_parallel_residual": False,
            "tie_word_embeddings": True,
            "hidden_act": "gelu_new",
            "attention_bias": False,
            "rope_parameters": {"partial_rotary_factor": 1.0, "rope_theta": 1e4, "rope_type": "default"},
        },
    ),
    "gpt2": (hf.GPT2Config, {"n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 64}),
    "gpt2_by_depth": (
        hf.GPT2Config,
        {
            "n_embd": 30,
            "n_layer": 3,
            "n_head": 3,
            "n_positions": 64,
            "n_inner": 50,
            "scale_attn_by_inverse_layer_idx": True,
            "activation_function": "relu",
            "tie_word_embeddings": False,
        },
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_ragged_steps_match_transformers(name: str, tmp_path: Path) -> None:
    kind, changes = MODELS[name]
    base = {"vocab_size": 103} if kind is hf.GPT2Config else SMALL
    if kind is hf.GPTNeoXConfig:
        base = {key: value for key, value in SMALL.items() if key != "num_key_value_heads"}
    folder = save(make_model(kind(**{**base, **changes})), tmp_path / "model")
    check_against_oracle(folder, (29, 41, 9, 17))


def test_the_text_model_of_a_gemma3_with_images(tmp_path: Path) -> None:
    text = {**SMALL, "head_dim": 10, "sliding_window": 6, "query_pre_attn_scalar": 20, "num_hidden_layers": 6}
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = hf.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=102
    )
    folder = save(make_model(config), tmp_path / "model")
    report = check_against_oracle(folder, (29, 17), ids=100)  # ids of images are none of ours
    assert report.spec.architecture == "Gemma3ForConditionalGeneration"
    assert report.ignored
    assert all(name.startswith(("vision_tower.", "multi_modal_projector.")) for name in report.ignored)
