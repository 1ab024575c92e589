"""Weight formats, layers in them and what a product of them must be, for the tests of QuantLinear."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from enginebay.plugins.load import KernelLibrary

Floats = NDArray[np.float32]
OUTLIER = 5.0  # times the root mean square of its row: such a block of x is visited twice
SMALLEST = np.float32(2.0**-100)


@dataclass(frozen=True)
class Format:
    kind: str
    block: int = 0
    symmetric: bool = True

    @property
    def arguments(self) -> dict[str, Any]:
        return {"format": self.kind, "block_size": self.block, "symmetric": self.symmetric}

    @property
    def integer(self) -> bool:
        return self.kind in ("i8", "i4")

    def __str__(self) -> str:
        return f"{self.kind}-{self.block}{'' if self.symmetric else '-min'}"


FLOATS = (Format("f32"), Format("f16"), Format("bf16"))
F8 = tuple(Format("f8", block) for block in (32, 128, 384))
INTEGERS = (
    *(Format("i4", block, symmetric) for block in (32, 64, 128) for symmetric in (True, False)),
    *(Format("i8", block) for block in (32, 64, 128, 384)),
)
ALL = [*FLOATS, *F8, *INTEGERS]
DTYPES: dict[str, Any] = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}


@dataclass(frozen=True)
class Layer:
    """Packed weights and what they stand for."""

    fmt: Format
    n: int
    k: int
    packed: NDArray[np.uint8]
    weights: Floats  # [N, K], from the definition, not from the library
    q: NDArray[np.int64] | None = None  # signed values
    scales: Floats | None = None  # [N, K/block]
    minimums: Floats | None = None

    def run(self, library: KernelLibrary, x: Floats, bias: Floats | None = None) -> Floats:
        return library.run_linear(x, self.packed, bias, out_features=self.n, **self.fmt.arguments)


def make_layer(library: KernelLibrary, fmt: Format, n: int, k: int, rng: np.random.Generator) -> Layer:
    """Random weights whose scales and minimums are halves, so that packing must keep them exactly."""
    if fmt.kind == "f8":
        return make_f8_layer(library, fmt, n, k, rng)
    if not fmt.integer:
        values = rng.standard_normal((n, k)).astype(DTYPES[fmt.kind])
        packed = library.pack_linear(values, **fmt.arguments)
        return Layer(fmt, n, k, packed, values.astype(np.float32))
    scales = rng.uniform(0.001, 0.02, (n, k // fmt.block)).astype(np.float16).astype(np.float32)
    minimums = None
    if fmt.kind == "i8":
        values = rng.integers(-128, 128, (n, k)).astype(np.int8)
        q = values.astype(np.int64)
    else:
        values = rng.integers(0, 16, (n, k)).astype(np.uint8)
        q = values.astype(np.int64) - (8 if fmt.symmetric else 0)
        if not fmt.symmetric:
            minimums = rng.uniform(-0.2, 0.05, scales.shape).astype(np.float16).astype(np.float32)
    packed = library.pack_linear(values, scales, minimums, **fmt.arguments)
    spread = np.repeat(scales, fmt.block, 1)
    weights = spread * q.astype(np.float32)
    if minimums is not None:
        weights = weights + np.repeat(minimums, fmt.block, 1)
    return Layer(fmt, n, k, packed, weights, q, scales, minimums)


def make_f8_layer(library: KernelLibrary, fmt: Format, n: int, k: int, rng: np.random.Generator) -> Layer:
    """Every E4M3 number, zeros and subnormals among them, but NaN."""
    bits = rng.integers(0, 256, (n, k)).astype(np.uint8)
    bits[(bits & 0x7F) == 0x7F] = 0x01
    scales = rng.uniform(0.5, 2, (n, k // fmt.block)).astype(np.float32)
    packed = library.pack_linear(bits, scales, **fmt.arguments)
    values = bits.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return Layer(fmt, n, k, packed, np.repeat(scales, fmt.block, 1) * values)


def quantised_rows(x: Floats, block: int) -> tuple[NDArray[np.int64], Floats]:
    """(q [T, K], scale [T, K/block]) as the kernels' header defines them."""
    blocks = x.reshape(len(x), -1, block)
    largest = np.abs(blocks).max(2)
    scale = (largest / np.float32(127)).astype(np.float32)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.where(largest < SMALLEST, np.float32(0), np.float32(127) / largest).astype(np.float32)
    q = np.rint(blocks * inverse[..., None]).astype(np.int64)
    return q.reshape(x.shape), np.where(largest < SMALLEST, np.float32(0), scale)


def visits(x: Floats, block: int) -> list[tuple[NDArray[np.int64], Floats]]:
    """(q [T, K], scale [T, K/block]) of each visit: the codes, then those of what outliers left over."""
    q, scale = quantised_rows(x, block)
    rest = (x - np.repeat(scale, block, 1).astype(np.float64) * q).astype(np.float32)
    largest = np.abs(x.reshape(len(x), -1, block)).max(2)
    mean = np.square(x, dtype=np.float64).mean(1, keepdims=True)
    rms = np.where(mean < SMALLEST, np.inf, np.sqrt(mean))  # squares vanish in fp32
    return [(q, scale), quantised_rows(rest * np.repeat(largest > OUTLIER * rms, block, 1), block)]


def emulate(layer: Layer, x: Floats) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(y, bound): the integer formats' arithmetic in float64, and the size of what was added up."""
    assert layer.q is not None
    assert layer.scales is not None
    block = next(b for b in (128, 64, 32) if layer.fmt.block % b == 0)
    blocks = layer.k // block
    weight_scales = np.repeat(layer.scales, layer.fmt.block // block, 1).astype(np.float64)
    y, size = np.zeros((2, len(x), layer.n))
    for codes, scale in visits(x, block):
        q = codes.reshape(len(x), blocks, block)
        dot = np.einsum("tbk,nbk->tnb", q, layer.q.reshape(layer.n, blocks, block)).astype(np.float64)
        terms = [dot * weight_scales * scale[:, None, :].astype(np.float64)]
        if layer.minimums is not None:
            minimums = np.repeat(layer.minimums, layer.fmt.block // block, 1).astype(np.float64)
            terms.append(minimums * (q.sum(2) * scale.astype(np.float64))[:, None, :])
        y += sum(term.sum(2) for term in terms)
        size += sum(np.abs(term).sum(2) for term in terms)
    return y, size
