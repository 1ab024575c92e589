"""A decoder layer in ONNX Runtime on the GPU, run by run and in CUDA graphs, against the CPU adapter."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from steps import Shape, random_step

ort_graphs = pytest.importorskip("ort_graphs", reason="not run: onnxruntime or onnx is not installed")
from ort_graphs import (  # noqa: E402
    CPU_INT8,
    ROUNDING,
    Bound,
    Graph,
    Weights,
    agree,
    half,
    int4,
    outputs_of,
    randn,
    shape_attributes,
    why_not,
)

pytestmark = pytest.mark.skipif(why_not() is not None, reason=f"not run: {why_not()}")
F16 = torch.float16
Tensor = torch.Tensor
LAYER = Shape((), heads=8, kv_heads=2, head_dim=128)
HIDDEN, INNER, BLOCKS, WIDTH = 512, 768, 400, 64
LAYER_INPUTS = ("query_start", "kv_len", "block_table", "slot_mapping", "position_ids")


class Layer:
    """A decoder layer of random weights: norm, qkv, attention, o, norm, gated MLP."""

    def __init__(self, kind: str, generator: torch.Generator) -> None:
        def weights(n: int, k: int) -> Weights:
            return int4(n, k, 64, generator) if kind == "i4" else half(n, k, generator)

        width = LAYER.heads * LAYER.head_dim
        angles = torch.arange(1024)[:, None].double() * 1e4 ** -(torch.arange(0, 128, 2).double() / 128)
        g = self.graph = Graph(F16)
        g.constants = {
            "norm_1": (1 + 0.1 * randn(generator, HIDDEN)).cpu(),
            "norm_2": (1 + 0.1 * randn(generator, HIDDEN)).cpu(),
            "cos": angles.cos().float(),
            "sin": angles.sin().float(),
        }
        g.add("AddRMSNorm", ["x", "residual", "norm_1"], ["h", "stream"])
        g.linear("h", "qkv", weights(width + 2 * LAYER.kv_heads * LAYER.head_dim, HIDDEN))
        g.add(
            "PagedAttention",
            ["qkv", "cache", *LAYER_INPUTS, "cos", "sin"],
            ["attention", "cache_out"],
            **shape_attributes(LAYER),
        )
        g.linear("attention", "o", weights(HIDDEN, width))
        g.add("AddRMSNorm", ["o", "stream", "norm_2"], ["h2", "sum"])
        g.linear("h2", "gate_up", weights(2 * INNER, HIDDEN))
        g.add("GatedActivation", ["gate_up"], ["gated"], activation="silu")
        g.linear("gated", "y", weights(HIDDEN, INNER))
        self.names = {"y": F16, "sum": F16, "cache_out": F16}

    def tensors(self, tokens: int, sequences: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Inputs and outputs at fixed addresses for steps of this many rows and sequences."""
        ints: dict[str, tuple[int, ...]] = {
            "query_start": (sequences + 1,),
            "kv_len": (sequences,),
            "block_table": (sequences, WIDTH),
            "slot_mapping": (tokens,),
            "position_ids": (tokens,),
        }
        inputs = {name: torch.zeros(tokens, HIDDEN, dtype=F16, device="cuda") for name in ("x", "residual")}
        inputs |= {name: torch.zeros(size, dtype=torch.int32, device="cuda") for name, size in ints.items()}
        inputs["cache"] = torch.zeros(BLOCKS, 2, 16, LAYER.kv_heads, LAYER.head_dim, dtype=F16, device="cuda")
        outputs = outputs_of({"y": (F16, (tokens, HIDDEN)), "sum": (F16, (tokens, HIDDEN))})
        return inputs, {**outputs, "cache_out": inputs["cache"]}

    def fill(
        self, inputs: dict[str, Tensor], lengths: tuple[tuple[int, int], ...], generator: torch.Generator
    ) -> int:
        """A fresh random step of these lengths in place; the rows that are not padding."""
        step = random_step(Shape(lengths, heads=8, kv_heads=2, head_dim=128), generator)
        tokens = sum(q for q, _ in lengths)
        for name in ("x", "residual"):
            inputs[name].copy_(randn(generator, *inputs[name].shape))
        for name in LAYER_INPUTS:
            given, tensor = step.inputs[name], inputs[name]
            assert given is not None
            padding = given[-1].item() if name == "query_start" else 0 if name == "kv_len" else -1
            tensor.fill_(padding if name != "position_ids" else 0)
            if name == "block_table":
                tensor[: given.shape[0], : given.shape[1]] = given
            else:
                tensor[: len(given)] = given
        cache = step.inputs["cache"]
        assert cache is not None
        inputs["cache"][: len(cache)] = cache
        return tokens

    def check(
        self, bound: Bound, lengths: Any, generator: torch.Generator, graph: int | None, limit: float
    ) -> None:
        rows = self.fill(bound.inputs, lengths, generator)
        cpu = self.graph.cpu(bound.inputs, self.names)
        got = bound.run(graph)
        agree(
            {name: got[name][:rows] for name in ("y", "sum")},
            {name: cpu[name][:rows] for name in ("y", "sum")},
            limit,
        )
        error = (bound.inputs["cache"].cpu().float() - cpu["cache_out"].float()).abs()
        assert error.max() < limit * cpu["cache_out"].float().abs().max()


