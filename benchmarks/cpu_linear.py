"""QuantLinear inside ONNX Runtime beside ORT's own products and oneDNN's.

    python benchmarks/cpu_linear.py [--threads 2] [--shapes 576x960,2048x8192] [--rows 1,8,128] [--json]
    python benchmarks/cpu_linear.py --cpu-time    # one thread's processor time: for a machine others use too

Every case is a graph of nodes that multiply the same x by different weights, as many as fit 8 million weights
and at most 16, so that the runtime's cost of a call does not hide the small ones; times are of one product.
All sessions of the process share one thread pool, take turns, and the best of `--repeats` turns counts: only
ratios mean anything on a shared machine. The peers:

    acc4, acc0   MatMulNBits, 4 bits, block 32: int8 activations, as ours, and its default, fp32 activations
    nbits8       MatMulNBits, 8 bits, block 32, int8 activations
    dynamic      DynamicQuantizeMatMul, int8, a scale a column; x has one scale for all rows together
    matmul       MatMul, fp32
    onednn       torch's quantised linear on oneDNN, int8, a scale a column; x as `dynamic`; its own threads
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray

from enginebay.plugins.load import KernelLibrary, library_path

SHAPES = "576x960,576x3072,1536x576,576x49152,2048x8192,4096x4096"
ROWS = "1,4,8,16,64,128,512"
PEER_BLOCK = 32
FLOATS: dict[str, Any] = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}


@dataclass(frozen=True)
class Format:
    """A weight format of ours, as the QuantLinear attributes say it."""

    label: str
    kind: str
    block: int = 0
    symmetric: bool = True


FORMATS = (
    Format("i4b32m", "i4", 32, symmetric=False),
    Format("i4b64", "i4", 64),
    Format("i8b32", "i8", 32),
    Format("f32", "f32"),
    Format("f16", "f16"),
    Format("bf16", "bf16"),
)
PEERS = ("acc4", "acc0", "nbits8", "dynamic", "matmul")
ONEDNN = "onednn"
# What is divided by what: which of our formats against which peer.
RATIOS = (
    ("i4b32m", "acc4"),
    ("i4b32m", "acc0"),
    ("i8b32", "nbits8"),
    ("i8b32", "dynamic"),
    ("i8b32", ONEDNN),
    ("f32", "matmul"),
    ("f16", "matmul"),
)


def pack(library: KernelLibrary, fmt: Format, n: int, k: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    arguments: dict[str, Any] = {"format": fmt.kind, "block_size": fmt.block, "symmetric": fmt.symmetric}
    if fmt.kind in FLOATS:
        return library.pack_linear(rng.standard_normal((n, k)).astype(FLOATS[fmt.kind]), **arguments)
    scales = rng.uniform(0.005, 0.02, (n, k // fmt.block)).astype(np.float32)
    if fmt.kind == "i8":
        return library.pack_linear(rng.integers(-127, 128, (n, k), np.int8), scales, **arguments)
    minimums = None if fmt.symmetric else rng.uniform(-0.2, 0, scales.shape).astype(np.float32)
    return library.pack_linear(rng.integers(0, 16, (n, k), np.uint8), scales, minimums, **arguments)


@dataclass(frozen=True)
class Product:
    """`copies` products of x [M, K] with different W [N, K]."""

    k: int
    n: int

    @property
    def copies(self) -> int:
        return max(1, min(16, 8_000_000 // (self.k * self.n)))

    def session(self, op: str, domain: str, make: Callable[[], dict[str, Any]], **attributes: Any) -> Any:
        nodes, tensors = [], []
        for copy in range(self.copies):
            named = {f"{name}{copy}": array for name, array in make().items()}
            tensors += [onnx.numpy_helper.from_array(array, name) for name, array in named.items()]
            inputs, outputs = ["x", *named], [f"y{copy}"]
            nodes.append(onnx.helper.make_node(op, inputs, outputs, f"n{copy}", domain=domain, **attributes))
        value, kind = onnx.helper.make_tensor_value_info, onnx.TensorProto.FLOAT
        rows = [value(f"y{copy}", kind, ["M", self.n]) for copy in range(self.copies)]
        graph = onnx.helper.make_graph(nodes, "linear", [value("x", kind, ["M", self.k])], rows, tensors)
        opsets = [onnx.helper.make_opsetid(domain, 1) for domain in ("enginebay", "com.microsoft")]
        opsets.append(onnx.helper.make_opsetid("", 21))
        model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)
        options = ort.SessionOptions()
        options.use_per_session_threads = False
        options.log_severity_level = 3
        options.register_custom_ops_library(str(library_path()))
        return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])

    def ours(self, library: KernelLibrary, fmt: Format, rng: np.random.Generator) -> Any:
        attributes: dict[str, Any] = {"in_features": self.k, "out_features": self.n, "format": fmt.kind}
        attributes |= {"block_size": fmt.block, "symmetric": int(fmt.symmetric)}
        return self.session(
            "QuantLinear", "enginebay", lambda: {"w": pack(library, fmt, self.n, self.k, rng)}, **attributes
        )

    def peer(self, name: str, rng: np.random.Generator) -> Any:
        n, k, blocks = self.n, self.k, self.k // PEER_BLOCK
        if name == "matmul":
            return self.session("MatMul", "", lambda: {"w": rng.standard_normal((k, n)).astype(np.float32)})
        if name == "dynamic":
            return self.session(
                "DynamicQuantizeMatMul",
                "com.microsoft",
                lambda: {
                    "w": rng.integers(-127, 128, (k, n), np.int8),
                    "scales": rng.uniform(0.005, 0.02, n).astype(np.float32),
                },
            )
        bits = 8 if name == "nbits8" else 4
        attributes: dict[str, Any] = {"K": k, "N": n, "bits": bits, "block_size": PEER_BLOCK}
        if name != "acc0":
            attributes["accuracy_level"] = 4
        return self.session(
            "MatMulNBits",
            "com.microsoft",
            lambda: {
                "w": rng.integers(0, 256, (n, blocks, PEER_BLOCK * bits // 8), np.uint8),
                "scales": rng.uniform(0.005, 0.02, (n, blocks)).astype(np.float32),
                "zeros": rng.integers(0, 256, (n, math.ceil(blocks * bits / 8)), np.uint8),
            },
            **attributes,
        )

    def onednn(self, rng: np.random.Generator) -> Callable[[int], Callable[[], None]]:
        """From rows of x to what multiplies them by every copy."""
        import torch

        def pack_one() -> Any:
            weight = torch.from_numpy(rng.standard_normal((self.n, self.k)).astype(np.float32))
            scales, zeros = weight.abs().amax(1) / 127, torch.zeros(self.n, dtype=torch.long)
            quantised = torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8)
            return torch.ops.quantized.linear_prepack(quantised, None)

        packed = [pack_one() for _ in range(self.copies)]

        def runner(rows: int) -> Callable[[], None]:
            x = torch.from_numpy(rng.standard_normal((rows, self.k)).astype(np.float32))

            def run() -> None:
                for weights in packed:
                    torch.ops.quantized.linear_dynamic(x, weights, False)

            return run

        return runner

    def runner(self, session: Any, rows: int, rng: np.random.Generator) -> Callable[[], None]:
        binding, options = session.io_binding(), ort.RunOptions()
        x = rng.standard_normal((rows, self.k)).astype(np.float32)
        binding.bind_ortvalue_input("x", ort.OrtValue.ortvalue_from_numpy(x))
        for copy in range(self.copies):
            y = np.zeros((rows, self.n), np.float32)
            binding.bind_ortvalue_output(f"y{copy}", ort.OrtValue.ortvalue_from_numpy(y))
        return lambda: session.run_with_iobinding(binding, options)


def best_times(
    runs: dict[str, Callable[[], None]], repeats: int, turn_s: float, clock: Callable[[], float]
) -> dict[str, float]:
    """Seconds per call, the best of `repeats` turns of about `turn_s` seconds each."""
    best = dict.fromkeys(runs, math.inf)
    for run in runs.values():
        run()
    for _ in range(repeats):
        for name, run in runs.items():
            calls, begin = 0, clock()
            while (spent := clock() - begin) < turn_s or not calls:
                run()
                calls += 1
            best[name] = min(best[name], spent / calls)
    return best


def table_row(row: dict[str, Any]) -> str:
    times = " ".join(f"{row[f'{f.label}_us']:9.1f}" for f in FORMATS)
    peers = " ".join(f"{row[f'{p}_us']:9.1f}" for p in (*PEERS, ONEDNN))
    ratios = " ".join(f"{row[f'{ours}_over_{peer}']:{len(ours) + len(peer) + 1}.2f}" for ours, peer in RATIOS)
    return f"{row['shape']:>10} {row['rows']:4d} {times} | {peers} | {row['gops']:5.0f} {ratios}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--shapes", default=SHAPES, help="KxN, comma-separated (default %(default)s)")
    parser.add_argument("--rows", default=ROWS, help="rows of x, comma-separated (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--turn", type=float, default=0.02, help="seconds of a turn (default %(default)s)")
    parser.add_argument("--cpu-time", action="store_true", help="processor time of one thread, not wall time")
    parser.add_argument("--json", action="store_true", help="one JSON object per line instead of the table")
    options = parser.parse_args()
    threads = 1 if options.cpu_time else options.threads
    clock = time.thread_time if options.cpu_time else time.perf_counter
    import torch

    ort.set_global_thread_pool_sizes(threads, 1)
    torch.set_num_threads(threads)
    torch.backends.quantized.engine = "onednn"
    library, rng = KernelLibrary(threads=threads), np.random.default_rng(0)
    if not options.json:
        names = " ".join(f"{name:>9}" for name in (f.label for f in FORMATS))
        peers = " ".join(f"{name:>9}" for name in (*PEERS, ONEDNN))
        ratios = " ".join(f"{ours}/{peer}" for ours, peer in RATIOS)
        print(f"microseconds; GOP/s of {FORMATS[0].label}; then how many times as fast as a peer")
        print(f"{'K x N':>10} {'M':>4} {names} | {peers} |  GOPS {ratios}")
    for shape in options.shapes.split(","):
        product = Product(*map(int, shape.split("x")))
        sessions = {fmt.label: product.ours(library, fmt, rng) for fmt in FORMATS}
        sessions |= {name: product.peer(name, rng) for name in PEERS}
        onednn = product.onednn(rng)
        for rows in map(int, options.rows.split(",")):
            runs = {name: product.runner(session, rows, rng) for name, session in sessions.items()}
            runs[ONEDNN] = onednn(rows)
            times = best_times(runs, options.repeats, options.turn, clock)
            row: dict[str, Any] = {"shape": shape, "rows": rows, "threads": threads}
            times = {name: seconds / product.copies for name, seconds in times.items()}
            row |= {f"{name}_us": round(1e6 * seconds, 1) for name, seconds in times.items()}
            row["gops"] = round(2e-9 * rows * product.k * product.n / times[FORMATS[0].label])
            row |= {f"{ours}_over_{peer}": round(times[peer] / times[ours], 2) for ours, peer in RATIOS}
            print(json.dumps(row) if options.json else table_row(row), flush=True)


if __name__ == "__main__":
    main()
