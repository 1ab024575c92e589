"""SpecVerify and Sample on the CPU against the float64 reference that draws the same random numbers."""

from __future__ import annotations

import ctypes
import sys
from ctypes import byref, c_size_t, c_void_p
from pathlib import Path

import numpy as np
import pytest

from enginebay.plugins.load import library_path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gpu"))
from cuda_library import Context, SpecArgs, SpecDesc
from spec_reference import Sampling, verify

FLOAT32, FLOAT16 = 1, 2
POINTERS = [name for name, _ in SpecArgs._fields_ if name not in ("sequences", "rows")]


class Library:
    """eb_spec_verify_run of the CPU library over numpy arrays."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL(str(library_path()))

    def __call__(
        self, logits: np.ndarray, sequences: int, depth: int = 0, **inputs: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rows, vocab = logits.shape
        outputs = {
            "accepted": np.full(sequences, -77, np.int32),
            "path": np.full((sequences, max(depth, 1)), -77, np.int32)[:, :depth].copy(),
            "next_token": np.full(sequences, -77, np.int32),
        }
        arrays = {"logits": logits, **inputs, **outputs}
        args = SpecArgs(sequences, rows)
        for name, array in arrays.items():
            assert name in POINTERS
            setattr(args, name, None if array is None else array.ctypes.data)
        desc = SpecDesc(vocab, depth, FLOAT16 if logits.dtype == np.float16 else FLOAT32)
        message = ctypes.create_string_buffer(512)
        context = Context(1, 1, None, None, None, ctypes.addressof(message), 512)
        size = c_size_t()
        for status in (
            self.library.eb_spec_verify_workspace_size(
                byref(context), byref(desc), ctypes.c_int64(sequences), ctypes.c_int64(rows), byref(size)
            ),
            self.library.eb_spec_verify_run(
                byref(context), byref(desc), byref(args), c_void_p(), c_size_t(0)
            ),
        ):
            if status:
                raise ValueError(message.value.decode())
        return outputs["accepted"], outputs["path"], outputs["next_token"]


@pytest.fixture(scope="module")
def library() -> Library:
    return Library()


def arrays(settings: list[Sampling]) -> dict[str, np.ndarray]:
    return {
        "temperature": np.array([s.temperature for s in settings], np.float32),
        "top_k": np.array([s.top_k for s in settings], np.int32),
        "top_p": np.array([s.top_p for s in settings], np.float32),
        "min_p": np.array([s.min_p for s in settings], np.float32),
        "seeds": np.array([s.seed for s in settings], np.uint64),
        "positions": np.array([s.position for s in settings], np.int64),
    }


def random_settings(count: int, vocab: int, rng: np.random.Generator) -> list[Sampling]:
    return [
        Sampling(
            temperature=float(rng.choice([0, 0.25, 0.75, 1, 2, 2.0**-20])),
            top_k=int(rng.choice([0, -1, 1, 2, 7, vocab - 1, vocab + 5, 2**31 - 1])),
            top_p=float(rng.choice([1, 1, 0.5, 0.875, 0.0, 2.0**-30])),
            min_p=float(rng.choice([0, 0, 0.0625, 1])),
            seed=int(rng.integers(0, 2**63)),
            position=int(rng.integers(0, 2**40)),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("vocab", [1, 7, 1000, 20001])
def test_sample(library: Library, dtype: type, vocab: int) -> None:
    rng = np.random.default_rng()
    settings = random_settings(24, vocab, rng)
    logits = rng.normal(0, 2, (24, vocab)).astype(dtype)
    logits[0] = 1.5  # nothing but ties
    exact = logits.astype(np.float64)
    _, _, tokens = library(logits, 24, **arrays(settings))
    for row, s in enumerate(settings):
        _, token, clear = verify(exact[row : row + 1], [-1], [-1], None, s, 0)
        assert tokens[row] == token or clear < 1e-9


@pytest.mark.parametrize("chains", [True, False])
@pytest.mark.parametrize("dense", [True, False])
def test_verification(library: Library, chains: bool, dense: bool) -> None:
    rng = np.random.default_rng()
    sequences, vocab = 60, 50
    start, drafts, parents = [0], [], []
    for _ in range(sequences):
        nodes = int(rng.integers(1, 9))
        parents += [
            node - 1 if chains else int(rng.integers(0, node)) if node else -1 for node in range(nodes)
        ]
        drafts += rng.integers(0, vocab, nodes).tolist()
        start.append(start[-1] + nodes)
    rows = start[-1]
    settings = random_settings(sequences, vocab, rng)
    logits = rng.normal(0, 3, (rows, vocab)).astype(np.float32)
    for b in range(sequences):
        for row in range(start[b], start[b + 1]):
            if parents[row] >= 0 and rng.random() < 0.7:
                drafts[row] = int(np.argmax(logits[start[b] + parents[row]]))
    q = rng.dirichlet(np.ones(vocab), rows).astype(np.float32) if dense else None
    accepted, path, tokens = library(
        logits,
        sequences,
        8,
        row_start=np.array(start, np.int32),
        draft_tokens=np.array(drafts, np.int32),
        parents=None if chains else np.array(parents, np.int32),
        draft_probs=q,
        **arrays(settings),
    )
    for b in range(sequences):
        mine = slice(start[b], start[b + 1])
        probs = None if q is None else q[mine].astype(np.float64)
        expected, token, clear = verify(
            logits[mine].astype(np.float64), drafts[mine], parents[mine], probs, settings[b], 8
        )
        got = (path[b, : accepted[b]].tolist(), int(tokens[b]))
        assert got == (expected, token) or clear < 1e-6
        assert (path[b, accepted[b] :] == -1).all()


@pytest.mark.parametrize("greedy_draft", [False, True])
def test_the_distribution_is_kept(library: Library, greedy_draft: bool) -> None:
    """p = [.6, .3, .1], q = [.2, .5, .3]: the marginal is p; accepted: [1, .6, 1/3], p if greedy."""
    p, q = np.array([0.6, 0.3, 0.1]), np.array([0.2, 0.5, 0.3])
    rng = np.random.default_rng()
    count = 40_000
    drafts = np.ones(count, np.int32) if greedy_draft else rng.choice(3, count, p=q).astype(np.int32)
    accepted, _, tokens = library(
        np.tile(np.log(p).astype(np.float32), (2 * count, 1)),
        count,
        1,
        row_start=np.arange(0, 2 * count + 1, 2, dtype=np.int32),
        draft_tokens=np.stack([np.full(count, -1, np.int32), drafts], 1).reshape(-1),
        draft_probs=None if greedy_draft else np.tile(q.astype(np.float32), (2 * count, 1)),
        temperature=np.ones(count, np.float32),
        seeds=rng.integers(0, 2**62, count).astype(np.uint64),
    )
    took = accepted > 0
    first = np.where(took, drafts, tokens)
    assert np.abs(np.bincount(first, minlength=3) / count - p).max() < 4 * (0.25 / count) ** 0.5
    tried, taken = np.bincount(drafts, minlength=3), np.bincount(drafts[took], minlength=3)
    rate = np.divide(taken, tried, out=np.zeros(3), where=tried > 0)
    expected = np.array([0, 0.3, 0]) if greedy_draft else np.minimum(1, p / q)
    assert np.abs(rate - expected).max() < 0.02


def test_mixed_greedy_rows_and_unanswerable_ones(library: Library) -> None:
    """P03, P07: temperature 0 beside 1 and 1e-6; ties take the lowest id; NaN and empty rows give -1."""
    logits = np.zeros((5, 9), np.float32)
    logits[:, 3] = logits[:, 7] = 4
    logits[3, 0] = np.nan
    logits[4] = -np.inf
    _, _, tokens = library(logits, 5, temperature=np.array([0, 1e-6, 1, 1, 0], np.float32))
    assert tokens[0] == 3
    assert tokens[1] in (3, 7)
    assert tokens[2] >= 0
    assert tokens[3] == tokens[4] == -1


def test_penalties(library: Library) -> None:
    """S06: repetition over prompt and output, presence and frequency over the output; each row its own."""
    logits = np.array([[2, -1, 0.5, 0], [2, -1, 0.5, 0], [2, -1, 0.5, 0]], np.float32)
    library(
        logits,
        3,
        penalty_start=np.array([0, 3, 3, 5], np.int32),
        penalty_tokens=np.array([0, 1, 2, 0, 99], np.int32),
        penalty_counts=np.array([0, 0, 0, 3, 1], np.int32),
        repetition=np.array([2, 1, 1], np.float32),
        presence=np.array([1, 1, 0.5], np.float32),
        frequency=np.array([1, 1, 0.25], np.float32),
    )
    assert logits.tolist() == [[1, -2, 0.25, 0], [2, -1, 0.5, 0], [0.75, -1, 0.5, 0]]


def test_bad_input_is_refused(library: Library) -> None:
    logits = np.zeros((2, 4), np.float32)
    with pytest.raises(ValueError, match="without row_start"):
        library(logits, 1)
    with pytest.raises(ValueError, match="sequence 0 has rows 0 to 3 of 2"):
        library(
            logits,
            1,
            1,
            row_start=np.array([0, 3], np.int32),
            draft_tokens=np.zeros(2, np.int32),
        )
    with pytest.raises(ValueError, match="go together"):
        library(logits, 2, penalty_start=np.zeros(3, np.int32))


def node(op_type: str, inputs: dict[str, int], outputs: dict[str, int], **attributes: object) -> bytes:
    """A model of one `enginebay` node; inputs and outputs by name with their element types, of any shape."""
    from onnx import helper

    def infos(named: dict[str, int]) -> list[object]:
        return [helper.make_tensor_value_info(name, type_, None) for name, type_ in named.items() if name]

    model = helper.make_model(
        helper.make_graph(
            [helper.make_node(op_type, list(inputs), list(outputs), domain="enginebay", **attributes)],
            op_type,
            infos(inputs),
            infos(outputs),
        ),
        opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid("enginebay", 1)],
        ir_version=10,
    )
    return bytes(model.SerializeToString())


def test_the_onnx_runtime_ops_answer_as_the_library_does(library: Library) -> None:
    import onnxruntime
    from onnx import TensorProto

    f, i, w = TensorProto.FLOAT, TensorProto.INT32, TensorProto.INT64
    sampling = {"temperature": f, "top_k": i, "top_p": f, "min_p": f, "seeds": w, "positions": w}
    outputs = {"accepted": i, "path": i, "next_token": i}
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(library_path()))
    rng = np.random.default_rng()
    settings = random_settings(6, 40, rng)
    given = arrays(settings)
    logits = rng.normal(0, 3, (12, 40)).astype(np.float32)
    tree = {
        "row_start": np.arange(0, 13, 2, dtype=np.int32),
        "draft_tokens": rng.integers(0, 40, 12).astype(np.int32),
        "parents": np.tile([-1, 0], 6).astype(np.int32),
        "draft_probs": rng.dirichlet(np.ones(40), 12).astype(np.float32),
    }
    session = onnxruntime.InferenceSession(
        node(
            "SpecVerify",
            {"logits": f, "row_start": i, "draft_tokens": i, "parents": i, "draft_probs": f, **sampling},
            outputs,
            max_depth=1,
        ),
        options,
    )
    seeds = {"seeds": given["seeds"].astype(np.int64)}
    got = session.run(None, {"logits": logits, **tree, **given, **seeds})
    for a, b in zip(got, library(logits.copy(), 6, 1, **tree, **given), strict=True):
        assert np.array_equal(a, b)
    session = onnxruntime.InferenceSession(
        node("Sample", {"logits": f, **sampling}, {"next_token": i}), options
    )
    (tokens,) = session.run(None, {"logits": logits[:6], **given, **seeds})
    assert np.array_equal(tokens, library(logits[:6].copy(), 6, **given)[2])
