from __future__ import annotations

import json
from html.parser import HTMLParser
from itertools import product

import numpy as np
import pytest
from builder_support import LAYERS, VOCAB, PlainLibrary
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx_ir.passes.common import ShapeInferencePass

from enginebay.builder.build import BuildConfig, BuildError, build_engine
from enginebay.builder.exported import read_exported
from enginebay.builder.quant.evaluate import Logits, compare, exact_weights, quantised_weights
from enginebay.builder.quant.formats import QuantizationError, WeightFormat
from enginebay.builder.quant.interpreter import Batch
from enginebay.builder.quant.plan import RoundToNearest
from enginebay.builder.quant.recipes import Override, recipe
from enginebay.builder.quant.rtn import dequantize_rows, quantize_rows
from enginebay.builder.quant.search import LOGITS_STRIDE, Sensitivity, choose, measure
from enginebay.builder.quant.text import CalibrationConfig
from enginebay.builder.targets.ort_cpu import OrtCpu

B128, B64, B32, I8 = (
    WeightFormat("i4", 128),
    WeightFormat("i4", 64),
    WeightFormat("i4", 32, symmetric=False),
    WeightFormat("i8"),
)


def canonical(folder):
    source = read_exported(folder)
    ShapeInferencePass()(source.model)
    return source.model.graph


def tokens(seed=0, count=3, length=24):
    rng = np.random.default_rng(seed)
    return Batch(tuple(tuple(rng.integers(0, VOCAB, length).tolist()) for _ in range(count)))


def test_a_model_compared_with_itself(exported):
    graph, batch = canonical(exported()), tokens()
    error = compare(Logits(graph, batch, exact_weights), Logits(graph, batch, exact_weights), batch)
    assert error.perplexity == error.reference_perplexity
    assert error.mean_kl == 0
    assert error.greedy_match == 1
    assert error.tokens == 72


def test_perplexity_and_divergence_are_their_definitions(exported):
    """Rows longer than one chunk, sequences of different lengths."""
    graph = canonical(exported())
    rng = np.random.default_rng(1)
    batch = Batch(tuple(tuple(rng.integers(0, VOCAB, n).tolist()) for n in (2, 40, 7)))
    exact = Logits(graph, batch, exact_weights)
    rounded = Logits(graph, batch, quantised_weights(RoundToNearest(), recipe("int4")))
    error = compare(exact, rounded, batch)
    p, q = (
        (z := logits.rows(0, batch.tokens)) - np.log(np.exp(z).sum(1, keepdims=True))
        for logits in (exact, rounded)
    )
    start, nll = 0, []
    for sequence in batch.sequences:
        nll += [-q[start + i, sequence[i + 1]] for i in range(len(sequence) - 1)]
        start += len(sequence)
    assert error.perplexity == pytest.approx(np.exp(np.mean(nll)))
    assert error.mean_kl == pytest.approx((np.exp(p) * (p - q)).sum(1).mean())
    assert error.greedy_match == (p.argmax(1) == q.argmax(1)).mean()
    assert error.mean_kl > 0


def test_sensitivity_is_measured_at_the_output(exported):
    """The divergence with one layer alone rounded; nothing for weights that lie on the cheapest grid."""

    def edit(tensors):
        down = tensors["model.layers.0.mlp.down_proj.weight"]
        down[:] = np.round(down * 16).clip(-8, 7) / 16
        down[:, ::32] = -8 / 16

    graph, batch = canonical(exported(edit=edit, dtype=np.float32)), tokens()
    found = {s.layer: s for s in measure(graph, batch)}
    assert set(found) == {
        f"layers.{n}.{part}"
        for n in range(LAYERS)
        for part in ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.down")
    }
    assert found["layers.0.mlp.down"].options[0][2] == pytest.approx(0, abs=1e-9)

    def one_rounded(node):
        weights = exact_weights(node)
        if node.name != "layers.1.attention.qkv":
            return weights
        return dequantize_rows(quantize_rows(weights, found[node.name].options[0][0], "w"))

    p, q = (
        (z := Logits(graph, batch, w).rows(0, batch.tokens)) - np.log(np.exp(z).sum(1, keepdims=True))
        for w in (exact_weights, one_rounded)
    )
    alone = (np.exp(p) * (p - q)).sum(1)[::LOGITS_STRIDE].mean()
    assert found["layers.1.attention.qkv"].options[0][2] == pytest.approx(alone, rel=1e-3)
    assert alone > 1e-4
    for s in found.values():
        bits = [bits for _, bits, _ in s.options]
        kls = [kl for _, _, kl in s.options]
        assert bits == sorted(bits)
        assert kls == sorted(kls, reverse=True)
    assert B128 not in [fmt for fmt, _, _ in found["layers.0.attention.qkv"].options], (
        "128 does not divide 64"
    )


