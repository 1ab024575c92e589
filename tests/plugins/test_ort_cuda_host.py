"""ONNX Runtime's CUDA adapter where there is no GPU: what it registers, and for which types.

It is linked to a stand-in with the kernels' symbols, so that what needs no device is tested where there is no
nvcc either. tests/gpu runs it over the kernels.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort
import pytest

from enginebay.plugins import build_cuda, build_ort_cuda, ops
from enginebay.plugins.build import BuildError

FLOAT, HALF, BRAIN = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
FLOATS = (FLOAT, HALF, BRAIN)
HEADERS = build_cuda.HERE / "include" / "enginebay"
TYPES = {
    "int8": onnx.TensorProto.INT8,
    "int32": onnx.TensorProto.INT32,
    "int64": onnx.TensorProto.INT64,
    "uint8": onnx.TensorProto.UINT8,
    "float32": FLOAT,
}


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lib")
    symbols = re.findall(r"eb_\w+(?=\()", "".join(path.read_text() for path in sorted(HEADERS.glob("*.h"))))
    source = folder / "symbols.c"
    source.write_text("".join(f"void {name}(void) {{}}\n" for name in dict.fromkeys(symbols)))
    kernels = folder / build_cuda.LIBRARY.name
    subprocess.run(["g++", "-x", "c", "-shared", "-fPIC", source, "-o", kernels], check=True)
    return build_ort_cuda.build(library=folder / build_ort_cuda.LIBRARY.name)


def loading(adapter: Path, nodes: list[Any], inputs: dict[str, int], outputs: dict[str, int]) -> str:
    """What ONNX Runtime says of a graph whose kernels it knows but whose provider it lacks."""
    graph = onnx.helper.make_graph(
        nodes,
        "graph",
        [onnx.helper.make_tensor_value_info(name, kind, None) for name, kind in inputs.items()],
        [onnx.helper.make_tensor_value_info(name, kind, None) for name, kind in outputs.items()],
    )
    opsets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid(ops.DOMAIN, ops.OPSET)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.register_custom_ops_library(str(adapter))
    with pytest.raises(Exception) as caught:  # noqa: PT011
        ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return str(caught.value)


def node_of(op: ops.Op, io: int, cache: int = HALF) -> tuple[Any, dict[str, int], dict[str, int]]:
    """A node with its required inputs, and the types of its inputs and outputs."""

    def kind(param: ops.Param) -> int:
        if param.name in ("cache", "cache_out"):
            return cache
        return io if param.dtypes == ops.FLOATS else TYPES[param.dtypes[0]]

    inputs = {param.name: kind(param) for param in op.inputs if not param.optional}
    outputs = {param.name: kind(param) for param in op.outputs}
    node = onnx.helper.make_node(op.name, list(inputs), list(outputs), name="the_node", domain=ops.DOMAIN)
    return node, inputs, outputs


NOT_HERE = r"(Could not find an implementation|Failed to find kernel).*{}.*the_node"


@pytest.mark.parametrize("name", build_cuda.OPS)
def test_every_op_of_the_kernels_is_registered_for_cuda_alone(adapter: Path, name: str) -> None:
    """Every type of activations passes inference; what is missing is the provider, and the CPU takes none."""
    for io in FLOATS:
        node, inputs, outputs = node_of(ops.op(name), io)
        message = loading(adapter, [node], inputs, outputs)
        assert re.search(NOT_HERE.format(name), message), message


@pytest.mark.parametrize("name", sorted({op.name for op in ops.OPS} - set(build_cuda.OPS)))
def test_an_op_the_kernels_lack_is_refused_by_name(adapter: Path, name: str) -> None:
    node, inputs, outputs = node_of(ops.op(name), FLOAT)
    assert f"{name}(-1) is not a registered function/op" in loading(adapter, [node], inputs, outputs)


@pytest.mark.parametrize("cache", [HALF, BRAIN, onnx.TensorProto.FLOAT8E4M3FN, onnx.TensorProto.INT8])
def test_types_follow_from_the_inputs(adapter: Path, cache: int) -> None:
    """The attention's answer has the type of qkv, which nothing in the graph says again."""
    for io in (HALF, BRAIN):
        node, inputs, outputs = node_of(ops.op("PagedAttention"), io, cache)
        linear = onnx.helper.make_node("QuantLinear", ["attention", "weight"], ["y"], domain=ops.DOMAIN)
        found = {"y": io, "cache_out": cache}
        message = loading(adapter, [node, linear], {**inputs, "weight": TYPES["uint8"]}, found)
        assert re.search(NOT_HERE.format("PagedAttention") + "|QuantLinear", message), message
        wrong = loading(adapter, [node, linear], {**inputs, "weight": TYPES["uint8"]}, {**found, "y": FLOAT})
        assert "Type Error" in wrong
        assert outputs["attention"] == io


def test_a_graph_must_tell_the_type_of_an_embedding(adapter: Path) -> None:
    node, inputs, _ = node_of(ops.op("Embedding"), HALF)
    norm = onnx.helper.make_node("AddRMSNorm", ["y", "r", "w"], ["z", "sum"], domain=ops.DOMAIN)
    inputs |= {"r": HALF, "w": FLOAT}
    assert "type inference failed" in loading(adapter, [node, norm], inputs, {"z": HALF, "sum": HALF})


def test_it_shows_one_symbol_and_finds_the_kernels_beside_it(adapter: Path) -> None:
    symbols = subprocess.run(
        ["nm", "-D", "--defined-only", adapter], capture_output=True, text=True, check=True
    )
    assert [line.split()[-1] for line in symbols.stdout.splitlines()] == ["RegisterCustomOps"]
    dynamic = subprocess.run(["readelf", "-d", adapter], capture_output=True, text=True, check=True).stdout
    assert f"Shared library: [{build_cuda.LIBRARY.name}]" in dynamic
    assert "[$ORIGIN]" in dynamic


def test_without_kernels_the_build_says_what_to_build(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=f"no CUDA kernels at {tmp_path}.*build_cuda"):
        build_ort_cuda.build(library=tmp_path / build_ort_cuda.LIBRARY.name)
