"""QuantLinearF8Inputs of a kernel library over numpy arrays, for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import POINTER, byref, c_float, c_int64, c_size_t, c_void_p
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginebay.plugins.load import DTYPES, WEIGHT_FORMATS, KernelLibrary, _LinearDesc

Floats = NDArray[np.float32]

_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "eb_quant_linear_f8_inputs_workspace_size": (c_int64, POINTER(c_size_t)),
    "eb_quant_linear_f8_inputs_run": (
        *(c_int64, c_void_p, c_float, c_void_p, c_int64, c_void_p, c_size_t),
        *(c_void_p, c_void_p, c_void_p, c_size_t),
    ),
}


def run_f8_inputs(
    library: KernelLibrary,
    x: Floats,
    packed: NDArray[np.uint8],
    bias: Floats | None = None,
    *,
    out_features: int,
    format: str,
    block_size: int = 0,
    symmetric: bool = True,
    input_scale: float = 0.0,
    repeated: Sequence[int] = (),
) -> Floats:
    """x [T, K] to [T, N], as `KernelLibrary.run_linear`; `packed` has K + len(repeated) columns. PluginError
    in the library's words."""
    library.declare(_SIGNATURES)
    rows, columns = x.shape
    twice = np.array(repeated, np.int32)
    code = WEIGHT_FORMATS[format]
    desc = _LinearDesc(
        columns + len(twice), out_features, code, block_size, int(symmetric), DTYPES["float32"]
    )
    size = c_size_t()
    library.call("eb_quant_linear_f8_inputs_workspace_size", byref(desc), rows, byref(size))
    room = np.full(size.value + 64, 0xFF, np.uint8)
    room = room[-room.ctypes.data % 64 :][: size.value]
    y = np.full((rows, out_features), np.nan, np.float32)
    library.call(
        *("eb_quant_linear_f8_inputs_run", byref(desc), rows, x.ctypes.data, input_scale),
        *(twice.ctypes.data, len(twice)),
        *(packed.ctypes.data, packed.nbytes, None if bias is None else bias.ctypes.data),
        *(y.ctypes.data, room.ctypes.data, room.nbytes),
    )
    return y
