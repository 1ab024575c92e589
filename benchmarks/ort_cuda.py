"""Our ops beside ONNX Runtime's own on a GPU, as nodes of the same runtime: `python benchmarks/ort_cuda.py`.

Products: `--copies` nodes over one x [M, K], each with weights of its own, so that none comes from a cache,
as one CUDA graph. Attention: one decode step of B sequences. Times are the best of `--rounds` means over
replays, by events on the session's stream. Peers that fail are printed with their words.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "gpu"))
from cuda_library import CudaLibrary
from ort_graphs import ELEMENTS, bind

from enginebay.plugins.load import cuda_adapter_path

F16, I32, U8 = torch.float16, torch.int32, torch.uint8
Tensors = dict[str, torch.Tensor]
MICROSOFT = "com.microsoft"


def session_of(nodes: list[Any], given: Tensors, results: Tensors, constants: Tensors, graph: bool) -> Any:
    """A session on torch's current stream, and its binding."""

    def info(name: str, tensor: torch.Tensor) -> Any:
        return onnx.helper.make_tensor_value_info(name, ELEMENTS[tensor.dtype], list(tensor.shape))

    weights = [onnx.numpy_helper.from_array(t.cpu().numpy(), name) for name, t in constants.items()]
    made = onnx.helper.make_graph(
        nodes, "g", [info(*i) for i in given.items()], [info(*i) for i in results.items()], weights
    )
    domains = [("", 21), ("enginebay", 1), (MICROSOFT, 1)]
    model = onnx.helper.make_model(
        made, opset_imports=[onnx.helper.make_opsetid(*d) for d in domains], ir_version=10
    )
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.register_custom_ops_library(str(cuda_adapter_path()))
    stream = torch.cuda.current_stream().cuda_stream
    provider = {"user_compute_stream": str(stream), "enable_cuda_graph": str(int(graph))}
    session = ort.InferenceSession(
        model.SerializeToString(), options, providers=[("CUDAExecutionProvider", provider)]
    )
    binding = session.io_binding()
    for name, tensor in given.items():
        bind(binding, name, tensor)
    for name, tensor in results.items():
        bind(binding, name, tensor, output=True)
    return session, binding


def milliseconds(session: Any, binding: Any, rounds: int, replays: int = 20) -> float:
    """The best round's mean time of a run."""
    options = ort.RunOptions()
    options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    best = float("inf")
    for round_ in range(rounds + 1):  # the first one warms up and captures
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(replays):
            session.run_with_iobinding(binding, options)
        end.record()
        torch.cuda.synchronize()
        if round_:
            best = min(best, begin.elapsed_time(end) / replays)
    return best


