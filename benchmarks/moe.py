"""QuantMoE on one core beside the same multiply-adds done as plain products.

    python benchmarks/moe.py [--experts 64 --top-k 8 --hidden 1024 --intermediate 512 --format i4] [--json]

`plain`: QuantLinear with as many rows as the step has (token, expert) pairs, all on one expert's weights:
what grouping would cost if routing were free and every weight were shared. At few tokens the experts' bytes
are what counts, so `GB_s` says how fast the distinct experts' weights went by.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from enginebay.plugins.load import KernelLibrary
from enginebay.plugins.load_moe import MoeRunner

REPEATS = 7


def best(call: Callable[[], Any]) -> float:
    """Shortest time of a call, in seconds."""
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return min(times)


def pack(library: KernelLibrary, rng: np.random.Generator, rows: int, columns: int, format: str) -> Any:
    if format == "f32":
        return library.pack_linear(rng.normal(size=(rows, columns)).astype(np.float32), format=format)
    scales = np.full((rows, columns // 32), 2.0**-9, np.float32)
    codes = rng.integers(0, 16, (rows, columns)).astype(np.uint8)
    if format == "i8":
        codes = codes.astype(np.int8)
    return library.pack_linear(codes, scales, format=format, block_size=32)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--intermediate", type=int, default=512)
    parser.add_argument("--format", choices=("f32", "i8", "i4"), default="i4")
    parser.add_argument("--tokens", default="1,4,16,64,256")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rng, library = np.random.default_rng(0), KernelLibrary()
    block = {} if options.format == "f32" else {"block_size": 32}
    shape = {
        "num_experts": options.experts,
        "top_k": options.top_k,
        "hidden": options.hidden,
        "intermediate": options.intermediate,
    }
    runner = MoeRunner(library, **shape, activation="silu", format=options.format, **block)
    sizes = (2 * options.intermediate, options.hidden), (options.hidden, options.intermediate)
    one = [pack(library, rng, rows, columns, options.format) for rows, columns in sizes]
    strides = runner.strides()
    packed = [
        np.concatenate([np.pad(part, (0, stride - len(part)))] * options.experts)
        for part, stride in zip(one, strides, strict=True)
    ]
    rows = []
    for tokens in map(int, options.tokens.split(",")):
        x = rng.normal(size=(tokens, options.hidden)).astype(np.float32)
        logits = rng.normal(size=(tokens, options.experts)).astype(np.float32)
        pairs = tokens * options.top_k
        many = rng.normal(size=(pairs, options.hidden)).astype(np.float32)
        inner = rng.normal(size=(pairs, options.intermediate)).astype(np.float32)
        moe = best(partial(runner.run, x=x, router_logits=logits, gate_up=packed[0], down=packed[1]))
        plain = sum(
            best(
                partial(library.run_linear, rows_in, weights, out_features=n, format=options.format, **block)
            )
            for rows_in, weights, (n, _) in zip((many, inner), one, sizes, strict=True)
        )
        used = len(np.unique(np.argsort(-logits, axis=1)[:, : options.top_k]))
        operations = 2 * pairs * 3 * options.hidden * options.intermediate
        rows.append(
            {
                "tokens": tokens,
                "moe_us": moe * 1e6,
                "plain_us": plain * 1e6,
                "ratio": plain / moe,
                "GFLOP_s": operations / moe / 1e9,
                "GB_s": used * sum(strides) / moe / 1e9,
            }
        )
    if options.json:
        print(json.dumps(rows))
        return 0
    print(f"{'tokens':>7} {'moe us':>10} {'plain us':>10} {'plain/moe':>10} {'GFLOP/s':>9} {'GB/s':>7}")
    for row in rows:
        print(
            f"{row['tokens']:7d} {row['moe_us']:10.0f} {row['plain_us']:10.0f} {row['ratio']:10.2f} "
            f"{row['GFLOP_s']:9.1f} {row['GB_s']:7.1f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
