"""How fast an engine is by itself: scheduler, engine and sampler, without tokenizer and server."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from enginebay.triton_repo.runtime.engine import Engine
from enginebay.triton_repo.runtime.loop import EngineLoop, LoopConfig
from enginebay.triton_repo.runtime.machine import peak_rss, reset_peak_rss
from enginebay.triton_repo.runtime.ort_engine import EngineOptions, OrtEngine
from enginebay.triton_repo.runtime.request import Output, Request, SamplingParams
from enginebay.triton_repo.runtime.scheduler import SchedulerConfig
from enginebay.triton_repo.runtime.tiers import sequence_blocks


@dataclass(frozen=True)
class BenchRow:
    """`batch` sequences of `prompt` random tokens that generate `new` tokens each, greedily.

    prefill_tok_s: prompt tokens over the time until every sequence has its first token. decode_tok_s: the
    tokens that follow, of all sequences, over the rest of the time. step_ms_p50: the median decode step.
    peak_rss_mb: of the whole process while this row ran, MB of 10^6 bytes.
    """

    batch: int
    prompt: int
    new: int
    prefill_tok_s: float
    decode_tok_s: float
    step_ms_p50: float
    peak_rss_mb: float


def bench_engine(
    folder: Path,
    batches: Sequence[int] = (1, 8, 16),
    prompt: int = 128,
    new: int = 64,
    *,
    options: EngineOptions | None = None,
    repeats: int = 3,
    progress: Callable[[int, int], None] | None = None,
) -> list[BenchRow]:
    """Measures the engine in `folder`: for each batch size the best of `repeats` runs by decode speed.

    `progress(done, total)` counts runs. ValueError where a batch does not fit the engine; otherwise the
    errors of `OrtEngine`.
    """
    engine = OrtEngine(folder, options)
    limits = engine.limits
    if new < 2:
        raise ValueError(f"new is {new}; at least 2 tokens are needed to time decoding")
    if not 1 <= prompt <= limits.max_sequence - new:
        raise ValueError(
            f"prompt {prompt} and new {new} must fit this engine's {limits.max_sequence} tokens of a sequence"
        )
    for batch in batches:
        if not 1 <= batch <= limits.max_batch:
            raise ValueError(f"batch {batch} is outside this engine's 1 to {limits.max_batch}")
        pools = (limits.num_blocks, *(tier.num_blocks for tier in limits.tiers))
        for size, needed in zip(pools, sequence_blocks(limits, prompt + new), strict=True):
            if batch * needed > size:
                raise ValueError(
                    f"batch {batch} of {prompt} + {new} tokens needs {batch * needed} cache blocks, the pool "
                    f"has {size}: allow more cache memory"
                )
    rows = []
    measure_once(engine, batches[0], min(prompt, 16), 2)  # caches and memory arenas warm up
    for number, batch in enumerate(batches):
        runs = []
        for repeat in range(repeats):
            runs.append(measure_once(engine, batch, prompt, new, seed=repeat))
            if progress is not None:
                progress(number * repeats + repeat + 1, len(batches) * repeats)
        rows.append(max(runs, key=lambda row: row.decode_tok_s))
    return rows


def measure_once(engine: Engine, batch: int, prompt: int, new: int, *, seed: int = 0) -> BenchRow:
    """One run of `batch` requests that arrive together, none of which shares a prefix."""
    reset_peak_rss()
    timeline = _Timeline(batch)
    scheduler = SchedulerConfig(
        max_batch=batch, max_step_tokens=engine.limits.max_step_tokens, prefix_caching=False
    )
    rng = np.random.default_rng(seed)
    loop = EngineLoop(engine, None, timeline, LoopConfig(scheduler=scheduler))
    try:
        began = time.perf_counter()
        for index in range(batch):
            ids = rng.integers(0, engine.limits.vocab_size, prompt).tolist()
            loop.submit(Request(str(index), tuple(ids), SamplingParams(max_tokens=new)))
        timeline.done.wait()
    finally:
        loop.close()
    if timeline.error is not None:
        raise RuntimeError(f"the measured engine failed: {timeline.error}")
    started, ended = timeline.all_started, timeline.steps[-1][0]
    decode = [(at, count) for at, count in timeline.steps if at > started]
    times = [started, *(at for at, _ in decode)]
    return BenchRow(
        batch=batch,
        prompt=prompt,
        new=new,
        prefill_tok_s=batch * prompt / (started - began),
        decode_tok_s=sum(count for _, count in decode) / (ended - started),
        step_ms_p50=float(np.median(np.diff(times))) * 1e3,
        peak_rss_mb=peak_rss() / 1e6,
    )


class _Timeline:
    """A sink that notes when how many tokens came."""

    def __init__(self, batch: int) -> None:
        self.steps: list[tuple[float, int]] = []
        self.all_started = 0.0
        self.error: str | None = None
        self.done = threading.Event()
        self._batch = batch
        self._tokens: Counter[str] = Counter()
        self._finished = 0

    def __call__(self, outputs: Sequence[Output]) -> None:
        now = time.perf_counter()
        self.steps.append((now, sum(len(output.token_ids) for output in outputs)))
        self._tokens.update(output.request_id for output in outputs)
        if not self.all_started and len(self._tokens) == self._batch:
            self.all_started = now
        self._finished += sum(output.final for output in outputs)
        self.error = self.error or next((o.error for o in outputs if o.error), None)
        if self._finished == self._batch:
            self.done.set()
