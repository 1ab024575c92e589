"""In-flight against static batching, on one engine: `python benchmarks/batching.py ENGINE`.

Requests of prescribed lengths (greedy, end tokens ignored) are all there at the start and run in `--slots`
slots.

    in-flight      a slot that is free takes the next request at the next step
    static         a batch of requests starts together as one fixed-shape batch: a row that has its tokens is
                   computed on until the longest has its own, and then the next batch starts
    static ragged  the same, but finished rows drop out of the step, as this engine's ragged steps allow

A row's throughput is its requests' own tokens over the time of the run. Ratios are taken between runs that
follow one another, and the median over `--repeats` is printed. Block-pool waste: token slots of held blocks
that hold no token, averaged over the steps of a run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from enginebay.triton_repo.runtime.loop import EngineLoop, LoopConfig
from enginebay.triton_repo.runtime.ort_engine import EngineOptions, OrtEngine
from enginebay.triton_repo.runtime.request import Output, Request, SamplingParams
from enginebay.triton_repo.runtime.scheduler import SchedulerConfig
from enginebay.triton_repo.runtime.stats import Stats

MIXES = ("uniform", "heavy-tail")
POLICIES = ("in-flight", "static", "static ragged")


def lengths(mix: str, count: int, rng: np.random.Generator) -> list[int]:
    """Output lengths of `count` requests. The shares are exact and the order is random."""
    if mix == "uniform":
        values = np.linspace(16, 512, count).round().astype(int)
    else:
        tail = round(count / 10)
        values = np.concatenate([np.linspace(16, 64, count - tail).round().astype(int), np.full(tail, 512)])
    return [int(value) for value in rng.permutation(values)]


@dataclass(frozen=True)
class Run:
    policy: str
    seconds: float
    tok_s: float
    block_waste: float


class Finals:
    """A sink that counts requests that are over."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count = 0
        self._errors: list[str] = []

    def __call__(self, outputs: Sequence[Output]) -> None:
        with self._changed:
            self._count += sum(output.final for output in outputs)
            self._errors += [output.error for output in outputs if output.error]
            self._changed.notify_all()

    def wait(self, count: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._count >= count or self._errors)
        if self._errors:
            raise RuntimeError(self._errors[0])


def measure(
    engine: OrtEngine, policy: str, outputs: Sequence[int], prompt: int, slots: int, step_tokens: int
) -> Run:
    rng = np.random.default_rng(1)
    sink = Finals()
    scheduler = SchedulerConfig(max_batch=slots, max_step_tokens=step_tokens, prefix_caching=False)
    loop = EngineLoop(engine, None, sink, LoopConfig(scheduler=scheduler))
    try:
        began = time.perf_counter()
        group = len(outputs) if policy == "in-flight" else slots
        for start in range(0, len(outputs), group):
            batch = outputs[start : start + group]
            for index, own in enumerate(batch, start):
                tokens = max(batch) if policy == "static" else own
                ids = tuple(rng.integers(0, engine.limits.vocab_size, prompt).tolist())
                loop.submit(Request(str(index), ids, SamplingParams(max_tokens=tokens, ignore_eos=True)))
            sink.wait(start + len(batch))
        seconds = time.perf_counter() - began
        stats: Stats = loop.stats()
    finally:
        loop.close()
    return Run(policy, seconds, sum(outputs) / seconds, stats.block_waste)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", type=Path)
    parser.add_argument("--mix", choices=MIXES, action="append", help="default: both")
    parser.add_argument("--policy", choices=POLICIES, action="append", help="default: all")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--step-tokens", type=int, default=256, help="most tokens of a step")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    engine = OrtEngine(args.engine, EngineOptions(threads=args.threads))
    report = []
    for mix in args.mix or MIXES:
        wanted = lengths(mix, args.requests, np.random.default_rng(0))
        runs: dict[str, list[Run]] = {policy: [] for policy in args.policy or POLICIES}
        for _ in range(args.repeats):
            for policy, done in runs.items():
                done.append(measure(engine, policy, wanted, args.prompt, args.slots, args.step_tokens))
                if not args.json:
                    last = done[-1]
                    print(
                        f"{mix:11} {policy:14} {last.seconds:7.1f} s {last.tok_s:7.1f} tok/s   "
                        f"waste {last.block_waste:6.2%}",
                        flush=True,
                    )
        row: dict[str, object] = {"mix": mix, "runs": [asdict(run) for done in runs.values() for run in done]}
        for policy in POLICIES[1:]:
            if policy in runs and "in-flight" in runs:
                pairs = zip(runs["in-flight"], runs[policy], strict=True)
                ratio = statistics.median(flight.tok_s / static.tok_s for flight, static in pairs)
                row[f"in-flight / {policy}"] = round(ratio, 3)
                if not args.json:
                    print(f"{mix:11} in-flight is {ratio:.2f} times {policy}", flush=True)
        report.append(row)
    if args.json:
        print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
