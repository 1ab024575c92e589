"""The real engine: bit for bit the same whatever the schedule, caches in place, refusals."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest
from fakes import LIMITS, Collector
from tiny_engine import VOCAB

from enginebay.builder.manifest import EngineManifest, FileRecord, ManifestError
from enginebay.triton_repo.runtime.engine import StepInputs
from enginebay.triton_repo.runtime.kv_manager import Namespace
from enginebay.triton_repo.runtime.loop import EngineLoop, LoopConfig
from enginebay.triton_repo.runtime.ort_engine import EngineLoadError, EngineOptions, OrtEngine
from enginebay.triton_repo.runtime.pack import Packer
from enginebay.triton_repo.runtime.plan import Chunk, StepPlan
from enginebay.triton_repo.runtime.request import Request, SamplingParams
from enginebay.triton_repo.runtime.scheduler import SchedulerConfig
from enginebay.triton_repo.runtime.sequence import Sequence

EngineFolder = Callable[..., Path]
FORMATS = [
    ("fp32", "auto"),
    ("fp16", "auto"),
    ("int8", "auto"),
    ("int4", "auto"),
    ("fp32", "bf16"),
    ("int4", "fp16"),
    ("int4", "int8"),
    ("fp16", "fp8"),
    ("int4", "int4"),
]
SERVED = [("fp32", "auto"), ("int4", "auto"), ("int4", "int8"), ("int4", "fp8"), ("int4", "int4")]


@cache
def loaded(folder: Path) -> OrtEngine:
    return OrtEngine(folder, EngineOptions(threads=2, num_blocks=64))


def chunk(tokens: np.ndarray, start: int, end: int, blocks: np.ndarray) -> Chunk:
    """Tokens [start, end) of a sequence in these blocks, with logits for all of them."""
    request = Request("r", tuple(tokens.tolist()))
    sequence = Sequence(
        request,
        max_new_tokens=1,
        arrival=0,
        rank=0,
        stop_ids=frozenset(),
        namespace=Namespace(),
        limits=LIMITS,
    )
    return Chunk(sequence, start, tokens[start:end], blocks, samples=end - start)


def run(engine: OrtEngine, chunks: list[Chunk]) -> list[np.ndarray]:
    logits = engine.run(Packer(engine.limits).pack(StepPlan(tuple(chunks)))).copy()
    return np.split(logits, np.cumsum([len(c.tokens) for c in chunks])[:-1])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("quant", "kv_cache"), FORMATS)
def test_logits_are_bit_equal_alone_and_in_any_mixture(
    engine_folder: EngineFolder, quant: str, kv_cache: str, seed: int
) -> None:
    engine = loaded(engine_folder(quant, kv_cache))
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 61, rng.integers(2, 6)).tolist()
    sequences = [rng.integers(0, VOCAB, n).astype(np.int32) for n in lengths]
    blocks = rng.permutation(60).astype(np.int32)
    tables = [blocks[i * 4 : i * 4 + 4] for i in range(len(sequences))]
    own = np.arange(60, 64, dtype=np.int32)
    expected = [run(engine, [chunk(tokens, 0, len(tokens), own)])[0] for tokens in sequences]
    done = [0] * len(sequences)
    found: list[list[np.ndarray]] = [[] for _ in sequences]
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        step, ends = [], {}
        for index, tokens in enumerate(sequences):
            count = min(int(rng.choice([0, 1, 1, 2, 7, 17])), lengths[index] - done[index])
            if count:
                ends[index] = done[index] + count
                step.append(chunk(tokens, done[index], ends[index], tables[index]))
        if step:
            for (index, end), rows in zip(ends.items(), run(engine, step), strict=True):
                found[index].append(rows)
                done[index] = end
    for index, rows in enumerate(found):
        assert np.isfinite(expected[index]).all()
        assert np.array_equal(np.concatenate(rows), expected[index])


@pytest.mark.parametrize(("quant", "kv_cache"), SERVED)
def test_tokens_are_the_same_alone_batched_chunked_preempted_and_cached(
    engine_folder: EngineFolder, quant: str, kv_cache: str
) -> None:
    rng = np.random.default_rng(4)
    stem = rng.integers(0, VOCAB, 40).tolist()
    requests = [
        Request(
            f"r{i}",
            tuple(stem[: 5 + 5 * i] + rng.integers(0, VOCAB, 3).tolist()),
            SamplingParams(
                max_tokens=40,
                ignore_eos=True,
                temperature=[0.0, 1.0][i % 2],
                top_p=0.9,
                repetition_penalty=1.1,
                seed=i,
                logprobs=1,
            ),
        )
        for i in range(7)
    ]

    def serve(blocks: int, scheduler: SchedulerConfig, *, together: bool) -> tuple[dict, int, int]:
        engine = OrtEngine(engine_folder(quant, kv_cache), EngineOptions(threads=2, num_blocks=blocks))
        sink = Collector()
        loop = EngineLoop(engine, None, sink, LoopConfig(scheduler=scheduler))
        for request in requests:
            loop.submit(request)
            if not together:
                sink.final(request.id)
        for request in requests:
            assert sink.final(request.id, timeout=60).finish_reason == "length"
        stats = loop.stats()
        loop.close()
        results = {
            r.id: (sink.tokens(r.id), [item.logprob for o in sink.of(r.id) for item in o.logprobs])
            for r in requests
        }
        return results, stats.preemptions, stats.prefix_hit_tokens

    alone, _, hits = serve(64, SchedulerConfig(prefix_caching=False), together=False)
    assert hits == 0
    batched, _, _ = serve(64, SchedulerConfig(prefix_caching=False), together=True)
    chunked, _, _ = serve(64, SchedulerConfig(max_step_tokens=9), together=True)
    preempted, preemptions, _ = serve(12, SchedulerConfig(prefix_caching=False), together=True)
    assert preemptions > 0
    cached, _, hits = serve(64, SchedulerConfig(), together=False)
    assert hits > 0
    assert alone == batched == chunked == preempted == cached


@pytest.mark.parametrize(("quant", "kv_cache"), FORMATS)
def test_the_probe_leaves_a_clean_pool(engine_folder: EngineFolder, quant: str, kv_cache: str) -> None:
    engine = OrtEngine(engine_folder(quant, kv_cache), EngineOptions(threads=1, num_blocks=3))
    assert len(engine._pools) == 2
    assert all(not pool.any() for pool in engine._pools)


def test_steps_without_logits_and_steps_with_many(engine_folder: EngineFolder) -> None:
    engine = loaded(engine_folder("fp32"))
    tokens = np.arange(90, dtype=np.int32)
    whole = chunk(tokens, 0, 90, np.arange(6, dtype=np.int32))
    assert run(engine, [replace(whole, samples=0)])[0].shape == (0, VOCAB)
    assert run(engine, [whole])[0].shape == (90, VOCAB)
    assert run(engine, [replace(whole, samples=1)])[0].shape == (1, VOCAB)


def test_a_block_outside_the_pool_is_an_error_and_the_engine_goes_on(engine_folder: EngineFolder) -> None:
    engine = loaded(engine_folder("fp32"))
    tokens = np.arange(5, dtype=np.int32)
    good = chunk(tokens, 0, 5, np.array([3], np.int32))
    expected = run(engine, [good])[0]
    with pytest.raises(Exception, match=r"slot_mapping\[0\] is 1024"):
        run(engine, [chunk(tokens, 0, 5, np.array([64], np.int32))])
    assert np.array_equal(run(engine, [good])[0], expected)


def test_the_cache_budget_decides_the_blocks(engine_folder: EngineFolder) -> None:
    folder = engine_folder("fp32")
    block = 2 * 2 * 16 * 2 * 16 * 4  # layers, k and v, tokens, heads, size, bytes
    assert OrtEngine(folder, EngineOptions(cache_bytes=10 * block + 5)).limits.num_blocks == 10
    # More than 8 sequences of 256 tokens can never be used.
    assert OrtEngine(folder).limits.num_blocks == 8 * 256 // 16
    with pytest.raises(EngineLoadError, match=f"{block} bytes"):
        OrtEngine(folder, EngineOptions(cache_bytes=block - 1))


def copied(folder: Path, out: Path) -> Path:
    shutil.copytree(folder, out)
    return out


def test_an_engine_that_does_not_write_its_cache_is_refused(
    engine_folder: EngineFolder, tmp_path: Path
) -> None:
    """The graph is replaced by one that hands layer 1's cache through untouched."""
    folder = copied(engine_folder("fp32"), tmp_path / "engine")
    model = onnx.load(folder / "engine.onnx", load_external_data=False)
    attention = [node for node in model.graph.node if node.op_type == "PagedAttention"][1]
    attention.output[1] = "unused_cache"
    at = list(model.graph.node).index(attention) + 1
    model.graph.node.insert(at, onnx.helper.make_node("Identity", ["cache.1"], ["cache_out.1"]))
    onnx.save(model, folder / "engine.onnx")
    record_again(folder)
    with pytest.raises(Exception, match=r"layers\.1"):
        OrtEngine(folder, EngineOptions(num_blocks=4))


