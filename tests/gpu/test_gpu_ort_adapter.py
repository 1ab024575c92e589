"""One-layer graphs in ONNX Runtime on the GPU: the answer is the kernels' own, and the CPU adapter's.

The kernels are held to float64 elsewhere. Here each op's node must give what the C ABI gives, bit for bit,
and agree with the CPU adapter over the same numbers within the rounding of the activations' dtype.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from cuda_library import ACTIVATIONS, CudaLibrary
from steps import Shape, random_step

ort_graphs = pytest.importorskip("ort_graphs", reason="not run: onnxruntime or onnx is not installed")
from ort_graphs import (  # noqa: E402
    CPU_INT8,
    ROUNDING,
    Bound,
    Graph,
    agree,
    cuda_session,
    half,
    int4,
    outputs_of,
    randn,
    run,
    shape_attributes,
    why_not,
)

pytestmark = pytest.mark.skipif(why_not() is not None, reason=f"not run: {why_not()}")
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
Tensor = torch.Tensor


@pytest.mark.parametrize("io", [F32, F16, BF16])
def test_elementwise(library: CudaLibrary, generator: torch.Generator, io: torch.dtype) -> None:
    x, residual = (randn(generator, 33, 256).to(io) for _ in range(2))
    weight = 1 + 0.1 * randn(generator, 256)
    graph = Graph(io)
    graph.add("AddRMSNorm", ["x", "residual", "weight"], ["y", "sum"], epsilon=1e-5)
    inputs = {"x": x, "residual": residual, "weight": weight}
    outputs = outputs_of({"y": (io, (33, 256)), "sum": (io, (33, 256))})
    got = run(graph, inputs, outputs)
    for ours, wanted in zip(
        got.values(), library.add_rms_norm(x, residual, weight, float(np.float32(1e-5))), strict=True
    ):
        assert torch.equal(ours, wanted)
    agree(got, graph.cpu(inputs, {"y": io, "sum": io}), 4 * ROUNDING[io])
    if io is not BF16:  # numpy has none: without IO binding, over ONNX Runtime's own copies
        arrays = {name: tensor.cpu().numpy() for name, tensor in inputs.items()}
        plain = graph.cuda(inputs, {"y": io, "sum": io}).run(None, arrays)
        assert all(np.array_equal(a, b.cpu().numpy()) for a, b in zip(plain, got.values(), strict=True))
    for activation in ACTIVATIONS:
        graph = Graph(io)
        graph.add("GatedActivation", ["gate_up"], ["y"], activation=activation)
        got = run(graph, {"gate_up": x}, outputs_of({"y": (io, (33, 128))}))
        assert torch.equal(got["y"], library.gated_activation(x, activation))
        agree(got, graph.cpu({"gate_up": x}, {"y": io}), max(4 * ROUNDING[io], 1e-6))


@pytest.mark.parametrize("kind", ["i4", "half"])
def test_quant_linear(library: CudaLibrary, generator: torch.Generator, kind: str) -> None:
    """Row counts of every kernel: decode, the grouped product, cuBLASLt."""
    weights = int4(640, 512, 64, generator) if kind == "i4" else half(640, 512, generator)
    graph = Graph(F16)
    graph.linear("x", "y", weights)
    graph.nodes[0][1].append("bias")
    bias = randn(generator, 640)
    session = graph.cuda({"x": torch.empty(1, 512, dtype=F16), "bias": bias}, {"y": F16})
    packed = torch.from_numpy(weights.for_cuda(library, F16)[0]).cuda()
    desc = library.linear_desc(512, 640, weights.format, F16, weights.block)
    for rows in (1, 5, 16, 64, 100, 800):
        x = randn(generator, rows, 512).half()
        got = Bound(session, {"x": x, "bias": bias}, outputs_of({"y": (F16, (rows, 640))})).run()
        assert torch.equal(got["y"], library.linear(desc, x, packed, bias))
        cpu = graph.cpu({"x": x, "bias": bias}, {"y": F16})
        agree(got, cpu, 6 * ROUNDING[F16] + (CPU_INT8 if kind == "i4" else 0))
    assert session.run(None, {"x": x[:0].cpu().numpy(), "bias": bias.cpu().numpy()})[0].shape == (0, 640)


@pytest.mark.parametrize("io", [F16, BF16])
def test_embedding_before_a_norm(library: CudaLibrary, generator: torch.Generator, io: torch.dtype) -> None:
    """The graph's value_info tells Embedding's dtype."""
    weights = int4(96, 256, 64, generator)
    graph = Graph(io)
    graph.weights["weight"] = weights
    graph.add("Embedding", ["input_ids", "weight"], ["hidden"], **weights.attributes())
    graph.add("AddRMSNorm", ["hidden", "residual", "norm"], ["y", "sum"])
    ids = torch.randint(0, 96, (19,), dtype=torch.int32, device="cuda", generator=generator)
    inputs = {
        "input_ids": ids,
        "residual": torch.zeros(19, 256, dtype=io, device="cuda"),
        "norm": torch.ones(256, device="cuda"),
    }
    got = run(graph, inputs, outputs_of({"y": (io, (19, 256)), "sum": (io, (19, 256))}))
    desc = library.linear_desc(256, 96, "i4", io, 64)
    rows = library.embedding(desc, ids, torch.from_numpy(weights.for_cuda(library, io)[0]).cuda(), io)
    assert torch.equal(got["sum"], rows)
    agree(got, graph.cpu(inputs, {"y": io, "sum": io}), 4 * ROUNDING[io])


ATTENTION = {
    "half": Shape(((1, 300), (1, 17), (40, 70), (1, 1)), padding_tokens=3, sinks=True, norm=True),
    "float8": Shape(
        ((1, 300), (5, 40), (70, 90)), io=BF16, cache=torch.float8_e4m3fn, head_dim=64, padding_sequences=1
    ),
}


def attention_graph(shape: Shape, inputs: dict[str, Tensor], io: torch.dtype) -> Graph:
    graph = Graph(io)
    names = [
        *("qkv", "cache", "query_start", "kv_len", "block_table", "slot_mapping", "position_ids"),
        *("rope_cos", "rope_sin", "q_norm", "k_norm", "sinks", "cache_scales"),
    ]
    graph.add(
        "PagedAttention",
        [name if name in inputs else "" for name in names],
        ["attention", "cache_out"],
        **shape_attributes(shape),
    )
    return graph


@pytest.mark.parametrize("name", ATTENTION)
def test_attention(library: CudaLibrary, generator: torch.Generator, name: str) -> None:
    step = random_step(ATTENTION[name], generator)
    shape, io = step.shape, step.shape.io
    inputs = {key: tensor for key, tensor in step.inputs.items() if tensor is not None}
    step.desc.scale = float(np.float32(shape.head_dim**-0.5))
    graph = attention_graph(shape, inputs, io)
    before = inputs["cache"].clone()
    cpu = graph.cpu(inputs, {"attention": io, "cache_out": shape.cache})
    wanted = library.attention(step.desc, {**step.inputs, "cache": before})

    tokens = inputs["qkv"].shape[0]
    outputs = outputs_of({"attention": (io, (tokens, shape.heads * shape.head_dim))})
    got = run(graph, inputs, {**outputs, "cache_out": inputs["cache"]})
    assert torch.equal(got["attention"], wanted)
    assert torch.equal(inputs["cache"].view(torch.uint8), before.view(torch.uint8))
    used = sum(q for q, _ in shape.lengths)
    agree(
        {"attention": got["attention"][:used].view(-1, shape.head_dim)},
        {"attention": cpu["attention"][:used].view(-1, shape.head_dim)},
        (4 if name == "half" else 8) * ROUNDING[io],
    )
    # What was written, within a step of the cache's own type.
    limit = 2 * ROUNDING[F16] if name == "half" else 2.0**-4
    error = (inputs["cache"].cpu().float() - cpu["cache_out"].float()).abs()
    assert (error <= limit * cpu["cache_out"].float().abs() + 1e-3).all()


def test_a_cache_that_is_not_bound_in_place_is_refused(generator: torch.Generator) -> None:
    step = random_step(ATTENTION["half"], generator)
    inputs = {key: tensor for key, tensor in step.inputs.items() if tensor is not None}
    graph = attention_graph(step.shape, inputs, F16)
    tokens = inputs["qkv"].shape[0]
    outputs = outputs_of({"attention": (F16, (tokens, 1024))})
    before = inputs["cache"].clone()
    with pytest.raises(Exception, match=r"PagedAttention\.0.*cache_out is another buffer than cache"):
        run(graph, inputs, {**outputs, "cache_out": torch.empty_like(before)})
    assert torch.equal(inputs["cache"], before)


def test_quant_moe(library: CudaLibrary, generator: torch.Generator) -> None:
    """Each expert's weights at the stride its own library asks for."""
    from test_gpu_quant_moe import Moe

    from enginebay.plugins.load import KernelLibrary
    from enginebay.plugins.load_moe import MoeRunner

    moe = Moe(io=F16)
    attributes = {
        "num_experts": moe.experts,
        "top_k": moe.top_k,
        "hidden": moe.hidden,
        "intermediate": moe.intermediate,
        "renormalize": 1,
        "activation": "silu",
        "format": "i4",
        "block_size": moe.block,
    }
    cpu_library = KernelLibrary()
    strides = {
        "cuda": library.expert_strides(moe.desc()),
        "cpu": MoeRunner(cpu_library, **attributes).strides(),
    }
    experts = [
        (
            int4(2 * moe.intermediate, moe.hidden, moe.block, generator),
            int4(moe.hidden, moe.intermediate, moe.block, generator),
        )
        for _ in range(moe.experts)
    ]

    def stacked(device: str, which: int) -> Tensor:
        packed = [
            pair[which].for_cuda(library, F16)[0] if device == "cuda" else pair[which].for_cpu(cpu_library)[0]
            for pair in experts
        ]
        stride = strides[device][which]
        return torch.cat([torch.from_numpy(np.pad(p, (0, stride - len(p)))) for p in packed])

    x, logits = randn(generator, 50, moe.hidden).half(), 2 * randn(generator, 50, moe.experts)
    graph = Graph(F16)
    graph.add("QuantMoE", ["x", "router_logits", "gate_up", "down"], ["y"], **attributes)
    weights = {
        device: {"gate_up": stacked(device, 0).to(device), "down": stacked(device, 1).to(device)}
        for device in ("cuda", "cpu")
    }
    inputs = {"x": x, "router_logits": logits}
    got = run(graph, {**inputs, **weights["cuda"]}, outputs_of({"y": (F16, (50, moe.hidden))}))
    assert torch.equal(got["y"], library.moe(moe.desc(), x, router_logits=logits, **weights["cuda"]))
    agree(got, graph.cpu({**inputs, **weights["cpu"]}, {"y": F16}), 2 * CPU_INT8 + 6 * ROUNDING[F16])


