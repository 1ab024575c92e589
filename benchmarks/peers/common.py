"""What every peer's script shares: arguments, timing, a JSON row per batch. For the peer's environment."""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import statistics
import time
from collections.abc import Callable, Iterator


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--batch", required=True, help="comma separated")
    parser.add_argument("--prompt", type=int, required=True)
    parser.add_argument("--new", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    args.batch = [int(item) for item in args.batch.split(",")]
    return args


def measure(
    engine: str, args: argparse.Namespace, steps: Callable[[int], Iterator[None]], repeats: int = 3
) -> None:
    """`steps(batch)` yields after prefill (with the first token) and after each further token of every row.

    Prints the row of the fastest of `repeats`, as the peers' best case.
    """
    for batch in args.batch:
        best: tuple[float, float, float] | None = None
        for _ in range(repeats):
            marks = [time.perf_counter()]
            for _ in steps(batch):
                marks.append(time.perf_counter())
            prefill = marks[1] - marks[0]
            decode = marks[-1] - marks[1]
            gaps = [b - a for a, b in itertools.pairwise(marks[1:])]
            found = (decode, prefill, statistics.median(gaps))
            best = found if best is None else min(best, found)
        assert best is not None
        row = {
            "engine": engine,
            "batch": batch,
            "prompt": args.prompt,
            "new": args.new,
            "prefill_tok_s": round(batch * args.prompt / best[1], 1),
            "decode_tok_s": round(batch * (args.new - 1) / best[0], 1),
            "step_ms_p50": round(best[2] * 1e3, 3),
            "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        }
        print(json.dumps(row), flush=True)