def test_the_probe_names_the_layer_that_is_not_updated_in_place(
    engine_folder: EngineFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = OrtEngine.run

    def forgetful(self: OrtEngine, inputs: StepInputs) -> np.ndarray:
        before = self._pools[1].copy()
        logits = real(self, inputs)
        self._pools[1][...] = before
        return logits

    monkeypatch.setattr(OrtEngine, "run", forgetful)
    with pytest.raises(EngineLoadError, match="layer 1 does not write its cache in place"):
        OrtEngine(engine_folder("fp32"), EngineOptions(num_blocks=4))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        (("limits", "max_batch"), 0, r"limits\.max_batch: 0"),
        (("limits", "max_step_tokens"), -1, r"limits\.max_step_tokens: -1"),
        (("limits", "max_sequence"), 0, r"limits\.max_sequence: 0"),
        (("limits", "vocab_size"), 2**40, r"limits\.vocab_size: 1099511627776"),
        (("cache_groups", 0, "block_size"), 0, r"block_size: 0"),
        (("cache_groups", 0, "block_size"), 17, r"block_shape: .* 17 tokens"),
        (("cache_groups", 0, "block_shape"), [2, 16, 0, 16], r"block_shape: \[2, 16, 0, 16\]"),
        (("limits", "max_sequence"), 2**31 - 1, r"limits\.max_sequence: 2147483647, but the model has"),
        (("weight_bytes",), 1, r"weight_bytes: 1, but files has"),
        (("cache_groups", 0, "block_shape"), [16, 16], r"block_shape: "),
        (("cache_groups", 0, "layers"), [], r"layers: empty"),
    ],
)
def test_numbers_that_no_engine_can_have_are_named(
    engine_folder: EngineFolder, tmp_path: Path, key: tuple[str | int, ...], value: object, words: str
) -> None:
    folder = copied(engine_folder("int4"), tmp_path / "engine")
    path = folder / "manifest.json"
    document = json.loads(path.read_text())
    inner = document
    for part in key[:-1]:
        inner = inner[part]
    inner[key[-1]] = value
    path.write_text(json.dumps(document))
    with pytest.raises(ManifestError, match=rf"manifest\.json: .*{words}"):
        OrtEngine(folder)