# A value passes four products and two norms; errors of the steps add up at random.
LAYER_LIMIT = {"half": 16 * ROUNDING[F16], "i4": 16 * ROUNDING[F16] + 3 * CPU_INT8}
DECODE = (((1, 300), (1, 17), (1, 1), (1, 640)), ((1, 5), (1, 900), (1, 64)), ((1, 65), (1, 66)))
MIXED = (((1, 300), (40, 70), (20, 20)), ((1, 2), (1, 700), (59, 500)), ((60, 60),))


@pytest.mark.parametrize("kind", ["half", "i4"])
def test_a_decoder_layer(generator: torch.Generator, kind: str) -> None:
    layer = Layer(kind, generator)
    inputs, outputs = layer.tensors(64, 4)
    bound = Bound(layer.graph.cuda(inputs, layer.names), inputs, outputs)
    for lengths in (*MIXED, *DECODE):
        layer.check(bound, lengths, generator, None, LAYER_LIMIT[kind])


def test_runs_of_one_session_on_several_threads(generator: torch.Generator) -> None:
    """Runs at once have streams of their own, and none works in memory that another still uses."""
    layer = Layer("half", generator)
    tensors = [layer.tensors(64, 4) for _ in MIXED]
    session = layer.graph.cuda(tensors[0][0], layer.names)
    runs = [Bound(session, *pair) for pair in tensors]
    wanted = []
    for bound, lengths in zip(runs, MIXED, strict=True):
        layer.fill(bound.inputs, lengths, generator)
        wanted.append(bound.run()["y"].clone())

    def repeat(index: int) -> bool:
        return all(torch.equal(runs[index].run()["y"], wanted[index]) for _ in range(30))

    with ThreadPoolExecutor(len(runs)) as executor:
        assert all(executor.map(repeat, range(len(runs))))


@pytest.mark.parametrize("kind", ["half", "i4"])
def test_a_decoder_layer_in_cuda_graphs(generator: torch.Generator, kind: str) -> None:
    """Two graphs of one session, captured and replayed in turns, follow each step's own lengths."""
    layer = Layer(kind, generator)
    decode, mixed = layer.tensors(4, 4), layer.tensors(64, 4)
    session = layer.graph.cuda(decode[0], layer.names, graphs=True)
    small, large = Bound(session, *decode), Bound(session, *mixed)
    for _ in range(2):
        for few, many in zip(DECODE, MIXED, strict=True):
            layer.check(small, few, generator, 1, LAYER_LIMIT[kind])
            layer.check(large, many, generator, 2, LAYER_LIMIT[kind])
    # A replay it is: the graph writes where it was captured, whatever is bound now.
    others = Bound(session, *layer.tensors(4, 4))
    wanted = small.run(1)["y"].clone()
    small.outputs["y"].fill_(torch.nan)
    assert others.run(1)["y"].isnan().all()
    assert torch.equal(small.outputs["y"], wanted)
