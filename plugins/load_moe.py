"""QuantMoE of a kernel library over numpy arrays, for tests and benchmarks."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_float, c_int32, c_int64, c_size_t, c_void_p
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginebay.plugins import ops
from enginebay.plugins.load import ACTIVATIONS, DTYPES, WEIGHT_FORMATS, KernelLibrary

Array = NDArray[Any]
Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

SCORINGS = {name: index for index, name in enumerate(ops.MOE_SCORINGS)}

_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "eb_moe_expert_stride": (POINTER(c_size_t), POINTER(c_size_t)),
    "eb_moe_workspace_size": (c_int64, POINTER(c_size_t)),
    "eb_moe_run": (c_void_p, c_void_p, c_size_t),
}


class _Desc(ctypes.Structure):
    _fields_ = (
        *((name, c_int32) for name in ("num_experts", "top_k", "hidden", "intermediate", "scoring")),
        *((name, c_int32) for name in ("renormalize", "num_groups", "top_groups")),
        ("routed_scale", c_float),
        *((name, c_int32) for name in ("activation", "format", "block_size", "symmetric", "io_dtype")),
        *((name, c_float) for name in ("clamp", "clamp_alpha")),
    )


_POINTERS = ("x", "router_logits", "correction_bias", "gate_up", "down", "gate_up_bias", "down_bias", "y")


class _Args(ctypes.Structure):
    _fields_ = (("tokens", c_int64), *((name, c_void_p) for name in _POINTERS))


class MoeRunner:
    """QuantMoE with the attributes of `ops.QUANT_MOE`, by name; what is left out has the table's default."""

    def __init__(self, library: KernelLibrary, **attributes: Any) -> None:
        self._library = library
        library.declare(_SIGNATURES)
        values = {item.name: item.default for item in ops.QUANT_MOE.attributes} | attributes
        codes = {"scoring": SCORINGS, "activation": ACTIVATIONS, "format": WEIGHT_FORMATS}
        coded = {name: codes[name][value] if name in codes else value for name, value in values.items()}
        self._desc = _Desc(**coded, io_dtype=DTYPES["float32"])
        self._hidden = int(values["hidden"])

    def strides(self) -> tuple[int, int]:
        """Bytes from one expert's packed gate_up to the next, and of down."""
        gate_up, down = c_size_t(), c_size_t()
        self._library.call("eb_moe_expert_stride", byref(self._desc), byref(gate_up), byref(down))
        return gate_up.value, down.value

    def run(self, **inputs: Array | None) -> Floats:
        """y [T, H] of the op table's inputs."""
        x = inputs["x"]
        assert x is not None
        y = np.full((len(x), self._hidden), np.nan, np.float32)
        arrays = {**inputs, "y": y}
        pointers = [None if (array := arrays.get(name)) is None else array.ctypes.data for name in _POINTERS]
        args = _Args(len(x), *pointers)
        size = c_size_t()
        self._library.call("eb_moe_workspace_size", byref(self._desc), len(x), byref(size))
        room = np.full(size.value + 64, 0xFF, np.uint8)
        room = room[-room.ctypes.data % 64 :][: size.value]
        self._library.call("eb_moe_run", byref(self._desc), byref(args), room.ctypes.data, room.nbytes)
        return y
