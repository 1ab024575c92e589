"""Architectures without a family: traced, verified, built; and refused where the trace is not the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import transformers as hf
from export_support import NUM_BLOCKS, make_model, oracle_logits, save

from enginebay.builder.build import BuildConfig, build_engine
from enginebay.export import generic, traced
from enginebay.export.errors import UnsupportedModelError
from enginebay.export.exporter import export_model, is_current
from enginebay.export.generic import DivergenceError, export_traced
from enginebay.export.verify import ragged_logits
from enginebay.plugins.load import library_path
from enginebay.triton_repo.runtime.ort_engine import EngineOptions, OrtEngine

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}


@pytest.fixture(scope="module")
def stablelm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = hf.StableLmConfig(**SMALL, use_qkv_bias=True)
    return save(make_model(config), tmp_path_factory.mktemp("generic") / "model")


def test_an_unknown_decoder_exports_builds_and_runs(stablelm: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="StableLmForCausalLM"):
        export_model(stablelm, tmp_path / "exported")
    report = export_traced(stablelm, tmp_path / "exported", plugin_library=library_path())
    assert report.max_error < 1e-4
    onnx.checker.check_model(tmp_path / "exported" / "model.onnx")
    assert is_current(stablelm, tmp_path / "exported")
    built = build_engine(tmp_path / "exported", tmp_path / "engine", BuildConfig(quant="fp32", block_size=4))
    assert {"QuantLinear", "PagedAttention"} <= {
        node.split(":")[-1] for node in engine_ops(tmp_path / "engine")
    }
    assert built.manifest.weight_bytes > 0
    engine = OrtEngine(tmp_path / "engine", EngineOptions(num_blocks=NUM_BLOCKS, threads=1))
    model = hf.AutoModelForCausalLM.from_pretrained(
        stablelm, dtype=torch.float32, attn_implementation="eager"
    )
    rng = np.random.default_rng(1)
    sequences = [rng.integers(0, 97, length).tolist() for length in (31, 18, 5)]
    for tokens, logits in zip(sequences, ragged_logits(engine, sequences), strict=True):
        expected = oracle_logits(model, tokens)
        assert np.abs(logits - expected).max() < 1e-4 * max(1.0, expected.std())


def engine_ops(engine: Path) -> set[str]:
    return {node.op_type for node in onnx.load(engine / "engine.onnx", load_external_data=False).graph.node}


def test_a_graph_that_is_not_the_model_is_refused_with_its_layer(
    stablelm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = generic.canonicalise

    def dishonest(graph: Any, spec: Any) -> None:
        honest(graph, spec)
        node = generic.attention_nodes(graph)[1]
        node.attributes["scale"] = generic.ir.AttrFloat32("scale", 0.9)

    monkeypatch.setattr(generic, "canonicalise", dishonest)
    with pytest.raises(DivergenceError, match="layer 1 of 2 is the first whose attention differs"):
        export_traced(stablelm, tmp_path / "exported", plugin_library=library_path())
    assert not list(tmp_path.iterdir())


EXPERTS = {
    **SMALL,
    "intermediate_size": 64,
    "num_key_value_heads": 6,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
REFUSED: dict[str, tuple[Any, str]] = {
    # Bloom adds ALiBi to its scores and never asks the attention interface.
    "alibi": (hf.BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=4), "in layers .. of 1"),
    "no_attention": (hf.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1), "in layers .. of 1"),
    # A trace would hold the routing of its example alone.
    "experts": (hf.OlmoeConfig(**EXPERTS), "cannot be traced"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_traced_is_refused(name: str, tmp_path: Path) -> None:
    config, words = REFUSED[name]
    folder = save(make_model(config), tmp_path / "model")
    with pytest.raises(UnsupportedModelError, match=words):
        export_traced(folder, tmp_path / "out", plugin_library=library_path())
    assert not (tmp_path / "out").exists()


def test_nothing_of_the_model_stays_registered(stablelm: Path) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    traced.attention_outputs(traced.load_model(stablelm), [1, 2, 3])
    left = ALL_ATTENTION_FUNCTIONS.get("enginebay_trace")
    assert left.__closure__ is None
