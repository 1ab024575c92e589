"""Scales of FP8 caches in checkpoints: read, checked, and left alone by caches of other formats."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tiny_llama import TinyLlama, random_weight

from enginebay.builder.build import BuildConfig, build_engine
from enginebay.export.errors import CheckpointError
from enginebay.export.exporter import export_model
from enginebay.export.spec import CacheScales, ModelSpec

MODEL = TinyLlama(hidden=32, inner=64, heads=4, kv_heads=2, head_dim=16, layers=2, vocab=64)


def checkpoint(folder: Path, scales: dict[str, list[float] | float]) -> Path:
    """A random model; `scales` by name below model.layers, such as 0.self_attn.k_scale."""
    rng = np.random.default_rng(0)
    tensors = {
        "model.embed_tokens.weight": random_weight(rng, MODEL.vocab, MODEL.hidden),
        "lm_head.weight": random_weight(rng, MODEL.vocab, MODEL.hidden),
        "model.norm.weight": np.ones(MODEL.hidden, np.float32),
    }
    for layer in range(MODEL.layers):
        at = f"model.layers.{layer}"
        for name, rows, columns in MODEL.projections():
            tensors[f"{at}.{name}.weight"] = random_weight(rng, rows, columns)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}.{norm}.weight"] = np.ones(MODEL.hidden, np.float32)
    tensors |= {f"model.layers.{name}": np.array(value, np.float32) for name, value in scales.items()}
    return MODEL.save(folder, tensors, eos=2)


PAIR = {"0.self_attn.k_scale": [0.05], "0.self_attn.v_scale": [0.1]}
READ = (CacheScales(0, (float(np.float32(0.05)),), (float(np.float32(0.1)),)),)


@pytest.mark.parametrize("at", ["self_attn", "self_attn.attn"])
def test_a_layers_two_scales_go_into_the_spec(tmp_path, at):
    scales = {f"0.{at}.k_scale": [0.05], f"0.{at}.v_scale": [0.1]}
    report = export_model(checkpoint(tmp_path / "hf", scales), tmp_path / "out")
    assert report.spec.cache_scales == READ
    assert report.ignored == ()
    assert ModelSpec.from_json((tmp_path / "out" / "spec.json").read_text()).cache_scales == READ


def test_the_projections_may_carry_them_one_a_head(tmp_path):
    scales = {"1.self_attn.k_proj.k_scale": [0.5, 0.25], "1.self_attn.v_proj.v_scale": 0.125}
    report = export_model(checkpoint(tmp_path / "hf", scales), tmp_path / "out")
    assert report.spec.cache_scales == (CacheScales(1, (0.5, 0.25), (0.125,)),)


def test_one_scale_for_keys_and_values_is_both(tmp_path):
    report = export_model(checkpoint(tmp_path / "hf", {"1.self_attn.kv_scale": 0.25}), tmp_path / "out")
    assert report.spec.cache_scales == (CacheScales(1, (0.25,), (0.25,)),)


@pytest.mark.parametrize(
    ("scales", "words"),
    [
        ({**PAIR, "0.self_attn.k_scale": [0.0]}, r"self_attn\.k_scale' has scale"),
        ({**PAIR, "0.self_attn.k_scale": [-1.0]}, r"self_attn\.k_scale' has scale"),
        ({**PAIR, "0.self_attn.v_scale": [np.nan]}, r"self_attn\.v_scale' has scale"),
        ({**PAIR, "0.self_attn.v_scale": [np.inf]}, r"self_attn\.v_scale' has scale"),
        ({"0.self_attn.k_scale": [0.05]}, "layer 0 has a k_scale for its cache and no v_scale"),
        ({"1.self_attn.v_scale": [0.05]}, "layer 1 has a v_scale for its cache and no k_scale"),
        ({"0.self_attn.kv_scale": [1.0, 2.0, 3.0]}, "3 scales; expected one, or one for each of 2 heads"),
        ({"2.self_attn.kv_scale": [1.0]}, "is of layer 2, the model has 2"),
    ],
)
def test_scales_that_are_none_or_do_not_fit_are_named(tmp_path, scales, words):
    with pytest.raises(CheckpointError, match=words):
        export_model(checkpoint(tmp_path / "hf", scales), tmp_path / "out")


def test_a_sixteen_bit_cache_leaves_them_alone(tmp_path):
    engines = {}
    for name, scales in (("with", PAIR), ("without", {})):
        export_model(checkpoint(tmp_path / f"hf-{name}", scales), tmp_path / f"exported-{name}")
        config = BuildConfig(quant="fp16", block_size=4)
        build_engine(tmp_path / f"exported-{name}", tmp_path / name, config)
        engines[name] = [(tmp_path / name / file).read_bytes() for file in ("engine.onnx", "weights.bin")]
    assert engines["with"] == engines["without"]
