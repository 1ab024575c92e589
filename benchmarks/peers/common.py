"""What every peer's script shares, in the peers' environments: arguments, prompts, timing, rows."""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path, help="Hugging Face folder")
    parser.add_argument("--batch", required=True, help="comma separated")
    parser.add_argument("--prompt", type=int, required=True)
    parser.add_argument("--new", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--repeats", type=int, required=True)
    args = parser.parse_args()
    args.batch = [int(item) for item in args.batch.split(",")]
    return args


def config(model: Path) -> dict[str, Any]:
    return dict(json.loads((model / "config.json").read_text(encoding="utf-8")))


def prompts(args: argparse.Namespace, batch: int) -> NDArray[np.int32]:
    """Random token ids, int32 [batch, prompt]; the low ids, where special tokens are, are left out."""
    rng = np.random.default_rng(batch)
    return rng.integers(100, config(args.model)["vocab_size"], (batch, args.prompt), dtype=np.int32)


def prepared(model: Path, what: str) -> Path:
    """Where a peer keeps what it makes of `model`: another checkpoint gets another place."""
    made_of = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(model.iterdir())]
    key = hashlib.sha256(repr((model.resolve(), made_of)).encode()).hexdigest()[:12]
    folder = Path("build/peers").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{key}-{what}"


def measure(engine: str, args: argparse.Namespace, start: Callable[[int], Iterator[Any]]) -> None:
    """Times `start(batch)`, an iterator that advances after prefill (every row then has its first token) and
    after each further token of every row. What `start` itself does is not timed.

    Prints a row for each batch; its figures are each the best of `args.repeats` runs.
    """
    for batch in args.batch:
        runs = []
        for _ in range(args.repeats):
            steps = start(batch)
            marks = [time.perf_counter()]
            marks += [time.perf_counter() for _ in steps]
            if len(marks) != args.new + 1:
                raise RuntimeError(f"{engine} took {len(marks) - 1} steps for {args.new} tokens of each row")
            gaps = [after - before for before, after in itertools.pairwise(marks[1:])]
            runs.append((marks[1] - marks[0], marks[-1] - marks[1], statistics.median(gaps)))
        prefill, decode, step = (min(figures) for figures in zip(*runs, strict=True))
        row = {
            "engine": engine,
            "batch": batch,
            "prompt": args.prompt,
            "new": args.new,
            "prefill_tok_s": round(batch * args.prompt / prefill, 1),
            "decode_tok_s": round(batch * (args.new - 1) / decode, 1),
            "step_ms_p50": round(step * 1e3, 3),
        }
        print(json.dumps(row), flush=True)
