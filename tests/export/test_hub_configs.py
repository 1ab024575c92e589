"""config.json files as published models have them.

Every key is known, and the spec says what the model is.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from enginebay.export.families import read_spec
from enginebay.export.spec import Attention, LatentAttention, Moe

CONFIGS: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("hub_configs.json").read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_key_of_a_published_config_is_known(name: str) -> None:
    _, spec = read_spec(CONFIGS[name])
    assert spec.num_layers == CONFIGS[name].get("num_hidden_layers", 12)


def attention(name: str, layer: int = 0) -> Attention:
    found = read_spec(CONFIGS[name])[1].layers[layer].attention
    assert isinstance(found, Attention)
    return found


def test_what_the_models_are() -> None:
    assert (attention("Qwen3-32B").head_dim, attention("Qwen3-32B").num_heads) == (128, 64)
    assert attention("Qwen2.5-7B").window == 0
    assert attention("Mistral-7B-v0.1").window == 4096
    assert attention("Mistral-Nemo").window == 0
    assert [attention("gemma-3-1b", layer).window for layer in range(7)] == [512] * 5 + [0, 512]
    assert [attention("gemma-3-1b", layer).rope for layer in (0, 5)] == [1, 0]
    assert [attention("SmolLM3-3B", layer).rope for layer in range(4)] == [0, 0, 0, None]
    assert [attention("c4ai-command-r7b", layer).rope for layer in range(4)] == [0, 0, 0, None]
    assert [attention("gpt-oss-20b", layer).window for layer in (0, 1)] == [128, 0]
    assert attention("granite-3.3-8b").scale == 0.0078125


def test_tables_and_limits() -> None:
    phi = read_spec(CONFIGS["Phi-4-mini"])[1]
    assert (phi.rope_switch, phi.max_positions, phi.ropes[0].rotary_dim) == (4096, 131072, 96)
    assert phi.ropes[0].attention_factor == pytest.approx(1.1902, abs=1e-4)
    assert read_spec(CONFIGS["Qwen2.5-7B-yarn"])[1].max_positions == 131072
    assert read_spec(CONFIGS["gpt-oss-20b"])[1].ropes[0].attention_factor == pytest.approx(1.3466, abs=1e-4)


def test_deepseek_v3_routes_and_scales_as_published() -> None:
    spec = read_spec(CONFIGS["DeepSeek-V3"])[1]
    moe, latent = spec.layers[3].mlp, spec.layers[3].attention
    assert isinstance(moe, Moe)
    assert isinstance(latent, LatentAttention)
    assert (moe.groups, moe.top_groups, moe.top_k, moe.scale) == (8, 4, 8, 2.5)
    assert not isinstance(spec.layers[2].mlp, Moe)
    # YaRN's correction of 40 times the length enters the scores squared, and cos and sin not at all.
    assert latent.scale == pytest.approx(192**-0.5 * 1.3689**2, rel=1e-4)
    assert spec.ropes[0].attention_factor == 1.0
    assert spec.cache_groups[0].block_shape(16) == (16, 576)
