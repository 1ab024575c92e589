"""Llama checkpoints of every shape against transformers, position by position."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from export_support import ReferenceRunner, check_against_oracle, make_model, save
from transformers import LlamaConfig

BASE = {
    "vocab_size": 131,
    "hidden_size": 60,
    "intermediate_size": 84,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}

VARIANTS = {
    "plain": {},
    "head_dim_is_not_the_quotient": {"head_dim": 16},
    "biases_everywhere": {"attention_bias": True, "mlp_bias": True},
    "tied": {"tie_word_embeddings": True},
    "one_kv_head": {"num_key_value_heads": 1, "rms_norm_eps": 1e-2},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 3.0}},
    "llama3": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    },
    "yarn": {
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    },
    "longrope": {
        "rope_scaling": {
            "rope_type": "longrope",
            "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0],
            "long_factor": [1.5, 2.0, 3.0, 4.0, 6.0],
            "original_max_position_embeddings": 20,
        }
    },
    "gelu": {"hidden_act": "gelu_pytorch_tanh"},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_ragged_steps_match_transformers(variant: str, tmp_path: Path) -> None:
    model = make_model(LlamaConfig(**{**BASE, **VARIANTS[variant]}))
    folder = save(model, tmp_path / "model")
    report = check_against_oracle(folder, (29, 41, 9, 17))
    assert report.parameters == sum(parameter.numel() for parameter in model.parameters())


def test_dynamic_rope_up_to_the_switch_and_at_its_longest(tmp_path: Path) -> None:
    """Beyond the switch the frequencies depend on the length, and the table is made for the longest."""
    changes = {"max_position_embeddings": 16, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    folder = save(make_model(LlamaConfig(**{**BASE, **changes})), tmp_path / "model")
    report = check_against_oracle(folder, (32, 15, 9, 32))
    assert (report.spec.max_positions, report.spec.rope_switch) == (32, 16)


def test_the_canonical_graph_alone_matches_transformers(tmp_path: Path) -> None:
    folder = save(make_model(LlamaConfig(**BASE)), tmp_path / "model")
    check_against_oracle(folder, (29, 17), make_runner=ReferenceRunner)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_sharded_weights_are_kept_and_computed_in_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    model = make_model(LlamaConfig(**BASE))
    folder = save(model, tmp_path / "model", dtype, max_shard_size="40KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    report = check_against_oracle(folder, (20, 11))
    assert {weight.dtype for weight in report.tensors if not weight.name.startswith("rope.")} == {
        {torch.float16: "F16", torch.bfloat16: "BF16"}[dtype]
    }