@pytest.mark.parametrize("io", [F32, F16])
def test_sampling(library: CudaLibrary, generator: torch.Generator, io: torch.dtype) -> None:
    """Both libraries draw the same numbers, so tokens differ only where two costs agree within rounding."""
    rows, vocab = 64, 1000
    logits = (3 * randn(generator, rows, vocab)).to(io)
    settings = {
        "temperature": torch.rand(rows, device="cuda", generator=generator),
        "top_k": torch.randint(0, 50, (rows,), dtype=torch.int32, device="cuda", generator=generator),
        "top_p": 0.5 + 0.5 * torch.rand(rows, device="cuda", generator=generator),
        "min_p": 0.05 * torch.rand(rows, device="cuda", generator=generator),
        "seeds": torch.randint(0, 2**62, (rows,), device="cuda", generator=generator),
        "positions": torch.arange(rows, device="cuda"),
    }
    settings["temperature"][::4] = 0
    inputs = {"logits": logits, **settings}
    graph = Graph(io)
    graph.add("Sample", list(inputs), ["next_token"])
    got = run(graph, inputs, outputs_of({"next_token": (torch.int32, (rows,))}))["next_token"]
    assert torch.equal(got, library.spec_verify(logits, rows, **settings)[2])
    cpu = graph.cpu(inputs, {"next_token": torch.int32})["next_token"]
    assert torch.equal(got[::4].cpu(), cpu[::4])
    assert (got.cpu() != cpu).sum() <= 1

    starts = torch.arange(0, rows + 1, 4, dtype=torch.int32, device="cuda")
    drafts = logits.roll(-1, 0).argmax(1).int()  # the likeliest of the row it follows, half of the time
    drafts[1::4] = logits.argmax(1).int()[0::4]
    per_sequence = {name: tensor[: rows // 4].contiguous() for name, tensor in settings.items()}
    inputs = {"logits": logits, "row_start": starts, "draft_tokens": drafts}
    graph = Graph(io)
    outputs = {"accepted": (rows // 4,), "path": (rows // 4, 3), "next_token": (rows // 4,)}
    graph.add("SpecVerify", [*inputs, "", "", *per_sequence], list(outputs), max_depth=3)
    inputs |= per_sequence
    got = run(graph, inputs, outputs_of({name: (torch.int32, size) for name, size in outputs.items()}))
    wanted = library.spec_verify(logits, rows // 4, 3, row_start=starts, draft_tokens=drafts, **per_sequence)
    for ours, theirs in zip(got.values(), wanted, strict=True):
        assert torch.equal(ours, theirs)
    cpu = graph.cpu(inputs, dict.fromkeys(outputs, torch.int32))
    assert (got["next_token"].cpu() != cpu["next_token"]).sum() <= 1
    assert got["accepted"].sum() > 0


def test_what_the_library_lacks_is_refused_at_load(generator: torch.Generator) -> None:
    x = {"x": torch.empty(2, 512, dtype=F16)}

    def refusal(graph: Graph, inputs: dict[str, Tensor], outputs: dict[str, torch.dtype]) -> str:
        with pytest.raises(Exception) as caught:  # noqa: PT011
            cuda_session(graph.model({}, graph.io, inputs, outputs))
        return str(caught.value)

    bytes_ = {"weight": torch.empty(4, dtype=torch.uint8)}
    linear = {"in_features": 512, "out_features": 64, "format": "i4", "block_size": 64}
    for op, io, attributes, words in (
        ("QuantLinearF8Inputs", F32, linear, "QuantLinearF8Inputs"),
        ("QuantLinear", F32, linear, "QuantLinear.0.*io_dtype float32; it has float16 and bfloat16"),
        ("QuantLinear", F16, {**linear, "format": "i8"}, "QuantLinear.0.*format int8"),
        (
            "QuantLinear",
            F16,
            {**linear, "layout": "cpu-i4"},
            "QuantLinear.0.*packed as 'cpu-i4', this library takes 'cuda-i4-m16k64-f16-v1'",
        ),
    ):
        graph = Graph(io)
        graph.add(op, ["x", "weight"], ["y"], **attributes)
        message = refusal(graph, {"x": x["x"].to(io), **bytes_}, {"y": io})
        assert re.search(words, message, re.DOTALL), message
    step = random_step(ATTENTION["half"], generator)
    inputs = {key: tensor for key, tensor in step.inputs.items() if tensor is not None}
    for changes, words in (
        ({"latent_dim": 64}, "no latent attention"),
        ({"head_dim": 80}, "without io float16, cache float16, head_dim 80"),
    ):
        graph = attention_graph(step.shape, inputs, F16)
        graph.nodes[0][3].update(changes)
        message = refusal(graph, inputs, {"attention": F16, "cache_out": F16})
        assert "PagedAttention" in message
        assert words in message
