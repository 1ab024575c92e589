"""PagedAttention in ONNX Runtime beside torch's scaled_dot_product_attention and ORT's GroupQueryAttention.

    python benchmarks/cpu_attention.py [--threads 1] [--heads 9 --kv-heads 3 --head-dim 64] [--cache float16]

Every case is timed in one process, turn by turn, and the best of `--repeats` turns counts. One thread is
timed by its CPU time, which neighbours disturb little; several by the clock, and then only the ratios mean
anything on a shared machine. The peers attend over contiguous fp32 caches and do no RoPE, sdpa no cache
write either; ours does both. GFLOP/s counts 4*D per query, head and visible position.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort

from enginebay.plugins.load import library_path
from enginebay.plugins.reference_cache import encode_int4

BLOCK = 16
TYPES = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "int8": np.int8,
    "uint8": np.uint8,  # INT4 rows
}
ONNX_TYPES = {
    "float32": onnx.TensorProto.FLOAT,
    "float16": onnx.TensorProto.FLOAT16,
    "bfloat16": onnx.TensorProto.BFLOAT16,
    "float8_e4m3fn": onnx.TensorProto.FLOAT8E4M3FN,
    "int8": onnx.TensorProto.INT8,
    "uint8": onnx.TensorProto.UINT8,
    "int32": onnx.TensorProto.INT32,
}


@dataclass(frozen=True)
class Case:
    """`batch` sequences of `past` cached tokens that bring `new` tokens each."""

    batch: int
    past: int
    new: int


CASES = (
    Case(1, 127, 1),
    Case(1, 1023, 1),
    Case(1, 8191, 1),
    Case(16, 127, 1),
    Case(16, 300, 1),
    Case(16, 511, 1),
    Case(16, 1023, 1),
    Case(1, 0, 128),
    Case(1, 0, 512),
    Case(1, 0, 2048),
    Case(1, 1536, 512),
)


def session(
    nodes: list[Any],
    inputs: dict[str, Any],
    outputs: dict[str, int],
    threads: int,
    library: Path | None = None,
) -> ort.InferenceSession:
    values = [
        onnx.helper.make_tensor_value_info(n, ONNX_TYPES[a.dtype.name], [f"{n}{i}" for i in range(a.ndim)])
        for n, a in inputs.items()
    ]
    results = [onnx.helper.make_tensor_value_info(n, t, None) for n, t in outputs.items()]
    graph = onnx.helper.make_graph(nodes, "g", values, results)
    opsets = [onnx.helper.make_opsetid(d, v) for d, v in (("", 21), ("enginebay", 1), ("com.microsoft", 1))]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.register_custom_ops_library(str(library or library_path()))
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def random_cache(rng: np.random.Generator, shape: tuple[int, ...], cache_type: str) -> np.ndarray:
    """Values of order 1: of 8-bit caches with scales of 1, of INT4 rows by their own."""
    values = rng.normal(size=shape)
    return encode_int4(values) if cache_type == "uint8" else values.astype(TYPES[cache_type])


def ours(
    case: Case,
    shape: tuple[int, int, int],
    cache_type: str,
    threads: int,
    layers: int,
    library: Path | None = None,
) -> Callable[[], None]:
    heads, kv_heads, dim = shape
    rng = np.random.default_rng(0)
    total = case.past + case.new
    width = -(-total // BLOCK)
    table = rng.permutation(case.batch * width).reshape(case.batch, width).astype(np.int32)
    where = np.arange(case.past, total)
    slots = table[:, where // BLOCK] * BLOCK + where % BLOCK
    angles = rng.uniform(0, 6, (total, dim // 2))
    inputs = {
        "qkv": rng.normal(size=(case.batch * case.new, (heads + 2 * kv_heads) * dim)).astype(np.float32),
        "cache": random_cache(rng, (case.batch * width, 2, BLOCK, kv_heads, dim), cache_type),
        "query_start": (np.arange(case.batch + 1) * case.new).astype(np.int32),
        "kv_len": np.full(case.batch, total, np.int32),
        "block_table": table,
        "slot_mapping": slots.reshape(-1).astype(np.int32),
        "position_ids": np.tile(where, case.batch).astype(np.int32),
        "rope_cos": np.cos(angles).astype(np.float32),
        "rope_sin": np.sin(angles).astype(np.float32),
    }
    node = onnx.helper.make_node(
        "PagedAttention",
        list(inputs),
        ["attention", "cache_out"],
        domain="enginebay",
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        scale=dim**-0.5,
    )
    outputs = {"attention": onnx.TensorProto.FLOAT, "cache_out": ONNX_TYPES[cache_type]}
    run = session([node], inputs, outputs, threads, library)
    first = inputs.pop("cache")
    out = ort.OrtValue.ortvalue_from_shape_and_type([case.batch * case.new, heads * dim], np.float32, "cpu")
    shared = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in inputs.items()}
    bindings, keep = [], [inputs]
    for _ in range(layers):
        cache = first.copy()
        if cache_type in ("float32", "float16"):
            value = ort.OrtValue.ortvalue_from_numpy(cache)
        else:
            value = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(cache, ONNX_TYPES[cache_type])
        binding = run.io_binding()
        for name, array in shared.items():
            binding.bind_ortvalue_input(name, array)
        binding.bind_ortvalue_input("cache", value)
        binding.bind_ortvalue_output("attention", out)
        binding.bind_ortvalue_output("cache_out", value)
        bindings.append(binding)
        keep.append(cache)
    turn = itertools.cycle(bindings)
    return lambda: (run.run_with_iobinding(next(turn)), keep)[0]


def sdpa(case: Case, shape: tuple[int, int, int], threads: int) -> Callable[[], None]:
    import torch

    torch.set_num_threads(threads)
    heads, kv_heads, dim = shape
    q = torch.randn(case.batch, heads, case.new, dim)
    k, v = (torch.randn(case.batch, kv_heads, case.past + case.new, dim) for _ in range(2))
    mask: Any = {}
    if case.new > 1 and case.past == 0:
        mask = {"is_causal": True}
    elif case.new > 1:
        mask = {"attn_mask": torch.ones(case.new, case.past + case.new).tril(case.past).bool()}

    def run() -> None:
        with torch.inference_mode():
            torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True, **mask)

    return run


def group_query(case: Case, shape: tuple[int, int, int], threads: int) -> Callable[[], None]:
    heads, kv_heads, dim = shape
    rng = np.random.default_rng(0)
    total = case.past + case.new
    past = rng.normal(size=(case.batch, kv_heads, total, dim)).astype(np.float32)
    inputs = {
        "qkv": rng.normal(size=(case.batch, case.new, (heads + 2 * kv_heads) * dim)).astype(np.float32),
        "past_k": past,
        "past_v": past.copy(),
        "lengths": np.full(case.batch, total - 1, np.int32),
        "total": np.array([total], np.int32),
    }
    node = onnx.helper.make_node(
        "GroupQueryAttention",
        ["qkv", "", "", "past_k", "past_v", "lengths", "total"],
        ["y", "k", "v"],
        domain="com.microsoft",
        num_heads=heads,
        kv_num_heads=kv_heads,
    )
    outputs = dict.fromkeys(("y", "k", "v"), onnx.TensorProto.FLOAT)
    run = session([node], inputs, outputs, threads)
    binding = run.io_binding()
    values = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in inputs.items()}
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    out = ort.OrtValue.ortvalue_from_shape_and_type([case.batch, case.new, heads * dim], np.float32, "cpu")
    binding.bind_ortvalue_output("y", out)
    binding.bind_ortvalue_output("k", values["past_k"])
    binding.bind_ortvalue_output("v", values["past_v"])
    keep = inputs
    return lambda: (run.run_with_iobinding(binding), keep)[0]


def best(runs: dict[str, Callable[[], None]], repeats: int, clock: Callable[[], float]) -> dict[str, float]:
    """Seconds of the best turn of each; turns alternate."""
    seconds = dict.fromkeys(runs, float("inf"))
    for _ in range(repeats):
        for name, run in runs.items():
            run()
            start = clock()
            run()
            once = clock() - start
            count = max(1, min(50, int(0.02 / once)))
            start = clock()
            for _ in range(count):
                run()
            seconds[name] = min(seconds[name], (clock() - start) / count)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--cache", choices=TYPES, default="float32")
    parser.add_argument("--layers", type=int, default=1, help="caches that take turns: many are cold ones")
    parser.add_argument("--before", type=Path, help="time another build of the library beside this one")
    parser.add_argument("--case", action="append", help="batch,past,new; may be given several times")
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    shape = (options.heads, options.kv_heads, options.head_dim)
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    rows = []
    for case in CASES if not options.case else [Case(*map(int, one.split(","))) for one in options.case]:
        runs = {"ours": ours(case, shape, options.cache, options.threads, options.layers)}
        if options.before:
            runs["before"] = ours(case, shape, options.cache, options.threads, options.layers, options.before)
        if options.peers:
            runs["sdpa"] = sdpa(case, shape, options.threads)
            runs["gqa"] = group_query(case, shape, options.threads)
        seconds = best(runs, options.repeats, clock)
        pairs = case.batch * (case.new * case.past + case.new * (case.new + 1) // 2)
        flops = 4.0 * options.head_dim * options.heads * pairs
        row = {"batch": case.batch, "past": case.past, "new": case.new}
        row |= {f"{name}_us": round(value * 1e6, 1) for name, value in seconds.items()}
        row |= {"gflops": round(flops / seconds["ours"] / 1e9, 1)}
        row |= {f"over_{name}": round(seconds[name] / seconds["ours"], 2) for name in runs if name != "ours"}
        rows.append(row)
        if not options.json:
            print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    if options.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
