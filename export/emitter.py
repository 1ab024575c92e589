"""A thin layer over onnx-ir.

Named nodes, weights as external initializers, custom ops checked against the op table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from enginebay.export.weights import Initializer
from enginebay.plugins import ops

OPSET = 24
WEIGHTS_FILE = "weights.bin"

_DTYPES = {
    "F32": ir.DataType.FLOAT,
    "F16": ir.DataType.FLOAT16,
    "BF16": ir.DataType.BFLOAT16,
    "U4": ir.DataType.UINT4,
    "F8_E4M3": ir.DataType.FLOAT8E4M3FN,
    "I8": ir.DataType.INT8,
    "I32": ir.DataType.INT32,
}

Attributes = Mapping[str, int | float | str | Sequence[int]]


class Emitter:
    """Collects the nodes of one graph.

    Every method that adds a node takes its name first and returns its output(s).
    """

    def __init__(self, weights: Mapping[str, Initializer]) -> None:
        self._weights = weights
        self._nodes: list[ir.Node] = []
        self._initializers: dict[str, ir.Value] = {}
        self._floats: dict[str, ir.Value] = {}

    def op(
        self, name: str, op_type: str, inputs: Sequence[ir.Value | None], **attributes: int | float | str
    ) -> ir.Value:
        """One standard ONNX node with one output, called `name`."""
        return self._add(name, op_type, inputs, attributes, [name])[0]

    def transpose(self, name: str, value: ir.Value, order: Sequence[int]) -> ir.Value:
        return self._add(name, "Transpose", [value], {"perm": list(order)}, [name])[0]

    def outputs(
        self,
        name: str,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        count: int,
        **attributes: int | float | str,
    ) -> list[ir.Value]:
        """One standard ONNX node with `count` outputs."""
        return self._add(name, op_type, inputs, attributes, [f"{name}.{index}" for index in range(count)])

    def split(self, name: str, value: ir.Value, sizes: Sequence[int]) -> list[ir.Value]:
        """`value` cut along its last axis into pieces of `sizes`."""
        lengths = self.constant(np.asarray(sizes, np.int64))
        return self.outputs(name, "Split", [value, lengths], len(sizes), axis=-1)

    def custom(
        self,
        name: str,
        op_type: str,
        inputs: Mapping[str, ir.Value | None],
        attributes: Attributes,
        outputs: Sequence[ir.Value],
    ) -> None:
        """One EngineBay op; inputs and attributes by the op table's names."""
        op = ops.op(op_type)
        unknown = set(inputs) - {param.name for param in op.inputs}
        unknown |= set(attributes) - {attribute.name for attribute in op.attributes}
        absent = {param.name for param in op.inputs if not param.optional and inputs.get(param.name) is None}
        absent |= {
            item.name for item in op.attributes if item.default is None and item.name not in attributes
        }
        assert not unknown | absent, f"{op_type}: unknown {unknown}, absent {absent}"
        ordered = [inputs.get(param.name) for param in op.inputs]
        while ordered[-1] is None:
            ordered.pop()
        node = ir.node(op_type, ordered, attributes, domain=ops.DOMAIN, outputs=outputs, name=name)
        self._nodes.append(node)

    def has(self, role: str) -> bool:
        return role in self._weights

    def weight(self, role: str) -> ir.Value:
        """The initializer of a role, in the checkpoint's dtype."""
        weight = self._weights[role]
        if weight.name not in self._initializers:
            dtype, shape = _DTYPES[weight.dtype], ir.Shape(weight.shape)
            tensor = ir.ExternalTensor(
                WEIGHTS_FILE, weight.offset, weight.nbytes, dtype, shape=shape, name=weight.name
            )
            self._register(
                ir.Value(name=weight.name, shape=shape, type=ir.TensorType(dtype), const_value=tensor)
            )
        return self._initializers[weight.name]

    def weight32(self, role: str) -> ir.Value:
        """The initializer of a role as float32: behind a Cast where the checkpoint's dtype is another, or a
        DequantizeLinear where the checkpoint is quantised."""
        value = self.weight(role)
        assert value.name is not None
        if value.dtype == ir.DataType.FLOAT:
            return value
        if self.has(f"{role}.scale"):
            return self._dequantized(role, value)
        if value.name not in self._floats:
            self._floats[value.name] = self.op(
                f"{value.name}.float", "Cast", [value], to=int(ir.DataType.FLOAT)
            )
        return self._floats[value.name]

    def _dequantized(self, role: str, value: ir.Value) -> ir.Value:
        """scale·(q − zero), or scale·q + minimum, by groups along the inputs."""
        assert value.name is not None
        if value.name not in self._floats:
            scale = self.weight(f"{role}.scale")
            inputs = [value, scale, *([self.weight(f"{role}.zero")] if self.has(f"{role}.zero") else [])]
            shape, groups = self._weights[role].shape, self._weights[f"{role}.scale"].shape[-1]
            name, axis, block = f"{value.name}.float", len(shape) - 1, shape[-1] // groups
            if not self.has(f"{role}.minimum"):
                steps = self.op(name, "DequantizeLinear", inputs, axis=axis, block_size=block)
                self._floats[value.name] = steps
                return steps
            rows, columns = shape
            steps = self.op(f"{name}.steps", "DequantizeLinear", inputs, axis=1, block_size=block)
            cut = self.constant(np.array([rows, groups, block], np.int64))
            blocks = self.op(f"{name}.blocks", "Reshape", [steps, cut])
            raised = self.op(f"{name}.raised", "Add", [blocks, self.weight(f"{role}.minimum")])
            flat = self.constant(np.array([rows, columns], np.int64))
            self._floats[value.name] = self.op(name, "Reshape", [raised, flat])
        return self._floats[value.name]

    def constant(self, array: np.ndarray) -> ir.Value:  # type: ignore[type-arg]
        """A small initializer inside the model file, shared by all that need the same value."""
        name = f"constant.{array.dtype}.{'_'.join(str(item) for item in array.ravel().tolist())}"
        if name not in self._initializers:
            tensor = ir.tensor(array, name=name)
            self._register(
                ir.Value(
                    name=name,
                    shape=ir.Shape(array.shape),
                    type=ir.TensorType(tensor.dtype),
                    const_value=tensor,
                )
            )
        return self._initializers[name]

    def scalar(self, value: float) -> ir.Value:
        """A float32 scalar."""
        return self.constant(np.asarray(value, np.float32))

    def model(
        self, inputs: Sequence[ir.Value], outputs: Sequence[ir.Value], metadata: Mapping[str, str]
    ) -> ir.Model:
        graph = ir.Graph(
            inputs,
            outputs,
            nodes=self._nodes,
            initializers=list(self._initializers.values()),
            opset_imports={"": OPSET, ops.DOMAIN: ops.OPSET},
            name="decoder",
        )
        return ir.Model(graph, ir_version=11, producer_name="enginebay", metadata_props=dict(metadata))

    def _register(self, value: ir.Value) -> None:
        assert value.name is not None
        self._initializers[value.name] = value

    def _add(
        self,
        name: str,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        attributes: Attributes,
        outputs: Sequence[str],
    ) -> list[ir.Value]:
        values = [ir.Value(name=output) for output in outputs]
        self._nodes.append(ir.node(op_type, inputs, attributes, outputs=values, name=name))
        return values
