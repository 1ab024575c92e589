"""Graphs of EngineBay ops in ONNX Runtime: run by the CUDA adapter on torch tensors, and by the CPU adapter.

A graph is written once. `Graph.cuda` runs it in the dtype of its activations, `Graph.cpu` in float32 over the
same numbers; each packs the weights with its own library.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch
from cuda_library import CudaLibrary
from matrices import relative_error
from steps import Shape

from enginebay.plugins import ops
from enginebay.plugins.load import KernelLibrary, PluginError, cuda_adapter_path, library_path

Tensor = torch.Tensor
ELEMENTS = {
    torch.float32: onnx.TensorProto.FLOAT,
    torch.float16: onnx.TensorProto.FLOAT16,
    torch.bfloat16: onnx.TensorProto.BFLOAT16,
    torch.float8_e4m3fn: onnx.TensorProto.FLOAT8E4M3FN,
    torch.int8: onnx.TensorProto.INT8,
    torch.uint8: onnx.TensorProto.UINT8,
    torch.int32: onnx.TensorProto.INT32,
    torch.int64: onnx.TensorProto.INT64,
}
ROUNDING = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
CACHES = ("cache", "cache_out")
# Rows of x become int8 in the CPU library: a step of a block's largest value (about 2.5 deviations) over 127,
# rounded evenly, is 0.6 % of a deviation.
CPU_INT8 = 0.01


def why_not() -> str | None:
    """What is missing to run graphs on the GPU."""
    if "CUDAExecutionProvider" not in ort.get_available_providers():
        return f"onnxruntime {ort.__version__} has no CUDA provider"
    try:
        cuda_adapter_path()
    except PluginError as error:
        return str(error)
    return None


def shape_attributes(shape: Shape) -> dict[str, Any]:
    """PagedAttention's attributes of a step's shape."""
    return {
        "num_heads": shape.heads,
        "num_kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "scale": shape.head_dim**-0.5,
    }


@dataclass(frozen=True)
class Weights:
    """Plain weights of a linear layer, on the host, as the packing functions take them."""

    values: Tensor
    scales: Tensor | None = None
    format: str = "f16"
    block: int = 0

    def attributes(self) -> dict[str, Any]:
        n, k = self.values.shape
        return {"in_features": k, "out_features": n, "format": self.format, "block_size": self.block}

    def for_cuda(self, library: CudaLibrary, io: torch.dtype) -> tuple[np.ndarray, str]:
        n, k = self.values.shape
        desc = library.linear_desc(k, n, self.format, io, self.block)
        return library.pack(desc, self.values, self.scales).numpy(), library.layout(desc)

    def for_cpu(self, library: KernelLibrary) -> tuple[np.ndarray, str]:
        scales = None if self.scales is None else self.scales.numpy()
        packed = library.pack_linear(self.values.numpy(), scales, format=self.format, block_size=self.block)
        n, k = self.values.shape
        return packed, library.linear_layout(
            rows=n, columns=k, format=self.format, block_size=self.block, symmetric=True
        )


def int4(n: int, k: int, block: int, generator: torch.Generator) -> Weights:
    """Scales that float16 holds, so that both libraries multiply by the same weights."""
    device = generator.device
    values = torch.randint(0, 16, (n, k), dtype=torch.uint8, device=device, generator=generator)
    spread = 0.5 + torch.rand(n, k // block, device=device, generator=generator)
    scales = (spread * k**-0.5 / 4.6).half().float()  # so that y is about as large as x
    return Weights(values.cpu(), scales.cpu(), "i4", block)


def half(n: int, k: int, generator: torch.Generator) -> Weights:
    return Weights((torch.randn(n, k, device=generator.device, generator=generator) * k**-0.5).half().cpu())


@dataclass
class Graph:
    """Nodes, in order; `io` is the dtype of activations on CUDA."""

    io: torch.dtype
    nodes: list[tuple[str, list[str], list[str], dict[str, Any]]] = field(default_factory=list)
    weights: dict[str, Weights] = field(default_factory=dict)
    constants: dict[str, Tensor] = field(default_factory=dict)

    def add(self, op: str, inputs: Iterable[str], outputs: Iterable[str], **attributes: Any) -> None:
        """A node; names of weights and constants may be among the inputs, "" is an absent one."""
        self.nodes.append((op, list(inputs), list(outputs), attributes))

    def linear(self, x: str, y: str, weights: Weights, op: str = "QuantLinear") -> None:
        self.weights[f"{y}.weight"] = weights
        self.add(op, [x, f"{y}.weight"], [y], **weights.attributes())

    def model(
        self,
        packed: dict[str, tuple[np.ndarray, str]],
        io: torch.dtype,
        inputs: dict[str, Tensor],
        outputs: dict[str, torch.dtype],
    ) -> bytes:
        """The serialised model; every dimension of its inputs is free."""

        def info(name: str, dtype: torch.dtype, rank: int | None) -> onnx.ValueInfoProto:
            dtype = io if dtype is self.io and name not in CACHES else dtype
            shape = None if rank is None else [f"{name}_{i}" for i in range(rank)]
            return onnx.helper.make_tensor_value_info(name, ELEMENTS[dtype], shape)

        nodes = []
        for index, (op, names, results, attributes) in enumerate(self.nodes):
            layouts = [packed[name][1] for name in names if name in packed]
            layout = {"layout": layouts[0]} if layouts else {}
            nodes.append(
                onnx.helper.make_node(
                    op, names, results, name=f"{op}.{index}", domain=ops.DOMAIN, **attributes, **layout
                )
            )
        arrays = {name: array for name, (array, _) in packed.items()}
        arrays |= {name: tensor.numpy() for name, tensor in self.constants.items()}
        graph = onnx.helper.make_graph(
            nodes,
            "graph",
            [info(name, tensor.dtype, tensor.ndim) for name, tensor in inputs.items()],
            [info(name, dtype, None) for name, dtype in outputs.items()],
            [onnx.numpy_helper.from_array(array, name) for name, array in arrays.items()],
            # What Embedding gives follows from none of its inputs.
            value_info=[
                info(results[0], self.io, 2)
                for op, _, results, _ in self.nodes
                if op == "Embedding" and results[0] not in outputs
            ],
        )
        opsets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid(ops.DOMAIN, ops.OPSET)]
        return bytes(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString())

    def cuda(
        self, inputs: dict[str, Tensor], outputs: dict[str, torch.dtype], *, graphs: bool = False
    ) -> ort.InferenceSession:
        """A session all of whose nodes run on the GPU; `graphs`: it captures CUDA graphs."""
        library = CudaLibrary()
        packed = {name: w.for_cuda(library, self.io) for name, w in self.weights.items()}
        return cuda_session(self.model(packed, self.io, inputs, outputs), graphs=graphs)

    def cpu(self, inputs: dict[str, Tensor], outputs: dict[str, torch.dtype]) -> dict[str, Tensor]:
        """The CPU adapter's answer in float32, by name; caches keep their dtype and are written in place."""
        library = KernelLibrary()
        packed = {name: w.for_cpu(library) for name, w in self.weights.items()}
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.register_custom_ops_library(str(library_path()))
        model = self.model(packed, torch.float32, inputs, outputs)
        session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        given = {
            name: tensor.cpu() if name in CACHES or tensor.dtype is not self.io else tensor.cpu().float()
            for name, tensor in inputs.items()
        }
        binding = session.io_binding()
        for name, tensor in given.items():
            bind(binding, name, tensor)
        for name in outputs:
            if name == "cache_out":
                bind(binding, name, given["cache"], output=True)
            else:
                binding.bind_output(name, "cpu")
        session.run_with_iobinding(binding)
        return {
            name: given["cache"] if name == "cache_out" else torch.from_numpy(value.numpy())
            for name, value in zip(outputs, binding.get_outputs(), strict=True)
        }


