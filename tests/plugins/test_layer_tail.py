"""LayerTail: bit for bit what the separate ops give, whatever the threads, and its refusals."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from ctypes import byref, c_int64, c_size_t
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from quant_linear_cases import Format, Layer, make_layer

from enginebay.plugins import ops
from enginebay.plugins.load import KernelLibrary, PluginError, library_path

FLOAT, UINT8 = onnx.TensorProto.FLOAT, onnx.TensorProto.UINT8
ATTENDED, HIDDEN, INTERMEDIATE, NEXT = 96, 64, 160, 80
SHAPES = {
    "out": (HIDDEN, ATTENDED),
    "gate_up": (2 * INTERMEDIATE, HIDDEN),
    "down": (HIDDEN, INTERMEDIATE),
    "next": (NEXT, HIDDEN),
}
FORMATS = {
    "out": Format("i4", 32),
    "gate_up": Format("i4", 32, False),
    "down": Format("f16"),
    "next": Format("i8", 64),
}
EPSILONS = {"mlp_epsilon": 1e-5, "next_epsilon": 1e-6}


class Case:
    """Random weights, a graph of one LayerTail and one of the seven nodes it stands for."""

    def __init__(self, library: KernelLibrary, bias: bool) -> None:
        self.rng = np.random.default_rng()
        self.layers: dict[str, Layer] = {
            name: make_layer(library, FORMATS[name], *SHAPES[name], self.rng) for name in ops.TAIL_PRODUCTS
        }
        self.constants: dict[str, NDArray[Any]] = {
            f"{name}_norm": self.rng.uniform(0.5, 1.5, HIDDEN).astype(np.float32) for name in ("mlp", "next")
        }
        for name, layer in self.layers.items():
            self.constants[f"{name}_weight"] = layer.packed
            if bias:
                self.constants[f"{name}_bias"] = self.rng.standard_normal(layer.n).astype(np.float32)

    def fused(self, threads: int, **changes: Any) -> ort.InferenceSession:
        names = [p.name for p in ops.LAYER_TAIL.inputs if p.name in ("x", "residual", *self.constants)]
        attributes: dict[str, Any] = {"attended": ATTENDED, "hidden": HIDDEN, "intermediate": INTERMEDIATE}
        attributes |= {"next_features": NEXT, "activation": "silu", **EPSILONS}
        for name, fmt in FORMATS.items():
            attributes |= {
                f"{name}_{key}": int(v) if isinstance(v, bool) else v for key, v in fmt.arguments.items()
            }
        return self._session([("LayerTail", names, ["y", "sum"], attributes | changes)], threads)

    def separate(self) -> ort.InferenceSession:
        def product(name: str, x: str, y: str) -> Any:
            layer, bias = self.layers[name], f"{name}_bias"
            attributes = {"in_features": layer.k, "out_features": layer.n, **layer.fmt.arguments}
            attributes["symmetric"] = int(layer.fmt.symmetric)
            inputs = [x, f"{name}_weight", *([bias] if bias in self.constants else [])]
            return "QuantLinear", inputs, [y], attributes

        norm = "AddRMSNorm"
        nodes = [
            product("out", "x", "attended"),
            (norm, ["attended", "residual", "mlp_norm"], ["h", "a"], {"epsilon": EPSILONS["mlp_epsilon"]}),
            product("gate_up", "h", "wide"),
            ("GatedActivation", ["wide"], ["gated"], {"activation": "silu"}),
            product("down", "gated", "narrow"),
            (norm, ["narrow", "a", "next_norm"], ["n", "sum"], {"epsilon": EPSILONS["next_epsilon"]}),
            product("next", "n", "y"),
        ]
        return self._session(nodes, 2)

    def _session(self, nodes: list[Any], threads: int) -> ort.InferenceSession:
        value, helper = onnx.helper.make_tensor_value_info, onnx.helper
        made = [
            helper.make_node(
                op,
                inputs,
                outputs,
                name=f"the_{op}" if index == 0 else f"node_{index}",
                domain=ops.DOMAIN,
                **attributes,
            )
            for index, (op, inputs, outputs, attributes) in enumerate(nodes)
        ]
        inputs = [value("x", FLOAT, ["T", None]), value("residual", FLOAT, ["T", None])]
        outputs = [value("y", FLOAT, ["T", NEXT]), value("sum", FLOAT, ["T", HIDDEN])]
        tensors = [onnx.numpy_helper.from_array(array, name) for name, array in self.constants.items()]
        graph = helper.make_graph(made, "tail", inputs, outputs, tensors)
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid(ops.DOMAIN, ops.OPSET)]
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 4
        options.register_custom_ops_library(str(library_path()))
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
        return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])

    def rows(self, count: int) -> dict[str, NDArray[np.float32]]:
        return {
            name: self.rng.standard_normal((count, width)).astype(np.float32)
            for name, width in (("x", ATTENDED), ("residual", HIDDEN))
        }


@pytest.mark.parametrize("bias", [False, True])
def test_the_same_bits_as_the_ops_it_stands_for(library: KernelLibrary, bias: bool) -> None:
    case = Case(library, bias)
    separate, fused = case.separate(), {threads: case.fused(threads) for threads in (1, 2, 5)}
    for count in (0, 1, 3, 17, 600):  # 600: more than one helping of rows
        feeds = case.rows(count)
        expected = [array.tobytes() for array in separate.run(None, feeds)]
        for session in fused.values():
            assert [array.tobytes() for array in session.run(None, feeds)] == expected


def test_threads_that_come_late_or_never_change_nothing(library: KernelLibrary) -> None:
    """Many short calls at once: three sessions with more threads each than there are processors."""
    case = Case(library, bias=True)
    feeds = case.rows(4)
    expected = [array.tobytes() for array in case.separate().run(None, feeds)]

    def run(session: ort.InferenceSession) -> bool:
        return all([a.tobytes() for a in session.run(None, feeds)] == expected for _ in range(150))

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(run, [case.fused(3) for _ in range(3)]))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"intermediate": 96}, "LayerTail 'the_LayerTail'.*weights"),
        ({"activation": "tanh"}, "activation is 'tanh'"),
        ({"down_format": "i5"}, "down_format is 'i5'"),
        ({"next_block_size": 7}, "block_size 7"),
        ({"out_layout": "cuda-i4"}, "packed as 'cuda-i4'"),
    ],
)
def test_refusals_name_the_node_or_the_value(library: KernelLibrary, changes: Any, words: str) -> None:
    case = Case(library, bias=False)
    with pytest.raises(Exception, match=words):  # ONNX Runtime's own exception classes
        case.fused(2, **changes).run(None, case.rows(2))


def test_shapes_that_disagree_are_refused(library: KernelLibrary) -> None:
    case = Case(library, bias=False)
    feeds = case.rows(3) | {"residual": np.zeros((2, HIDDEN), np.float32)}
    with pytest.raises(Exception, match=r"residual \[T, 64\]; they are \[3, 96\] and \[2, 64\]"):
        case.fused(2).run(None, feeds)


def test_the_c_abi_refuses_what_is_not_there(library: KernelLibrary) -> None:
    size = c_size_t()
    with pytest.raises(PluginError, match="LayerTail: the descriptor is null"):
        library.call("eb_layer_tail_workspace_size", None, c_int64(1), byref(size))
    with pytest.raises(PluginError, match="LayerTail: the descriptor is null"):
        library.call("eb_layer_tail_run", None, None, None, c_size_t(0))
