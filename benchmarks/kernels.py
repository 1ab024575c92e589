"""The CUDA kernels against the ceilings of their machine: `python benchmarks/kernels.py [--only int4,…]`.

Ceilings (copy bandwidth, matrix rates) are measured first, in the same run. Every figure is the median over
graph replays; weights and caches rotate over at least four times the L2. torch's own ops are beside ours.
"""

# ruff: noqa: B023 (every closure runs before its loop goes on)

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "gpu"))
from cuda_library import FORMATS, CudaLibrary, MoeDesc
from matrices import int4_weights
from steps import Shape, random_step

GIB = 2**30


@dataclass(frozen=True)
class Row:
    """One line of the table: what ran, how long, and how near the ceiling."""

    what: str
    microseconds: float
    rate: str
    share: float
    beside: str = ""


@dataclass(frozen=True)
class Ceilings:
    copy: float  # bytes/s, read and written
    bf16: float  # FLOP/s
    fp8: float


def timed(calls: list[Callable[[], object]], replays: int = 15) -> float:
    """Seconds a call: the calls are captured into one graph, in turn, and the graph is replayed."""
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()  # what the calls read was made on another stream
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(2):
        graph.replay()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / len(calls))
    return statistics.median(times)


def ceilings() -> Ceilings:
    source = torch.randint(0, 255, (GIB,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    # By a kernel: copies inside a graph may go to a copy engine, which is slower.
    wide, to = source.view(torch.int64), target.view(torch.int64)
    copy = 2 * len(source) / timed([lambda: torch.add(wide, 1, out=to)])
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    bf16 = 2 * 8192**3 / timed([lambda: a @ b])
    x, y = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
    one = torch.ones((), device="cuda")
    fp8 = 2 * 8192**3 / timed([lambda: torch._scaled_mm(x, y, one, one, out_dtype=torch.bfloat16)])
    return Ceilings(copy, bf16, fp8)


def copies_for(size: int) -> int:
    """How many different buffers of `size` bytes exceed four times the L2."""
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    return max(2, math.ceil(4 * l2 / size))


def int4(library: CudaLibrary, top: Ceilings) -> Iterator[Row]:
    generator = torch.Generator(device="cuda").manual_seed(1)
    for k, n in ((4096, 14336), (8192, 28672), (14336, 4096)):
        block = 128
        desc = library.linear_desc(k, n, "i4", torch.float16, block)
        packed = library.pack(desc, *int4_weights(n, k, block, True, generator)).cuda()
        weights = [packed.clone() for _ in range(copies_for(len(packed)))]
        wide = [torch.randn(k, n, device="cuda").half() for _ in range(copies_for(2 * k * n))]
        for m in (1, 4, 16, 32, 64, 128, 256, 1024, 4096):
            x = torch.randn(m, k, device="cuda").half()
            y, workspace = x.new_empty(m, n), library.linear_workspace(desc, m)
            ours = timed([lambda w=w: library.linear(desc, x, w, None, y, workspace) for w in weights])
            theirs = timed([lambda w=w: torch.mm(x, w, out=y) for w in wide])
            ratio = f"fp16 torch {theirs * 1e6:.1f} us, ours/theirs {ours / theirs:.2f}"
            if m <= 128:
                rate = len(packed) / ours
                yield Row(
                    f"INT4 {k}x{n} M={m}", ours * 1e6, f"{rate / 1e12:.2f} TB/s", rate / top.copy, ratio
                )
            else:
                rate = 2 * m * k * n / ours
                yield Row(
                    f"INT4 {k}x{n} M={m}", ours * 1e6, f"{rate / 1e12:.0f} TFLOP/s", rate / top.bf16, ratio
                )
        del weights, wide


def fp8(library: CudaLibrary, top: Ceilings) -> Iterator[Row]:
    k, n = 8192, 28672
    desc = library.linear_desc(k, n, "f8", torch.bfloat16)
    count = k * n
    codes = torch.randn(n, k, device="cuda").to(torch.float8_e4m3fn)
    size = library.packed_bytes(desc)
    scales = torch.rand(n, device="cuda") + 0.5
    packed = torch.cat([codes.view(torch.uint8).flatten(), scales.view(torch.uint8)])
    assert len(packed) == size
    weights = [packed.clone() for _ in range(copies_for(size))]
    one = torch.ones((), device="cuda")
    for m in (1, 16, 64, 256, 4096):
        x = torch.randn(m, k, device="cuda").bfloat16()
        y, workspace = x.new_empty(m, n), library.linear_workspace(desc, m)
        ours = timed([lambda w=w: library.linear(desc, x, w, None, y, workspace) for w in weights])
        beside = ""
        if m >= 16:
            q = x.to(torch.float8_e4m3fn)
            views = [w[:count].view(torch.float8_e4m3fn).view(n, k).t() for w in weights]
            theirs = timed(
                [lambda v=v: torch._scaled_mm(q, v, one, one, out_dtype=torch.bfloat16) for v in views]
            )
            beside = f"torch _scaled_mm alone {theirs * 1e6:.1f} us"
        if m <= 256:
            yield Row(
                f"FP8 {k}x{n} M={m}",
                ours * 1e6,
                f"{size / ours / 1e12:.2f} TB/s",
                size / ours / top.copy,
                beside,
            )
        else:
            rate = 2 * m * k * n / ours
            yield Row(f"FP8 {k}x{n} M={m}", ours * 1e6, f"{rate / 1e12:.0f} TFLOP/s", rate / top.fp8, beside)


def decode(library: CudaLibrary, top: Ceilings) -> Iterator[Row]:
    generator = torch.Generator(device="cuda").manual_seed(2)
    bf16, f8, i8 = torch.bfloat16, torch.float8_e4m3fn, torch.int8
    for io, cache, batch, context in (
        *((bf16, bf16, 32, 8192), (bf16, bf16, 1, 32768), (bf16, bf16, 256, 1024)),
        *((bf16, f8, 32, 8192), (torch.float16, i8, 32, 8192)),
    ):
        shape = Shape(
            ((1, context),) * batch, heads=32, kv_heads=8, head_dim=128, block_size=16, io=io, cache=cache
        )
        step = random_step(shape, generator)
        out = torch.empty(batch, 32 * 128, dtype=io, device="cuda")
        workspace = library.attention_workspace(step.desc, batch, batch)
        pools = [step.inputs["cache"]]
        size = batch * context * 2 * 8 * 128 * cache.itemsize
        for _ in range(copies_for(size) - 1 if size < GIB // 2 else 0):
            pools.append(pools[0].clone())  # type: ignore[union-attr]
        ours = timed(
            [
                lambda p=p: library.attention(step.desc, {**step.inputs, "cache": p}, out, workspace)
                for p in pools
            ]
        )
        name = {bf16: "bf16", f8: "FP8", i8: "INT8"}[cache]
        yield Row(
            f"decode B={batch} ctx={context} 32:8 D=128 {name}",
            *(
                ours * 1e6,
                f"{size / ours / 1e12:.2f} TB/s",
                size / ours / top.copy,
                "norm, RoPE and write included",
            ),
        )


def prefill(library: CudaLibrary, top: Ceilings) -> Iterator[Row]:
    generator = torch.Generator(device="cuda").manual_seed(3)
    for length, heads, kv_heads, dim in ((8192, 32, 8, 128), (2048, 32, 8, 128), (8192, 32, 8, 64)):
        shape = Shape(
            ((length, length),),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=dim,
            io=torch.bfloat16,
            cache=torch.bfloat16,
            block_size=16,
        )
        step = random_step(shape, generator)
        out = torch.empty(length, heads * dim, dtype=torch.bfloat16, device="cuda")
        workspace = library.attention_workspace(step.desc, length, 1)
        ours = timed([lambda: library.attention(step.desc, step.inputs, out, workspace)], 7)
        q = torch.randn(1, heads, length, dim, device="cuda").bfloat16()
        kv = torch.randn(1, kv_heads, length, dim, device="cuda").bfloat16()
        theirs = timed([lambda: scaled_dot_product_attention(q, kv, kv, is_causal=True, enable_gqa=True)], 7)
        flops = 2 * 2 * length * length / 2 * heads * dim
        yield Row(
            f"prefill {length} causal {heads}:{kv_heads} D={dim} bf16",
            *(ours * 1e6, f"{flops / ours / 1e12:.0f} TFLOP/s", flops / ours / top.bf16),
            f"torch sdpa, contiguous: {flops / theirs / 1e12:.0f} TFLOP/s",
        )


def sample(library: CudaLibrary, top: Ceilings) -> Iterator[Row]:
    rows, vocab = 64, 128256
    # Confident: one token lies so far above the others that fewer than k have any weight.
    for name, spread, above in (("normal", 1.0, 0.0), ("peaked", 4.0, 0.0), ("confident", 1.0, 90.0)):
        pools = [
            (spread * torch.randn(rows, vocab, device="cuda")).bfloat16()
            for _ in range(copies_for(rows * vocab * 2))
        ]
        for pool in pools:
            pool[:, 7] += above
        f32 = lambda v, n: torch.full((n,), v, device="cuda")  # noqa: E731
        for label, sequences, extra in (
            ("greedy", rows, {}),
            ("temperature", rows, {"temperature": 0.8}),
            ("top-k 50, top-p 0.95", rows, {"temperature": 0.8, "top_k": 50, "top_p": 0.95}),
            ("top-p 0.95", rows, {"temperature": 0.8, "top_p": 0.95}),
            ("verify chains of 3, top-p 0.95", rows // 4, {"temperature": 0.8, "top_k": 50, "top_p": 0.95}),
        ):
            inputs: dict[str, torch.Tensor] = {}
            for key, value in extra.items():
                filled = f32(value, sequences)
                inputs[key] = filled.int() if key == "top_k" else filled
            depth = 0
            if sequences != rows:
                depth = 3
                inputs["row_start"] = torch.arange(0, rows + 1, 4, dtype=torch.int32, device="cuda")
                inputs["draft_tokens"] = torch.randint(0, vocab, (rows,), dtype=torch.int32, device="cuda")
            outputs = tuple(
                torch.empty(s, dtype=torch.int32, device="cuda")
                for s in ((sequences,), (sequences, depth), (sequences,))
            )
            workspace = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
            ours = timed(
                [
                    lambda p=p: library.spec_verify(p, sequences, depth, workspace, outputs, **inputs)
                    for p in pools
                ]
            )
            size = rows * vocab * 2
            yield Row(
                f"{label}, 64 x 128k bf16, {name} logits",
                ours * 1e6,
                f"{size / ours / 1e12:.2f} TB/s",
                size / ours / top.copy,
            )


def moe(library: CudaLibrary, top: Ceilings) -> Iterator[Row]:
    generator = torch.Generator(device="cuda").manual_seed(4)
    hidden, intermediate, experts, block = 4096, 14336, 8, 128
    for format, tokens in (("i4", 32), ("i4", 64), ("i4", 256), ("f8", 32), ("bf16", 32)):
        four = format == "i4"
        desc = MoeDesc(
            *(experts, 2, hidden, intermediate, 0, 1, 0, 0, 1.0, 0, FORMATS[format]),
            *(block if four else 0, 1, 3, 0.0, 1.702),
        )
        strides = library.expert_strides(desc)
        # Any bits and one scale everywhere: what the products read, not what they mean.
        packed = {}
        for name, stride in zip(("gate_up", "down"), strides, strict=True):
            count = hidden * intermediate * (2 if name == "gate_up" else 1)
            pool = torch.randint(
                0, 127, (experts, stride), dtype=torch.uint8, device="cuda", generator=generator
            )
            if format == "bf16":
                pool = torch.randn(experts, count, device="cuda", generator=generator).bfloat16()
            else:
                values, scale = (count // 2, torch.bfloat16) if four else (count, torch.float32)
                pool[:, values:] = (
                    torch.full((1,), 0.01, dtype=scale, device="cuda")
                    .view(torch.uint8)
                    .repeat((stride - values) // scale.itemsize)
                )
            packed[name] = pool.view(torch.uint8).flatten()
        x = torch.randn(tokens, hidden, device="cuda").bfloat16()
        logits = torch.randn(tokens, experts, device="cuda")
        y, workspace = torch.empty_like(x), library.moe_workspace(desc, tokens)
        ours = timed([lambda: library.moe(desc, x, y, workspace, router_logits=logits, **packed)])
        hit = len(torch.topk(logits, 2).indices.unique())
        size = hit * sum(strides)
        name = {"i4": "INT4", "f8": "FP8", "bf16": "bf16"}[format]
        yield Row(
            f"MoE 8x(4096, 14336) top-2 {name}, {tokens} tokens",
            *(ours * 1e6, f"{size / ours / 1e12:.2f} TB/s", size / ours / top.copy, f"{hit} experts hit"),
        )


SECTIONS = {"int4": int4, "fp8": fp8, "decode": decode, "prefill": prefill, "sample": sample, "moe": moe}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help=f"sections, of {','.join(SECTIONS)}")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("not run: no NVIDIA GPU", file=sys.stderr)
        return 1
    library, top = CudaLibrary(), ceilings()
    print(
        f"{torch.cuda.get_device_name()}: copy {top.copy / 1e12:.2f} TB/s, "
        f"bf16 {top.bf16 / 1e12:.0f}, fp8 {top.fp8 / 1e12:.0f} TFLOP/s"
    )
    rows = []
    for name, section in SECTIONS.items():
        if options.only and name not in options.only.split(","):
            continue
        try:
            for row in section(library, top):
                rows.append(row)
                print(
                    f"{row.what:52} {row.microseconds:9.1f} us {row.rate:>12} {row.share:5.0%}  {row.beside}",
                    flush=True,
                )
        except RuntimeError as error:
            print(f"{name}: stopped: {error}", flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(top), *map(asdict, rows)], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