def cuda_session(model: bytes, *, graphs: bool = False) -> ort.InferenceSession:
    """Refuses to put any node on the CPU."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    options.register_custom_ops_library(str(cuda_adapter_path()))
    provider = ("CUDAExecutionProvider", {"enable_cuda_graph": "1" if graphs else "0"})
    return ort.InferenceSession(model, options, providers=[provider])


def bind(binding: ort.IOBinding, name: str, tensor: Tensor, *, output: bool = False) -> None:
    """The tensor's own memory as an input or output."""
    assert tensor.is_contiguous()
    to = binding.bind_output if output else binding.bind_input
    to(
        name,
        tensor.device.type,
        tensor.device.index or 0,
        ELEMENTS[tensor.dtype],
        tuple(tensor.shape),
        tensor.data_ptr(),
    )


class Bound:
    """A session over fixed tensors: their contents may change between runs, their addresses do not."""

    def __init__(
        self, session: ort.InferenceSession, inputs: dict[str, Tensor], outputs: dict[str, Tensor]
    ) -> None:
        self._session, self._binding = session, session.io_binding()
        self.inputs, self.outputs = inputs, outputs
        for name, tensor in inputs.items():
            bind(self._binding, name, tensor)
        for name, tensor in outputs.items():
            bind(self._binding, name, tensor, output=True)

    def run(self, graph: int | None = None) -> dict[str, Tensor]:
        """One run, outputs poisoned before it; `graph`: id of the CUDA graph that is captured or replayed."""
        for name, tensor in self.outputs.items():
            if name != "cache_out":
                tensor.view(torch.uint8).fill_(0xFF)
        options = ort.RunOptions()
        if graph is not None:
            options.add_run_config_entry("gpu_graph_id", str(graph))
        torch.cuda.synchronize()
        self._session.run_with_iobinding(self._binding, options)
        torch.cuda.synchronize()
        return self.outputs


def randn(generator: torch.Generator, *size: int) -> Tensor:
    return torch.randn(*size, device="cuda", generator=generator)


def outputs_of(shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]]) -> dict[str, Tensor]:
    return {name: torch.empty(size, dtype=dtype, device="cuda") for name, (dtype, size) in shapes.items()}


def run(graph: Graph, inputs: dict[str, Tensor], outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The graph's answer on the GPU, eagerly, over the tensors' own memory."""
    session = graph.cuda(inputs, {name: tensor.dtype for name, tensor in outputs.items()})
    return Bound(session, inputs, outputs).run()


def agree(ours: dict[str, Tensor], cpu: dict[str, Tensor], limit: float) -> None:
    """Every row within `limit` of the CPU's."""
    for name, tensor in ours.items():
        assert torch.isfinite(tensor.float()).all(), name
        error = relative_error(tensor.cpu(), cpu[name])
        assert error < limit, f"{name}: {error:.2e}, limit {limit:.2e}"
