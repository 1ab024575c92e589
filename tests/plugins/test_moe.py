"""QuantMoE on the CPU: routing, grouped products and the promise, against a dense loop in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from enginebay.plugins import reference
from enginebay.plugins.load import KernelLibrary, PluginError
from enginebay.plugins.load_moe import MoeRunner

Floats = NDArray[np.float32]
TOKENS = [1, 2, 15, 16, 17, 63, 64, 65]
SHAPE = {"num_experts": 6, "top_k": 2, "hidden": 64, "intermediate": 96, "activation": "silu"}
ROUTING = (
    "top_k",
    "activation",
    "scoring",
    "renormalize",
    "num_groups",
    "top_groups",
    "routed_scale",
    "clamp",
)


class Case:
    """Random experts, packed and plain."""

    def __init__(
        self, library: KernelLibrary, seed: int = 0, *, format: str = "f32", **attributes: Any
    ) -> None:
        rng = np.random.default_rng(seed)
        self.attributes = {**SHAPE, **attributes}
        self.rng = rng
        experts, hidden, inner = (self.attributes[key] for key in ("num_experts", "hidden", "intermediate"))
        self.weights = {}
        packed = {}
        block = {"block_size": 32} if format in ("i8", "i4") else {}
        runner = MoeRunner(library, **self.attributes, format=format, **block)
        for (name, rows, columns), stride in zip(
            (("gate_up", 2 * inner, hidden), ("down", hidden, inner)), runner.strides(), strict=True
        ):
            plain, parts = [], []
            for _ in range(experts):
                values, arguments = self._values(rng, format, rows, columns)
                part = library.pack_linear(*arguments, format=format, **block)
                parts.append(np.pad(part, (0, stride - len(part))))
                plain.append(values)
            self.weights[name] = np.stack(plain).astype(np.float64)
            packed[name] = np.concatenate(parts)
        self.biases: dict[str, Floats | None] = {
            "correction_bias": None,
            "gate_up_bias": None,
            "down_bias": None,
        }
        self.runner, self.packed = runner, packed

    @staticmethod
    def _values(
        rng: np.random.Generator, format: str, rows: int, columns: int
    ) -> tuple[Floats, tuple[Any, ...]]:
        """Weights of about 1/sqrt(columns) and what pack_linear takes for them."""
        if format == "f32":
            values = (rng.normal(size=(rows, columns)) / columns**0.5).astype(np.float32)
            return values, (values,)
        if format == "f16":
            values = (rng.normal(size=(rows, columns)) / columns**0.5).astype(np.float16)
            return values.astype(np.float32), (values,)
        # Powers of two are scales that every layout holds exactly.
        scales = np.exp2(rng.integers(-9, -6, (rows, columns // 32))).astype(np.float32)
        low, high, zero, dtype = (-127, 128, 0, np.int8) if format == "i8" else (0, 16, 8, np.uint8)
        codes = rng.integers(low, high, (rows, columns)).astype(dtype)
        values = (codes.astype(np.float32) - zero) * np.repeat(scales, 32, axis=1)
        return values, (codes, scales)

    def inputs(self, tokens: int) -> tuple[Floats, Floats]:
        x = self.rng.normal(size=(tokens, self.attributes["hidden"])).astype(np.float32)
        logits = self.rng.normal(size=(tokens, self.attributes["num_experts"])).astype(np.float32)
        return x, logits

    def run(self, x: Floats, logits: Floats) -> Floats:
        return self.runner.run(x=x, router_logits=logits, **self.packed, **self.biases)

    def expected(self, x: Floats, logits: Floats) -> NDArray[np.float64]:
        biases = {k: None if v is None else v.astype(np.float64) for k, v in self.biases.items()}
        routing = {key: self.attributes[key] for key in ROUTING if key in self.attributes}
        return reference.moe(
            x.astype(np.float64), logits.astype(np.float64), **self.weights, **biases, **routing
        )


@pytest.mark.parametrize("tokens", TOKENS)
def test_any_number_of_tokens(library: KernelLibrary, tokens: int) -> None:
    case = Case(library, tokens)
    x, logits = case.inputs(tokens)
    np.testing.assert_allclose(case.run(x, logits), case.expected(x, logits), rtol=2e-5, atol=2e-6)


ROUTINGS: dict[str, dict[str, Any]] = {
    "renormalised": {"renormalize": 1, "top_k": 3},
    "sigmoid_groups": {
        "scoring": "sigmoid",
        "num_experts": 8,
        "num_groups": 4,
        "top_groups": 2,
        "top_k": 3,
        "renormalize": 1,
        "routed_scale": 2.5,
    },
    "softmax_groups": {"num_experts": 8, "num_groups": 4, "top_groups": 2, "top_k": 3},
    "softmax_of_the_chosen": {"scoring": "softmax_topk", "top_k": 4},
    "every_expert": {"top_k": 6},
    "clamped": {"clamp": 0.7},
    "gelu": {"activation": "gelu_tanh"},
    "odd_sizes": {"hidden": 37, "intermediate": 29, "num_experts": 5},
    "one_expert": {"num_experts": 1, "top_k": 1},
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", ROUTINGS)
def test_routing(library: KernelLibrary, name: str, bias: bool) -> None:
    case = Case(library, **ROUTINGS[name])
    experts, hidden, inner = (case.attributes[key] for key in ("num_experts", "hidden", "intermediate"))
    if bias:
        normal = case.rng.normal
        case.biases["gate_up_bias"] = normal(size=(experts, 2 * inner)).astype(np.float32)
        case.biases["down_bias"] = normal(size=(experts, hidden)).astype(np.float32)
        if case.attributes.get("scoring") == "sigmoid":
            case.biases["correction_bias"] = normal(size=experts).astype(np.float32)
    x, logits = case.inputs(19)
    np.testing.assert_allclose(case.run(x, logits), case.expected(x, logits), rtol=2e-5, atol=5e-6)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("favourite", [None, 4])
@pytest.mark.parametrize("format", ["f32", "f16", "i8", "i4"])
def test_a_token_alone_gives_the_same_bits(format: str, favourite: int | None, threads: int) -> None:
    """Also with all tokens on one expert, others empty, and runs of more than one unit of rows."""
    case = Case(KernelLibrary(threads=threads), format=format)
    x, logits = case.inputs(150)
    if favourite is not None:
        logits[:, favourite] += 50
        logits[:, 1] = -50
    together = case.run(x, logits)
    # int8 rows of the products: half a step of 1/127 of a block's largest value, in both layers.
    tolerance = 0.03 if format in ("i8", "i4") else 1e-4
    np.testing.assert_allclose(together, case.expected(x, logits), atol=tolerance * np.abs(together).max())
    for token in (0, 63, 64, 149):
        alone = case.run(x[token : token + 1], logits[token : token + 1])
        np.testing.assert_array_equal(alone[0], together[token])
    np.testing.assert_array_equal(case.run(x[::-1].copy(), logits[::-1].copy()), together[::-1])


def test_more_pairs_than_one_run_holds(library: KernelLibrary) -> None:
    case = Case(library, hidden=16, intermediate=16, top_k=6)
    x, logits = case.inputs(3000)
    together = case.run(x, logits)
    for token in (0, 1364, 1365, 1366, 2999):
        alone = case.run(x[token : token + 1], logits[token : token + 1])
        np.testing.assert_array_equal(alone[0], together[token])


def test_a_scale_for_each_row(library: KernelLibrary) -> None:
    """block_size 0 of an integer format is a row of either matrix."""
    rng = np.random.default_rng(1)
    runner = MoeRunner(library, **SHAPE, format="i8")
    x, logits = rng.normal(size=(2, 9, 64)).astype(np.float32)
    packed, weights = {}, {}
    for (name, rows, columns), stride in zip(
        (("gate_up", 192, 64), ("down", 64, 96)), runner.strides(), strict=True
    ):
        codes = rng.integers(-127, 128, (6, rows, columns)).astype(np.int8)
        scales = np.full((rows, 1), 2.0**-9, np.float32)
        parts = [library.pack_linear(part, scales, format="i8", block_size=columns) for part in codes]
        packed[name] = np.concatenate([np.pad(part, (0, stride - len(part))) for part in parts])
        weights[name] = codes.astype(np.float64) * 2.0**-9
    logits = logits[:, :6].copy()
    actual = runner.run(x=x, router_logits=logits, **packed)
    expected = reference.moe(
        x.astype(np.float64), logits.astype(np.float64), **weights, top_k=2, activation="silu"
    )
    np.testing.assert_allclose(actual, expected, atol=0.03 * np.abs(expected).max())


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "softmax_topk"])
def test_a_nan_stays_in_its_row(library: KernelLibrary, scoring: str) -> None:
    case = Case(library, scoring=scoring)
    x, logits = case.inputs(9)
    clean = case.run(x, logits)
    logits[3, 2] = np.nan
    dirty = case.run(x, logits)
    assert np.isnan(dirty[3]).all()
    np.testing.assert_array_equal(np.delete(dirty, 3, 0), np.delete(clean, 3, 0))


def test_weights_of_the_known_example(library: KernelLibrary) -> None:
    """Logits 2, 1, 0, -1 and two experts: .6439 and .2369, renormalised .7311 and .2689."""
    for renormalize, expected in ((0, (0.6439, 0.2369)), (1, (0.7311, 0.2689))):
        case = Case(library, num_experts=4, renormalize=renormalize, hidden=16, intermediate=16)
        x, _ = case.inputs(1)
        logits = np.array([[2, 1, 0, -1]], np.float32)
        each = [
            reference.moe(
                x.astype(np.float64), np.eye(4)[[e]] * 100, **case.weights, top_k=1, activation="silu"
            )
            for e in (0, 1)
        ]
        wanted = expected[0] * each[0] + expected[1] * each[1]
        np.testing.assert_allclose(case.run(x, logits), wanted, rtol=5e-4, atol=1e-4)


def test_equal_scores_go_to_the_lower_expert(library: KernelLibrary) -> None:
    case = Case(library, renormalize=1)
    x, logits = case.inputs(1)
    logits[:] = 0.5
    tied = case.run(x, logits)
    logits[0, :2] = 0.5, 0.5
    logits[0, 2:] = -5
    np.testing.assert_array_equal(tied, case.run(x, logits))


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({"top_k": 7}, "top_k 7 of 6 experts"),
        ({"num_groups": 4, "top_groups": 1}, "num_groups 4 does not divide num_experts 6"),
        ({"num_groups": 3, "top_groups": 1, "top_k": 3}, "top_k 3 experts from 1 of 3 groups"),
        ({"hidden": 0}, "hidden 0"),
        ({"format": "i4", "block_size": 32, "hidden": 48}, "not a multiple of block_size"),
        ({"clamp": -1.0}, "clamp -1"),
    ],
)
def test_what_cannot_be_is_refused(library: KernelLibrary, attributes: dict[str, Any], words: str) -> None:
    with pytest.raises(PluginError, match=words):
        MoeRunner(library, **{**SHAPE, "format": "f32", **attributes}).strides()
