"""What an engine rounds beside its weights is measured by running the engine."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from builder_support import VOCAB
from onnx_ir.passes.common import ShapeInferencePass
from tokenizers import Tokenizer, models, pre_tokenizers

from enginebay.builder.build import ENGINE, BuildConfig, build_engine
from enginebay.builder.exported import read_exported
from enginebay.builder.quant.agreement import engine_error
from enginebay.builder.quant.evaluate import Logits, log_softmax, quantised_weights
from enginebay.builder.quant.formats import QuantizationError
from enginebay.builder.quant.interpreter import Batch
from enginebay.builder.quant.plan import RoundToNearest
from enginebay.builder.quant.recipes import recipe
from enginebay.builder.quant.text import CalibrationConfig
from enginebay.builder.report import PAGE, REPORT
from enginebay.export.stepping import Stepper, Stream
from enginebay.triton_repo.runtime.ort_engine import EngineOptions, OrtEngine

RNG = np.random.default_rng(4)
BATCH = Batch(tuple(tuple(RNG.integers(0, VOCAB, n).tolist()) for n in (30, 17)))


def weights_in_float32(source, quant):
    model = read_exported(source).model
    ShapeInferencePass()(model)
    return Logits(model.graph, BATCH, quantised_weights(RoundToNearest(), recipe(quant)))


@pytest.mark.parametrize("quant", ["fp32", "fp8", "fp8-w8a8", "w4a8", "int4"])
@pytest.mark.parametrize("cache", ["fp32", "fp16", "int8"])
def test_the_engine_beside_its_own_weights(exported, tmp_path, quant, cache):
    """The same numbers as by the runtime, a step a sequence. Float weights and caches round nothing."""
    source, folder = exported(), tmp_path / "engine"
    np.save(tmp_path / "t.npy", RNG.integers(0, VOCAB, (4, 32)))
    config = BuildConfig(quant=quant, kv_cache=cache, block_size=4)
    calibration = replace(config.calibration, source=tmp_path / "t.npy")
    build_engine(source, folder, replace(config, calibration=calibration))
    reference = weights_in_float32(source, quant)
    error = engine_error(folder / ENGINE, 4, reference, BATCH)
    engine = OrtEngine(folder, EngineOptions(num_blocks=16))
    steps = [Stepper(engine).step([(Stream(list(s)), len(s))])[0].copy() for s in BATCH.sequences]
    ours = log_softmax(np.concatenate(steps).astype(np.float64))
    exact = log_softmax(reference.rows(0, BATCH.tokens))
    assert error.tokens == 47
    assert error.mean_kl == pytest.approx(
        (np.exp(exact) * (exact - ours)).sum(axis=1).mean(), rel=1e-6, abs=1e-12
    )
    assert error.greedy_agreement == (exact.argmax(axis=1) == ours.argmax(axis=1)).mean()
    if (quant, cache) in (("fp32", "fp32"), ("fp8", "fp32")):
        assert error.mean_kl < 1e-3 if quant == "fp8" else error.mean_kl < 1e-9  # fp8: its head is int8
    else:
        assert 0 < error.mean_kl < 0.05


def test_a_report_says_what_the_engine_rounds(exported, tmp_path):
    source = exported()
    words = {f"w{index}": index for index in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(source / "tokenizer.json"))
    np.save(tmp_path / "t.npy", RNG.integers(0, VOCAB, (4, 32)))
    config = BuildConfig(quant="w4a8", calibration=CalibrationConfig(source=tmp_path / "t.npy"))
    report = build_engine(source, tmp_path / "engine", replace(config, evaluate=64))
    document = json.loads((tmp_path / "engine" / REPORT).read_bytes())["engine_error"]
    assert set(document) == {"tokens", "perplexity", "mean_kl", "greedy_agreement"}
    assert report.engine_error is not None
    assert document["mean_kl"] == report.engine_error.mean_kl > 0
    assert (
        "greedy agreement of the engine against its own weights" in (tmp_path / "engine" / PAGE).read_text()
    )
    quiet = build_engine(source, tmp_path / "quiet", config)
    assert quiet.engine_error is None


def test_an_engine_that_gives_no_numbers_is_refused(exported, tmp_path):
    source = exported()
    build_engine(source, tmp_path / "engine", BuildConfig(quant="fp32", block_size=4))
    reference = weights_in_float32(source, "fp32")
    reference.rows = lambda start, stop: np.full((stop - start, VOCAB), np.nan)  # type: ignore[method-assign]
    with pytest.raises(QuantizationError, match=r"the engine cannot be evaluated: perplexity .* KL nan"):
        engine_error(tmp_path / "engine" / ENGINE, 4, reference, BATCH)
