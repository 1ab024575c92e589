"""Mixtures of experts in calibration: every expert on its own tokens, and those that none reaches."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from onnx_ir.passes.common import ShapeInferencePass
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from enginebay.builder.build import BuildConfig, build_engine
from enginebay.builder.exported import read_exported
from enginebay.builder.quant.evaluate import Logits, compare, exact_weights, quantised_weights
from enginebay.builder.quant.interpreter import Batch
from enginebay.builder.quant.plan import RoundToNearest
from enginebay.builder.quant.recipes import recipe
from enginebay.builder.quant.text import CalibrationConfig
from enginebay.export.exporter import export_model
from enginebay.export.stepping import Stepper, Stream
from enginebay.triton_repo.runtime.ort_engine import EngineOptions, OrtEngine

VOCAB, EXPERTS = 96, 4


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    torch.manual_seed(3)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        norm_topk_prob=True,
        tie_word_embeddings=False,
        decoder_sparse_step=1,
    )
    model = Qwen3MoeForCausalLM(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.copy_(torch.randn(parameter.shape) / parameter.shape[-1] ** 0.5)
            if name.endswith("layers.1.mlp.gate.weight"):
                parameter[3] = 0  # the last expert of layer 1 is chosen by hardly any token
                parameter[:3] *= 4
    folder = tmp_path_factory.mktemp("moe")
    model.save_pretrained(folder / "hf")
    export_model(folder / "hf", folder / "exported")
    return folder / "exported"


def sequences(seed, count=4, length=20):
    rng = np.random.default_rng(seed)
    return tuple(tuple(rng.integers(0, VOCAB, length).tolist()) for _ in range(count))


def canonical(folder):
    source = read_exported(folder)
    ShapeInferencePass()(source.model)
    return source.model.graph


def test_the_interpreter_routes_as_the_engine_does(exported, tmp_path):
    build_engine(exported, tmp_path / "engine", BuildConfig(quant="fp32"))
    engine = OrtEngine(tmp_path / "engine", EngineOptions(num_blocks=16))
    tokens = sequences(1)
    expected = Stepper(engine).step([(Stream(list(s)), len(s)) for s in tokens])
    actual = Logits(canonical(exported), Batch(tokens), exact_weights).rows(0, 80)
    np.testing.assert_allclose(actual, np.concatenate(expected), atol=2e-4)


def test_perplexity_sees_quantised_experts(exported):
    graph, batch = canonical(exported), Batch(sequences(2))
    exact = Logits(graph, batch, exact_weights)
    error = compare(exact, Logits(graph, batch, quantised_weights(RoundToNearest(), recipe("int4"))), batch)
    assert error.mean_kl > 1e-4
    assert error.perplexity != error.reference_perplexity


@pytest.mark.parametrize("quant", ["int4-gptq", "int4-awq"])
def test_experts_are_calibrated_on_their_own_tokens(exported, tmp_path, quant):
    tokens = tmp_path / "tokens.json"
    tokens.write_text(json.dumps(sequences(3)))
    config = BuildConfig(quant=quant, calibration=CalibrationConfig(source=tokens))
    report = build_engine(exported, tmp_path / "engine", config)
    methods = {layer.layer: layer.method for layer in report.layers}
    experts = {name: method for name, method in methods.items() if name.endswith(("moe.gate_up", "moe.down"))}
    assert len(experts) == 4
    assert all(method.startswith(quant.removeprefix("int4-")) for method in experts.values())
    engine = OrtEngine(tmp_path / "engine", EngineOptions(num_blocks=16))
    logits = Stepper(engine).step([(Stream(list(s)), len(s)) for s in sequences(3)])
    exact = Logits(canonical(exported), Batch(sequences(3)), exact_weights).rows(0, 80)
    # Rounding changes some choices of the router: near, not equal.
    assert np.corrcoef(np.concatenate(logits).ravel(), exact.ravel())[0, 1] > 0.9


def test_an_expert_that_no_token_reaches_is_rounded_and_said_so(exported, tmp_path):
    """One token, two experts of four: the others see nothing."""
    tokens = tmp_path / "tokens.json"
    tokens.write_text("[[7, 7]]")
    config = BuildConfig(quant="int4-gptq", calibration=CalibrationConfig(source=tokens))
    report = build_engine(exported, tmp_path / "engine", config)
    methods = [
        layer.method for layer in report.layers if "moe." in layer.layer and "router" not in layer.layer
    ]
    assert any("rtn where no token came" in method for method in methods)
    assert all(np.isfinite(layer.relative_error) and layer.relative_error < 0.3 for layer in report.layers)
