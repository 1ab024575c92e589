"""ModelSpec: JSON round trip, refusals, and configs read key by key."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from enginebay.export.config import Config
from enginebay.export.errors import UnsupportedModelError
from enginebay.export.families import read_spec
from enginebay.export.rope import frequencies, read_rope, rope_tables, table_rows
from enginebay.export.spec import Attention, LatentAttention, Mlp, ModelSpec, Moe, SpecError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}


def test_round_trip_keeps_every_kind_of_layer() -> None:
    _, spec = read_spec(LLAMA)
    latent = LatentAttention("latent_attention", 4, 0, 16, 8, 4, 8, 0.3, 1e-6)
    moe = Moe("moe", 8, 2, 12, "silu", "sigmoid", True, groups=2, shared=Mlp("mlp", 5, "gelu"))
    layers = (replace(spec.layers[0], mlp=moe), replace(spec.layers[1], attention=latent, parallel=True))
    spec = replace(spec, layers=layers)
    assert ModelSpec.from_json(spec.to_json()) == spec


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        ({"schema": 99}, "schema 99"),
        ({"surprise": 1}, "surprise"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"layers": []}, "no layers"),
        ({"final_norm": {"kind": "batch", "epsilon": 1e-5}}, "final_norm.kind is 'batch'"),
    ],
)
def test_a_spec_that_cannot_be_is_refused(edit: dict[str, Any], words: str) -> None:
    document = json.loads(read_spec(LLAMA)[1].to_json())
    with pytest.raises(SpecError, match=words):
        ModelSpec.from_json(json.dumps({**document, **edit}))


def test_heads_and_cache_groups_are_checked() -> None:
    with pytest.raises(SpecError, match="4 heads are not a multiple of 3"):
        read_spec({**LLAMA, "num_key_value_heads": 3})
    _, spec = read_spec(LLAMA)
    with pytest.raises(SpecError, match="cache groups"):
        replace(spec, cache_groups=(replace(spec.cache_groups[0], layers=(0,)),))
    assert spec.cache_groups[0].block_shape(16) == (2, 16, 2, 16)
    assert spec.group_of(1) == 0


def test_head_dim_falls_back_to_the_quotient_only_where_it_is_absent_or_null() -> None:
    sizes = []
    for values in (LLAMA, {**LLAMA, "head_dim": None}, {**LLAMA, "head_dim": 32}):
        attention = read_spec(values)[1].layers[0].attention
        assert isinstance(attention, Attention)
        sizes.append((attention.head_dim, attention.scale))
    assert sizes == [(16, 0.25), (16, 0.25), (32, 32**-0.5)]


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        ({"architectures": ["BertModel"]}, "'BertModel' is not supported: it is not a causal"),
        (
            {"architectures": ["MambaForCausalLM"]},
            "'MambaForCausalLM' is not supported: it may export with --generic.*Supported: Llama",
        ),
        ({"architectures": []}, "must name exactly one"),
        ({"model_type": "mistral"}, "goes with model_type 'llama', it says 'mistral'"),
        ({"use_magic": 7}, "'use_magic': 7"),
        ({"hidden_act": "mish"}, "'hidden_act' is 'mish'"),
        ({"hidden_size": None}, "no 'hidden_size'"),
        ({"hidden_size": "64"}, "must be an integer"),
        ({"attention_bias": 1}, "must be true or false"),
        ({"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, "'rope_type' is 'spiral'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "no 'factor'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "at least 1"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "twist": 3}}, "'twist': 3"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, "does not divide hidden_size 64"),
    ],
)
def test_what_the_exporter_does_not_know_is_refused_by_name(edit: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        read_spec({**LLAMA, **edit})


ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "yarn_explicit": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "attention_factor": 0.7,
        "beta_fast": 24.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "yarn_mscale": {
        "rope_type": "yarn",
        "factor": 16.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 32,
    },
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0 + i / 9 for i in range(8)],
        "long_factor": [2.0 + i for i in range(8)],
        "original_max_position_embeddings": 32,
    },
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
}


@pytest.mark.parametrize("style", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("name", ROPES)
def test_frequencies_and_attention_factor_are_those_of_transformers(name: str, style: str) -> None:
    parameters = ROPES[name]
    values = {**LLAMA, "rope_theta": 5e4}
    if style == "rope_parameters":
        del values["rope_theta"]
        values[style] = {**parameters, "rope_theta": 5e4}
    else:
        values[style] = parameters
    rope = read_rope(Config(values), 16)
    oracle = LlamaConfig(**{**LLAMA, "rope_parameters": {**parameters, "rope_theta": 5e4}})
    if name == "default":
        expected, factor = 5e4 ** -(np.arange(0, 16, 2) / 16), 1.0
        assert np.allclose(frequencies(rope, 100), expected, rtol=1e-6)
    else:
        for length in (20, 128, 200) if rope.switches else (128,):
            tensor, factor = ROPE_INIT_FUNCTIONS[rope.kind](oracle, torch.device("cpu"), seq_len=length)
            assert np.allclose(frequencies(rope, length), tensor.numpy(), rtol=1e-5), length
    assert rope.attention_factor == pytest.approx(factor)


def test_yarn_factors_reported_as_wrong_elsewhere() -> None:
    def factor(name: str) -> float:
        return read_rope(
            Config({"rope_parameters": ROPES[name], "max_position_embeddings": 128}), 16
        ).attention_factor

    assert factor("yarn") == pytest.approx(1.1386, abs=1e-4)
    assert factor("yarn_mscale") == 1.0
    assert factor("yarn_explicit") == 0.7


def test_a_rope_that_switches_has_its_short_rows_first() -> None:
    rope = read_rope(Config({"rope_parameters": ROPES["longrope"], "max_position_embeddings": 48}), 16)
    cos = np.concatenate([cos for cos, _ in rope_tables(rope, 48)])
    assert cos.shape == (table_rows(rope, 48), 8) == (80, 8)
    short, long = frequencies(rope, 32), frequencies(rope, 33)
    assert np.allclose(cos[31], rope.attention_factor * np.cos(31 * short), atol=1e-6)
    assert np.allclose(cos[32 + 5], rope.attention_factor * np.cos(5 * long), atol=1e-6)


@settings(deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(sorted(LLAMA)), st.one_of(st.none(), st.integers(-3, 300), st.sampled_from(["", "x"]))
    )
)
def test_any_config_gives_a_spec_or_a_named_refusal(edit: dict[str, Any]) -> None:
    try:
        _, spec = read_spec({**LLAMA, **edit})
    except (UnsupportedModelError, SpecError):
        return
    assert ModelSpec.from_json(spec.to_json()) == spec