sensitivities = st.lists(
    st.tuples(st.integers(1, 50), st.floats(0, 1), st.floats(0.1, 0.9)).map(
        lambda t: Sensitivity(
            "l", t[0] * 64, ((B64, 4.25, t[1]), (B32, 5.0, t[1] * t[2]), (I8, 8.0, t[1] * t[2] / 50))
        )
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=80, deadline=None)
@given(sensitivities, st.floats(4.25, 8.5))
def test_a_mix_keeps_its_budget_and_is_near_the_best(found, bits):
    mix = choose(found, bits)
    total = sum(s.weights for s in found)
    assert mix.bits <= bits + 1e-9
    best = min(
        sum(option[2] for option in picks)
        for picks in product(*(s.options for s in found))
        if sum(s.weights * option[1] for s, option in zip(found, picks, strict=True)) <= bits * total
    )
    # Greedy loses at most what one more upgrade would have saved.
    assert best <= mix.expected_kl + 1e-12
    assert mix.expected_kl <= best + max(s.options[0][2] for s in found)


def test_a_budget_below_the_cheapest_formats_is_refused():
    with pytest.raises(
        QuantizationError, match=r"4 bits a weight cannot be reached: the cheapest formats take 4\.250"
    ):
        choose([Sensitivity("a", 64, ((B64, 4.25, 0.1), (B32, 5.0, 0.0)))], 4.0)


def test_more_bits_go_where_they_save_most():
    quiet = Sensitivity("quiet", 1000, ((B64, 4.25, 0.001), (B32, 5.0, 0.0)))
    loud = Sensitivity("loud", 1000, ((B64, 4.25, 0.5), (B32, 5.0, 0.0)))
    mix = choose([quiet, loud], 4.7)
    assert {o.pattern: o.format for o in mix.overrides} == {"quiet": B64, "loud": B32}


@pytest.fixture
def token_file(tmp_path):
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps([list(s) for s in tokens(4, 4, 40).sequences]))
    return CalibrationConfig(source=path)


class Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.text, self.tags, self.outside = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.outside += [value for key, value in attrs if key in ("src", "href")]

    def handle_data(self, data):
        self.text.append(data)


def test_a_searched_build_reports_what_it_did(exported, tmp_path, token_file, monkeypatch):
    monkeypatch.setattr(OrtCpu, "plugins", PlainLibrary())
    config = BuildConfig(quant="int4-gptq", bits=4.6, calibration=token_file)
    report = build_engine(exported(), tmp_path / "engine", config)
    document = json.loads((tmp_path / "engine" / "report.json").read_text())
    linear = [layer for layer in report.layers if layer.layer != "lm_head"]
    weights = sum(layer.shape[0] * layer.shape[1] for layer in linear)
    bits = sum(x.format.bits_per_weight(x.shape[1]) * x.shape[0] * x.shape[1] for x in linear) / weights
    assert bits == pytest.approx(document["search"]["bits"])
    assert 4.25 <= bits <= 4.6
    assert len({layer.format.key for layer in linear}) > 1
    assert {layer.method for layer in linear} == {"gptq"}
    page = Page()
    page.feed((tmp_path / "engine" / "report.html").read_text())
    text = " ".join(page.text)
    for words in ("layers.1.mlp.down", "gptq", "Sensitivity", "bits a weight", "no residual Add precedes it"):
        assert words in text
    assert "script" not in page.tags
    assert page.outside == [], "self-contained"


def test_the_page_escapes_names():
    from enginebay.builder.report_html import page

    document = {
        "source": "<script>alert(1)</script>",
        "recipe": "int4",
        "target": "ort-cpu",
        "nodes": 1,
        "seconds": 1.0,
        "weight_bytes": 1,
        "source_bytes": 1,
        "bits_per_weight": 4.0,
        "error": None,
        "engine_error": None,
        "cache": {"groups": [], "scales": {}},
        "search": None,
        "dominant": [],
        "layers": [],
        "rewrites": [],
    }
    assert "<script>" not in page(document)


@pytest.mark.parametrize(
    ("text", "override"),
    [
        ("layers.0.*=i8", Override("layers.0.*", I8)),
        ("*.mlp.down=i4.b32.asym", Override("*.mlp.down", B32)),
        ("lm_head=i4.b64", Override("lm_head", B64)),
        ("a=f16", Override("a", WeightFormat("f16"))),
        ("a=i8.b32", Override("a", WeightFormat("i8", 32))),
    ],
)
def test_overrides_are_read_as_they_are_written(text, override):
    assert Override.parse(text) == override
    assert WeightFormat.from_key(override.format.key) == override.format


@pytest.mark.parametrize(
    "text", ["layers.0", "=i8", "a=", "a=i5", "a=i4", "a=i4.b0", "a=f16.b32", "a=i4.b64.odd"]
)
def test_an_override_that_cannot_be_read_is_quoted(text):
    with pytest.raises(QuantizationError, match=r"override|weight format"):
        Override.parse(text)


def test_options_of_a_search_are_checked():
    with pytest.raises(BuildError, match=r"bits is 0\.5"):
        BuildConfig(bits=0.5)
    with pytest.raises(BuildError, match="evaluate is -1"):
        BuildConfig(evaluate=-1)