def product(kind: str, m: int, k: int, n: int, copies: int, rounds: int) -> tuple[float, int]:
    """(ms, bytes of weights) of one node: fp16, nbits-<block>, ours-fp16 or ours-int4-<block>."""
    x = torch.randn(m, k, device="cuda").half()
    given: Tensors = {"x": x}
    constants: Tensors = {}
    nodes, size = [], 0
    library = CudaLibrary()
    block = int(kind.rsplit("-", 1)[1]) if kind[-1].isdigit() and kind[-2:] != "16" else 0
    for i in range(copies):
        name, y = f"w{i}", f"y{i}"
        if kind == "ort-fp16":
            given[name] = torch.randn(k, n, device="cuda").half()
            size = given[name].nbytes
            nodes.append(onnx.helper.make_node("MatMul", ["x", name], [y]))
        elif kind.startswith("ort-int4"):
            constants[name] = torch.randint(0, 256, (n, k // block, block // 2), dtype=U8)
            constants[f"s{i}"] = (0.01 * torch.rand(n * k // block)).half()
            size = constants[name].nbytes + constants[f"s{i}"].nbytes
            attributes = {"K": k, "N": n, "bits": 4, "block_size": block}
            nodes.append(
                onnx.helper.make_node(
                    "MatMulNBits", ["x", name, f"s{i}"], [y], domain=MICROSOFT, **attributes
                )
            )
        else:
            form = "i4" if block else "f16"
            desc = library.linear_desc(k, n, form, F16, block)
            size = library.packed_bytes(desc)
            # Any nibbles will do for a time; the bytes' tail holds scales, so it must be finite.
            given[name] = torch.randint(0, 0x3C, (size,), dtype=U8, device="cuda")
            attributes = {"in_features": k, "out_features": n, "format": form, "block_size": block}
            nodes.append(
                onnx.helper.make_node("QuantLinear", ["x", name], [y], domain="enginebay", **attributes)
            )
    results = {f"y{i}": torch.empty(m, n, dtype=F16, device="cuda") for i in range(copies)}
    made = session_of(nodes, given, results, constants, True)
    return milliseconds(*made, rounds) / copies, size


B, HEADS, KV_HEADS, DIM = 32, 32, 8, 128


def attention(kind: str, context: int, rounds: int) -> float:
    """ms of a decode step over `context` cached tokens a sequence, RoPE and cache write included."""
    angles = torch.arange(context + 1)[:, None] * 1e4 ** -(torch.arange(0, DIM, 2) / DIM)
    scale = DIM**-0.5

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(*size, device="cuda", dtype=F16)

    if kind == "ours":
        per = -(-context // 16)
        table = torch.randperm(B * per, device="cuda").int().view(B, per)
        last = table[:, -1] * 16 + (context - 1) % 16
        cache = randn(B * per, 2, 16, KV_HEADS, DIM)
        given = {
            "qkv": randn(B, (HEADS + 2 * KV_HEADS) * DIM),
            "cache": cache,
            "query_start": torch.arange(B + 1, dtype=I32, device="cuda"),
            "kv_len": torch.full((B,), context, dtype=I32, device="cuda"),
            "block_table": table,
            "slot_mapping": last.int(),
            "position_ids": torch.full((B,), context - 1, dtype=I32, device="cuda"),
            "rope_cos": angles.cos().cuda(),
            "rope_sin": angles.sin().cuda(),
        }
        results = {"attention": randn(B, HEADS * DIM), "cache_out": cache}
        attributes = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM, "scale": scale}
        node = onnx.helper.make_node(
            "PagedAttention", list(given), list(results), domain="enginebay", **attributes
        )
        return milliseconds(*session_of([node], given, results, {}, True), rounds)
    rope = {"cos_cache": angles.cos().half().cuda(), "sin_cache": angles.sin().half().cuda()}
    attributes = {"num_heads": HEADS, "kv_num_heads": KV_HEADS, "scale": scale, "do_rotary": 1}
    if kind == "ort-gqa":
        past = [randn(B, KV_HEADS, context, DIM) for _ in range(2)]
        given = {
            "query": randn(B, 1, HEADS * DIM),
            "key": randn(B, 1, KV_HEADS * DIM),
            "value": randn(B, 1, KV_HEADS * DIM),
            "past_key": past[0],
            "past_value": past[1],
            "seqlens_k": torch.full((B,), context - 1, dtype=I32, device="cuda"),
        }
        total = {"total": torch.tensor(context, dtype=I32)}
        names = [*given, "total", *rope]
        results = {"output": randn(B, 1, HEADS * DIM), "present_key": past[0], "present_value": past[1]}
        node = onnx.helper.make_node(
            "GroupQueryAttention", names, list(results), domain=MICROSOFT, **attributes
        )
        return milliseconds(*session_of([node], {**given, **rope}, results, total, True), rounds)
    size = 256
    per = -(-context // size)
    caches = [randn(B * per, size, KV_HEADS, DIM) for _ in range(2)]
    given = {
        "query": randn(B, HEADS * DIM),
        "key": randn(B, KV_HEADS * DIM),
        "value": randn(B, KV_HEADS * DIM),
        "key_cache": caches[0],
        "value_cache": caches[1],
        "cumulative_sequence_length": torch.arange(B + 1, dtype=I32, device="cuda"),
        "past_seqlens": torch.full((B,), context - 1, dtype=I32, device="cuda"),
        "block_table": torch.randperm(B * per, device="cuda").int().view(B, per),
        **rope,
    }
    results = {"output": randn(B, HEADS * DIM), "key_out": caches[0], "value_out": caches[1]}
    node = onnx.helper.make_node("PagedAttention", list(given), list(results), domain=MICROSOFT, **attributes)
    # It reads lengths on the host, so no graph can capture it.
    return milliseconds(*session_of([node], given, results, {}, False), rounds)


def tried(measure: Callable[[], str]) -> str:
    """The cell of a table; a peer's refusal is its answer."""
    try:
        return measure()
    except Exception as error:
        return "failed: " + str(error).replace("\n", " ")[:160]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--copies", type=int, default=8)
    parser.add_argument("--rows", default="1,4,16,64,256")
    parser.add_argument("--shape", default="4096x14336", help="KxN")
    parser.add_argument("--context", type=int, default=8192)
    options = parser.parse_args()
    k, n = (int(part) for part in options.shape.split("x"))
    kinds = ("ort-fp16", "ours-fp16", "ort-int4-32", "ort-int4-128", "ours-int4-64", "ours-int4-128")
    torch.cuda.set_stream(torch.cuda.Stream())
    print(f"onnxruntime {ort.__version__}, {torch.cuda.get_device_name()}, K x N {options.shape}")
    for m in (int(part) for part in options.rows.split(",")):
        for kind in kinds:

            def cell(kind: str = kind, m: int = m) -> str:
                ms, size = product(kind, m, k, n, options.copies, options.rounds)
                return f"{1e3 * ms:7.1f} us  {size / ms / 1e9:5.2f} TB/s"

            print(f"M={m:<4} {kind:14} {tried(cell)}", flush=True)
    size = 2 * B * options.context * KV_HEADS * DIM * 2
    for kind in ("ours", "ort-gqa", "ort-paged"):

        def row(kind: str = kind) -> str:
            ms = attention(kind, options.context, options.rounds)
            return f"{1e3 * ms:7.1f} us  {size / ms / 1e9:5.2f} TB/s"

        print(f"decode B={B} context {options.context} {kind:10} {tried(row)}", flush=True)


if __name__ == "__main__":
    main()
