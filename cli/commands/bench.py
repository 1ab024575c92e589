"""Measure an engine by itself: prefill and decode tokens per second, step time, peak memory.

Each row is `batch` sequences of `prompt` random tokens, then `new` tokens each, greedy. prefill_tok_s counts
prompt tokens until every sequence has its first token; decode_tok_s counts the tokens after it, all rows
together.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from enginebay.cli.console import print_json
from enginebay.triton_repo.runtime.measure import bench_engine
from enginebay.triton_repo.runtime.ort_engine import EngineOptions


def batches(text: str) -> tuple[int, ...]:
    """'1,8,16' as numbers; argparse turns the ValueError into a usage error."""
    return tuple(int(item) for item in text.split(","))


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("engine", type=Path, metavar="ENGINE", help="folder `enginebay build` wrote")
    parser.add_argument("--batch", type=batches, default=(1, 8, 16), metavar="N,N", help="default 1,8,16")
    parser.add_argument("--prompt", type=int, default=128, metavar="N", help="prompt tokens (default 128)")
    parser.add_argument("--new", type=int, default=64, metavar="N", help="tokens per sequence (default 64)")
    parser.add_argument("--threads", type=int, metavar="N", help="compute threads (default: every core)")
    parser.add_argument("--json", action="store_true", help="rows as JSON on standard output")


def run(args: argparse.Namespace) -> int:
    options = EngineOptions(threads=args.threads, spinning=True)
    rows = bench_engine(args.engine, args.batch, args.prompt, args.new, options=options)
    if args.json:
        print_json([asdict(row) for row in rows])
        return 0
    print(
        f"{'batch':>6}{'prompt':>8}{'new':>6}{'prefill tok/s':>15}{'decode tok/s':>14}{'step ms':>9}{'MB':>7}"
    )
    for row in rows:
        sizes = f"{row.batch:6}{row.prompt:8}{row.new:6}"
        speeds = f"{row.prefill_tok_s:15.1f}{row.decode_tok_s:14.1f}{row.step_ms_p50:9.2f}"
        print(f"{sizes}{speeds}{row.peak_rss_mb:7.0f}")
    return 0