def test_a_manifest_that_agrees_with_itself_but_not_with_the_graph_is_refused(
    engine_folder: EngineFolder, tmp_path: Path
) -> None:
    folder = copied(engine_folder("int4"), tmp_path / "engine")
    path = folder / "manifest.json"
    whole = path.read_text()
    document = json.loads(whole)
    document["cache_groups"][0]["block_shape"][2] = document["model"]["cache_groups"][0]["kv_heads"] = 1
    path.write_text(json.dumps(document))
    with pytest.raises(
        EngineLoadError, match=r"cache\.0 has the shape .*says \[2, 16, 1, 16\] behind the first"
    ):
        OrtEngine(folder, EngineOptions(num_blocks=4))
    document = json.loads(whole)
    document["limits"]["vocab_size"] = document["model"]["vocab_size"] = 8
    path.write_text(json.dumps(document))
    with pytest.raises(EngineLoadError, match=r"logits has the shape .*says \[8\] behind the first"):
        OrtEngine(folder, EngineOptions(num_blocks=4))


def test_more_than_there_is_memory_for_is_named(engine_folder: EngineFolder, tmp_path: Path) -> None:
    folder = copied(engine_folder("int4"), tmp_path / "engine")
    with pytest.raises(
        EngineLoadError, match=r"cache pools of \[1152921504606846976, 2, 16, 2, 16\] float16 do not"
    ):
        OrtEngine(folder, EngineOptions(num_blocks=2**60))


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"x" * 100])
def test_scales_that_are_none_are_named(engine_folder: EngineFolder, tmp_path: Path, content: bytes) -> None:
    folder = copied(engine_folder("fp32", "tiers"), tmp_path / "engine")
    (folder / "cache_scales.npz").write_bytes(content)
    record_again(folder)
    with pytest.raises(EngineLoadError, match=r"cache_scales\.npz: not the scales of a cache"):
        OrtEngine(folder)


