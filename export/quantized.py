"""Checkpoints that are quantised already: GPTQ, AWQ, compressed-tensors, FP8 and GGUF, read and never
rounded again.

Integer weights go into the sidecar as UINT4 or INT8 with a scale and a zero for each group, behind a
DequantizeLinear in the graph, and so do FP8 weights as E4M3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginebay.export.checkpoint import Checkpoint, TensorInfo
from enginebay.export.config import MAX_INTEGER
from enginebay.export.errors import CheckpointError, UnsupportedModelError
from enginebay.export.fp8 import checked_fp8, expand_fp8, fp8_scales, read_array, to_floats
from enginebay.export.gguf_blocks import ROW_BYTES, lay_blocks
from enginebay.export.packed import (
    PackedLinear,
    check_scales,
    pack_nibbles,
    unpack_awq,
    unpack_gptq,
    unpack_rows,
)
from enginebay.export.pieces import Computed, Piece

FP8_GROUP = 32  # what every target takes as a group along K
# Scales of activations, which are rounded as they come. Those of caches: cache_scales.py.
_UNUSED_SCALES = (
    ".q_scale",
    ".input_scale",
    ".output_scale",
    ".act_scale",
)


@dataclass(frozen=True)
class Stored:
    """One tensor of the sidecar: dtype as in Initializer, shape, pieces."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Scheme:
    """How a checkpoint's linear layers are quantised, from its `quantization_config`.

    method      gptq, awq, int-packed, int8, fp8, or gguf (as export/gguf_model.py writes it)
    bits        of a value
    symmetric   whether the config says that zeros are the middle
    zero_offset what a stored GPTQ zero of 0 means
    block       rows and columns that share an FP8 scale
    """

    method: str
    bits: int
    symmetric: bool = True
    zero_offset: int = 0
    block: tuple[int, int] | None = None

    def suffixes(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Endings of a layer's tensors that must be there, and those that may."""
        return {
            "gptq": (("qweight", "qzeros", "scales"), ("g_idx",)),
            "awq": (("qweight", "qzeros", "scales"), ()),
            "int-packed": (
                ("weight_packed", "weight_scale", "weight_shape"),
                ("weight_zero_point", "weight_g_idx"),
            ),
            "int8": (("weight", "weight_scale"), ()),
            "fp8": (("weight",), ("weight_scale", "weight_scale_inv")),
            "gguf": ((), tuple(ROW_BYTES)),
        }[self.method]

    def tensors(self, checkpoint: Checkpoint, weight: str) -> dict[str, TensorInfo] | None:
        """The tensors by ending that stand for `weight` (…\u200b.weight); None where that layer is not
        quantised."""
        base = weight.removesuffix("weight")
        needed, optional = self.suffixes()
        found = {
            name: checkpoint.tensors[base + name]
            for name in (*needed, *optional)
            if base + name in checkpoint.tensors
        }
        if self.method == "fp8" and (len(found) < 2 or found["weight"].dtype != "F8_E4M3"):
            return None
        if self.method == "int8" and ("weight" not in found or found["weight"].dtype != "I8"):
            return None
        missing = [base + name for name in needed if name not in found]
        if not found or (needed and len(missing) == len(needed)):
            return None
        if missing:
            raise CheckpointError(
                f"the checkpoint has parts of a quantised '{base[:-1]}' but lacks {', '.join(missing)}"
            )
        return found

    def lay(
        self,
        parts: Sequence[dict[str, TensorInfo]],
        shapes: Sequence[tuple[int, ...]],
    ) -> dict[str, Stored]:
        """What the sidecar holds of layers concatenated along their rows, `shapes` [N, K] each: by role
        suffix, "" for the values, ".scale", ".zero" where not symmetric, ".minimum" [N, groups, 1] in its
        place where it is a float, ".order" with an activation order.
        Where FP8 blocks do not divide K or are not multiples of FP8_GROUP, FP8 becomes bfloat16 and needs no
        scale.

        Raises CheckpointError for shapes that do not fit, bad scales, and layers whose orders differ.
        """
        if self.method == "fp8":
            group = shapes[0][1] if self.block is None else self.block[1]
            if shapes[0][1] % group or group % FP8_GROUP:
                expand = [partial(expand_fp8, p, s, self.block) for p, s in zip(parts, shapes, strict=True)]
                return {"": Stored("BF16", _joined(shapes), tuple(Computed(chunks) for chunks in expand))}
            return self._lay_fp8(parts, shapes)
        if self.method == "gguf":
            return _lay_gguf(parts, shapes)
        # Values are read again when they are written: an expert's are enough to hold.
        layers = [
            replace(self._read(part, shape), values=np.zeros((0, 0), np.uint8))
            for part, shape in zip(parts, shapes, strict=True)
        ]
        read = [partial(self._read, part, shape) for part, shape in zip(parts, shapes, strict=True)]
        groups = {layer.scales.shape[1] for layer in layers}
        first = layers[0].order
        for layer in layers[1:]:
            if len(groups) > 1 or not _same_order(first, layer.order):
                raise CheckpointError(
                    "layers that read the same input, such as q, k and v, have different groups or g_idx"
                )
        count = groups.pop()
        rows = sum(shape[0] for shape in shapes)
        result = {
            "": self._values(read, _joined(shapes)),
            ".scale": Stored("F32", (rows, count), tuple(_held(layer.scales) for layer in layers)),
        }
        if self.bits == 4:
            zeros = np.concatenate([layer.zeros for layer in layers])
            result[".zero"] = Stored("U4", (rows, count), (_held_bytes(pack_nibbles(_even(zeros))),))
        if first is not None:
            result[".order"] = Stored("I32", (len(first),), (_held(first),))
        return result

    def _lay_fp8(
        self, parts: Sequence[dict[str, TensorInfo]], shapes: Sequence[tuple[int, ...]]
    ) -> dict[str, Stored]:
        """E4M3 as it is, and a scale for each group of each row."""
        scales = [fp8_scales(part, shape, self.block) for part, shape in zip(parts, shapes, strict=True)]
        values = tuple(Computed(partial(checked_fp8, part["weight"])) for part in parts)
        rows, columns = _joined(shapes)
        return {
            "": Stored("F8_E4M3", (rows, columns), values),
            ".scale": Stored("F32", (rows, scales[0].shape[1]), tuple(_held(scale) for scale in scales)),
        }

    def _values(self, read: Sequence[Callable[[], PackedLinear]], shape: tuple[int, int]) -> Stored:
        def nibbles(layer: Callable[[], PackedLinear]) -> Iterator[bytes]:
            yield pack_nibbles(layer().values)

        def signed(layer: Callable[[], PackedLinear]) -> Iterator[bytes]:
            yield (layer().values.astype(np.int16) - 128).astype(np.int8).tobytes()

        form = nibbles if self.bits == 4 else signed
        return Stored(
            "U4" if self.bits == 4 else "I8", shape, tuple(Computed(partial(form, r)) for r in read)
        )

    def _read(self, tensors: dict[str, TensorInfo], shape: tuple[int, ...]) -> PackedLinear:
        arrays = {name: read_array(tensor) for name, tensor in tensors.items()}
        name = next(iter(tensors.values())).name
        try:
            layer = self._unpack(arrays, shape)
        except (ValueError, IndexError) as error:
            if isinstance(error, CheckpointError):
                raise CheckpointError(f"'{name}': {error}") from error
            raise CheckpointError(f"'{name}' and its scales do not fit together: {error}") from error
        if layer.values.shape != shape:
            raise CheckpointError(
                f"'{name}' unpacks to {list(layer.values.shape)}, the config calls for {list(shape)}"
            )
        groups = layer.scales.shape[1]
        if layer.scales.shape[0] != shape[0] or shape[1] % groups or layer.zeros.shape != layer.scales.shape:
            raise CheckpointError(
                f"'{name}': scales {list(layer.scales.shape)} and zeros {list(layer.zeros.shape)} do "
                "not divide weights "
                f"{list(shape)} into groups"
            )
        check_scales(layer.scales, name)
        if self.bits == 8 and (layer.zeros != 128).any():
            raise CheckpointError(f"'{name}': 8-bit weights with zeros other than 128 are not supported")
        return layer

    def _unpack(self, arrays: Mapping[str, NDArray[Any]], shape: tuple[int, ...]) -> PackedLinear:
        if self.method == "gptq":
            offset = self.zero_offset
            if offset and self.symmetric and _all_middle(arrays["qzeros"], self.bits):
                offset = 0  # v2 zeros under a v1 label: what a symmetric v1 file stores is the middle minus 1
            return unpack_gptq(
                arrays["qweight"],
                arrays["qzeros"],
                to_floats(arrays["scales"]),
                arrays.get("g_idx"),
                bits=self.bits,
                first=offset,
            )
        if self.method == "awq":
            return unpack_awq(arrays["qweight"], arrays["qzeros"], to_floats(arrays["scales"]))
        if self.method == "int8":
            scales = to_floats(arrays["weight_scale"]).reshape(-1, 1)
            scales = np.repeat(scales, shape[0], axis=0) if len(scales) == 1 else scales
            values = (arrays["weight"].astype(np.int16) + 128).astype(np.uint8)
            return PackedLinear(values, scales, np.full(scales.shape, 128, np.uint8))
        rows, columns = (int(size) for size in arrays["weight_shape"])
        scales = to_floats(arrays["weight_scale"]).reshape(rows, -1)
        zeros, order = arrays.get("weight_zero_point"), arrays.get("weight_g_idx")
        return unpack_rows(arrays["weight_packed"], zeros, scales, order, columns=columns, bits=self.bits)


def _lay_gguf(parts: Sequence[dict[str, TensorInfo]], shapes: Sequence[tuple[int, ...]]) -> dict[str, Stored]:
    blocks = lay_blocks(parts, shapes)
    rows, groups = blocks.scales.shape
    result = {
        "": Stored(blocks.dtype, blocks.shape, blocks.values),
        ".scale": Stored("F32", (rows, groups), (_held(blocks.scales),)),
    }
    if blocks.minimums is not None:
        result[".minimum"] = Stored("F32", (rows, groups, 1), (_held(blocks.minimums),))
    elif blocks.zero:
        zeros = np.full((rows, groups), blocks.zero, np.uint8)
        result[".zero"] = Stored("U4", (rows, groups), (_held_bytes(pack_nibbles(_even(zeros))),))
    return result


def read_scheme(config: Mapping[str, Any]) -> Scheme | None:
    """The scheme of config.json's `quantization_config`; None without one, or for MXFP4, which families read.

    UnsupportedModelError naming the method or option that is not read.
    """
    table = config.get("quantization_config")
    if table is not None and not isinstance(table, dict):
        raise UnsupportedModelError(f"config.json: quantization_config is {table!r}, not an object")
    if table is None or table.get("quant_method") == "mxfp4":
        return None
    method = table.get("quant_method")
    if method == "gptq":
        bits = _bits(table.get("bits"), (4, 8))
        version = table.get("checkpoint_format", "gptq")
        if version not in ("gptq", "gptq_v2"):
            raise UnsupportedModelError(
                f"config.json: GPTQ checkpoint_format '{version}' is neither gptq nor gptq_v2"
            )
        return Scheme("gptq", bits, bool(table.get("sym", True)), zero_offset=1 if version == "gptq" else 0)
    if method == "gguf":
        return Scheme("gguf", 4)
    if method == "awq":
        if (version := str(table.get("version", "gemm")).lower()) != "gemm":
            raise UnsupportedModelError(f"config.json: AWQ version '{version}' is packed otherwise than gemm")
        return Scheme("awq", _bits(table.get("bits", 4), (4,)), symmetric=False)
    if method == "fp8":
        size = table.get("weight_block_size")
        return Scheme("fp8", 8, block=None if size is None else _block(size))
    if method == "compressed-tensors":
        return _compressed(table)
    raise UnsupportedModelError(
        f"config.json: quant_method {method!r} is not read; gptq, awq, compressed-tensors, fp8 and mxfp4 are"
    )


def unused_scales(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Scales of activations, which no engine uses; checked all the same."""
    names = tuple(name for name in sorted(checkpoint.tensors) if name.endswith(_UNUSED_SCALES))
    for name in names:
        check_scales(to_floats(read_array(checkpoint.tensors[name])).reshape(-1), name)
    return names


def scheme_notes(scheme: Scheme, checkpoint: Checkpoint) -> tuple[str, ...]:
    """What the user should know of a scheme: GPTQ v2 zeros under a v1 label."""
    if scheme.method != "gptq" or not scheme.zero_offset or not scheme.symmetric:
        return ()
    zeros = next((t for name, t in sorted(checkpoint.tensors.items()) if name.endswith(".qzeros")), None)
    if zeros is None or not _all_middle(read_array(zeros), scheme.bits):
        return ()
    return (
        f"config.json says format gptq (v1), but '{zeros.name}' holds the zeros of gptq_v2: read as gptq_v2",
    )


def _compressed(table: Mapping[str, Any]) -> Scheme:
    groups = table.get("config_groups")
    entries = list(groups.values()) if isinstance(groups, dict) else []
    weights = [entry.get("weights") or {} if isinstance(entry, dict) else None for entry in entries]
    if not all(isinstance(weight, dict) for weight in weights):
        raise UnsupportedModelError(f"config.json: config_groups is {groups!r:.60}, not groups with weights")
    kinds = {
        (str(w.get("type")), str(w.get("num_bits")), bool(w.get("symmetric", True)))
        for w in weights
        if w is not None
    }
    if len(kinds) != 1:
        raise UnsupportedModelError(
            f"config.json: compressed-tensors with {len(kinds)} kinds of weights; one is read"
        )
    ((kind, written, symmetric),) = kinds
    bits = int(written) if written in ("4", "8") else None
    form = str(table.get("format"))
    if kind == "float" and bits == 8:
        return Scheme("fp8", 8)
    if kind == "int" and form == "pack-quantized":
        return Scheme("int-packed", _bits(bits, (4, 8)), symmetric)
    if kind == "int" and bits == 8 and symmetric and form in ("int-quantized", "naive-quantized"):
        return Scheme("int8", 8)
    raise UnsupportedModelError(
        f"config.json: compressed-tensors format '{form:.60}' of {written:.60}-bit {kind:.60} is not read"
    )


def _block(value: Any) -> tuple[int, int]:
    sizes = value if isinstance(value, list) else []
    if len(sizes) != 2 or not all(type(size) is int and 0 < size <= MAX_INTEGER for size in sizes):
        raise UnsupportedModelError(
            f"config.json: weight_block_size is {value!r:.60}, not two positive sizes"
        )
    return sizes[0], sizes[1]


def _bits(value: Any, known: tuple[int, ...]) -> int:
    if value not in known:
        raise UnsupportedModelError(
            f"config.json: {value!r:.60} bits a weight; {' and '.join(map(str, known))} are read"
        )
    return int(value)


def _all_middle(qzeros: NDArray[Any], bits: int) -> bool:
    """Whether every stored zero is 2^(bits-1)."""
    word = int.from_bytes(bytes([0x88 if bits == 4 else 0x80] * 4), "little")
    return bool((qzeros.view(np.uint32) == np.uint32(word)).all())


def _same_order(one: NDArray[np.int32] | None, other: NDArray[np.int32] | None) -> bool:
    if one is None or other is None:
        return one is other
    return np.array_equal(one, other)


def _joined(shapes: Sequence[tuple[int, ...]]) -> tuple[int, int]:
    return sum(shape[0] for shape in shapes), shapes[0][1]


def _even(zeros: NDArray[np.uint8]) -> NDArray[np.uint8]:
    flat = zeros.reshape(-1)
    return np.append(flat, np.uint8(0)) if flat.size % 2 else flat


def _held(array: NDArray[Any]) -> Piece:
    return _held_bytes(array.tobytes())


def _held_bytes(data: bytes) -> Piece:
    return Computed(lambda: iter([data]))
