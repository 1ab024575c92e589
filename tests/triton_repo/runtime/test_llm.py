"""The facade: from an engine folder to text."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from fakes import LIMITS, HashEngine, greedy_tokens
from tiny_engine import VOCAB
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from enginebay.triton_repo.runtime.llm import LLM
from enginebay.triton_repo.runtime.measure import bench_engine, measure_once
from enginebay.triton_repo.runtime.ort_engine import EngineOptions
from enginebay.triton_repo.runtime.request import RequestError, SamplingParams

EngineFolder = Callable[..., Path]


def test_generate_yields_the_models_tokens() -> None:
    with LLM(HashEngine(), None) as llm:
        streams = [llm.generate([i, i + 1], SamplingParams(max_tokens=10)) for i in range(4)]
        for index, stream in enumerate(streams):
            outputs = list(stream)
            tokens = [token for output in outputs for token in output.token_ids]
            assert tokens == greedy_tokens([index, index + 1], 10)
            assert [output.final for output in outputs] == [False] * (len(outputs) - 1) + [True]


def test_closing_the_iterator_cancels() -> None:
    with LLM(HashEngine(), None) as llm:
        stream = llm.generate([1], SamplingParams(max_tokens=120))
        next(stream)
        stream.close()
        assert llm.loop.drain(10)
        assert llm.loop.stats().ok + llm.loop.stats().cancelled == 1
        assert not llm._queues


def test_refusals_reach_the_caller() -> None:
    with LLM(HashEngine(), None) as llm:
        with pytest.raises(RequestError, match="max_tokens"):
            llm.generate([1], SamplingParams(max_tokens=0))
        assert not llm._queues


def test_with_a_sink_generate_is_not_available() -> None:
    with LLM(HashEngine(), None, sink=lambda outputs: None) as llm, pytest.raises(RuntimeError, match="sink"):
        llm.generate([1])


def test_a_folder_is_served_with_its_tokenizer(engine_folder: EngineFolder, tmp_path: Path) -> None:
    folder = tmp_path / "engine"
    shutil.copytree(engine_folder("int4"), folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[: VOCAB - 1]
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    with LLM.load(folder, options=EngineOptions(threads=1, num_blocks=16)) as llm:
        assert llm.tokenizer is not None
        assert llm.tokenizer.eos_ids == {2, 11}, "from generation_config.json"
        ids = llm.tokenizer.encode("Hello")
        outputs = list(llm.generate(ids, SamplingParams(max_tokens=30, ignore_eos=True)))
        tokens = [token for output in outputs for token in output.token_ids]
        assert len(tokens) == 30
        assert "".join(output.text for output in outputs) == llm.tokenizer.decode(tokens)


def test_a_folder_without_tokenizer_serves_ids(engine_folder: EngineFolder) -> None:
    with LLM.load(engine_folder("fp32"), options=EngineOptions(threads=1, num_blocks=16)) as llm:
        assert llm.tokenizer is None
        outputs = list(llm.generate([1, 2, 3], SamplingParams(max_tokens=5, ignore_eos=True)))
        assert sum(len(output.token_ids) for output in outputs) == 5
        assert outputs[-1].finish_reason == "length"


def test_bench_rows_add_up(engine_folder: EngineFolder) -> None:
    seen: list[tuple[int, int]] = []
    rows = bench_engine(
        engine_folder("int4"),
        (1, 3),
        20,
        6,
        repeats=2,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert [(row.batch, row.prompt, row.new) for row in rows] == [(1, 20, 6), (3, 20, 6)]
    for row in rows:
        assert row.prefill_tok_s > 0
        assert row.step_ms_p50 > 0
        # A rate beyond what the median step allows would count tokens that were not timed; a busy machine's
        # few long steps only lower it.
        assert 0 < row.decode_tok_s < 3 * row.batch / row.step_ms_p50 * 1e3
        assert 10 < row.peak_rss_mb < 10_000
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


@pytest.mark.parametrize(
    ("batch", "prompt", "new", "words"),
    [(9, 10, 5, "batch 9"), (8, 200, 50, "cache blocks"), (1, 10, 1, "at least 2"), (1, 255, 20, "256")],
)
def test_bench_refuses_what_cannot_be_measured(
    engine_folder: EngineFolder, batch: int, prompt: int, new: int, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        bench_engine(engine_folder("int4"), (batch,), prompt, new, options=EngineOptions(num_blocks=40))


def test_a_failing_engine_is_not_measured() -> None:
    engine = HashEngine(LIMITS)

    def fail(inputs: object) -> None:
        raise RuntimeError("broken")

    engine.before_step = fail
    with pytest.raises(RuntimeError, match="broken"):
        measure_once(engine, 2, 4, 3)