def test_scales_of_another_shape_are_named(engine_folder: EngineFolder, tmp_path: Path) -> None:
    folder = copied(engine_folder("fp32", "tiers"), tmp_path / "engine")
    ones = np.ones((2, 1, 16), np.float32)
    np.savez(folder / "cache_scales.npz", **{"cache.0": ones, "cache.1": ones})
    record_again(folder)
    with pytest.raises(EngineLoadError, match=r"cache\.0 is float32 \[2, 1, 16\], but manifest\.json says"):
        OrtEngine(folder)


def record_again(folder: Path) -> None:
    """The manifest of what the files are now."""
    manifest = EngineManifest.load(folder)
    replace(manifest, files=tuple(FileRecord.of(folder / record.name) for record in manifest.files)).save(
        folder
    )


def test_another_version_of_the_runtime_is_refused(engine_folder: EngineFolder, tmp_path: Path) -> None:
    folder = copied(engine_folder("int4"), tmp_path / "engine")
    manifest = EngineManifest.load(folder)
    replace(manifest, target=replace(manifest.target, library_version="0.0.1")).save(folder)
    with pytest.raises(ManifestError, match=r"0\.0\.1"):
        OrtEngine(folder)


def test_a_short_sidecar_is_refused(engine_folder: EngineFolder, tmp_path: Path) -> None:
    folder = copied(engine_folder("int4"), tmp_path / "engine")
    with (folder / "weights.bin").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(ManifestError, match=r"weights\.bin"):
        OrtEngine(folder)


def test_a_folder_that_is_no_engine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="not an engine folder"):
        OrtEngine(tmp_path)


def test_a_moved_folder_loads(engine_folder: EngineFolder, tmp_path: Path) -> None:
    folder = copied(engine_folder("int4"), tmp_path / "elsewhere")
    tokens = np.arange(20, dtype=np.int32)
    blocks = np.arange(2, dtype=np.int32)
    here = run(OrtEngine(folder, EngineOptions(num_blocks=4)), [chunk(tokens, 0, 20, blocks)])[0]
    assert np.array_equal(here, run(loaded(engine_folder("int4")), [chunk(tokens, 0, 20, blocks)])[0])
