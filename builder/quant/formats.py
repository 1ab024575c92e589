"""Weight formats: how the N x K weights of a linear layer are stored."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

Kind = Literal["f32", "f16", "bf16", "f8", "i8", "i4"]
KINDS: tuple[str, ...] = get_args(Kind)
FLOAT_KINDS = ("f32", "f16", "bf16")
BITS = {"f32": 32, "f16": 16, "bf16": 16, "f8": 8, "i8": 8, "i4": 4}
SCALE_BITS = {"f8": 32, "i8": 16, "i4": 16}  # of a block's scale and of its minimum


_BLOCK = r"\.b([1-9]\d{0,4})"
_KEY = re.compile(rf"(f32|f16|bf16)|(i8|f8)(?:{_BLOCK})?|(i4){_BLOCK}(?:\.(sym|asym))?")


class QuantizationError(ValueError):
    """Weights or a recipe that cannot be quantised as asked. The message names the tensor or the option."""


@dataclass(frozen=True)
class WeightFormat:
    """A storage format of QuantLinear and Embedding (plugins/ops.py).

    kind       f32, f16, bf16: plain; f8: w = scale*q, q in E4M3; i8: w = scale*q, q in -127..127; i4: q in
               0..15
    block      weights along K that share a scale; 0 for the float kinds, and for i8 and f8 with one scale per
               row
    symmetric  i4: True is w = scale*(q - 8), False is w = scale*q + minimum
    """

    kind: Kind
    block: int = 0
    symmetric: bool = True

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise QuantizationError(f"weight format '{self.kind}' is unknown; there are {', '.join(KINDS)}")
        if self.kind in FLOAT_KINDS and (self.block or not self.symmetric):
            raise QuantizationError(f"weight format {self.kind} takes neither a block size nor a minimum")
        if self.kind == "i4" and self.block <= 0:
            raise QuantizationError(f"weight format i4 needs a positive block size, not {self.block}")
        if self.kind in ("f8", "i8") and (self.block < 0 or not self.symmetric):
            raise QuantizationError(
                f"weight format {self.kind} has no minimum, and a block size of 0 (a row) or more"
            )

    @property
    def key(self) -> str:
        """Short unique name: f16, f8, f8.b128, i8, i8.b32, i4.b32.sym, i4.b64.asym."""
        if self.kind in FLOAT_KINDS:
            return self.kind
        block = f".b{self.block}" if self.block else ""
        sign = (".sym" if self.symmetric else ".asym") if self.kind == "i4" else ""
        return f"{self.kind}{block}{sign}"

    @staticmethod
    def from_key(key: str) -> WeightFormat:
        """The format whose `key` this is; i4.b64 alone is symmetric. QuantizationError for anything else."""
        match = _KEY.fullmatch(key)
        if match is None:
            raise QuantizationError(
                f"weight format '{key}' is unknown; give f16, bf16, f8, f8.b128, i8, i8.b32, i4.b64, "
                "i4.b32.asym"
            )
        plain, eight, eight_block, _, block, sign = match.groups()
        if plain:
            return WeightFormat(cast(Kind, plain))
        if eight:
            return WeightFormat(cast(Kind, eight), int(eight_block or 0))
        return WeightFormat("i4", int(block), sign != "asym")

    def layout_key(self, in_features: int) -> str:
        """Name of the packed layout in the manifest: with a scale for each row it depends on their length."""
        by_row = not self.is_float and not self.block
        return f"{self.key}.k{in_features}" if by_row else self.key

    @property
    def is_float(self) -> bool:
        return self.kind in FLOAT_KINDS

    def scale_block(self, in_features: int) -> int:
        """Weights along K that share a scale, for a layer of `in_features`; refuses blocks that do not
        divide."""
        block = self.block or in_features
        if in_features % block:
            raise QuantizationError(
                f"block size {block} does not divide the layer's {in_features} input features; "
                f"choose a divisor, such as {_divisors(in_features)}"
            )
        return block

    def bits_per_weight(self, in_features: int) -> float:
        """Effective bits of a weight, the scales counted."""
        if self.is_float:
            return float(BITS[self.kind])
        per_block = SCALE_BITS[self.kind] * (1 if self.symmetric else 2)
        return BITS[self.kind] + per_block / self.scale_block(in_features)

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "block": self.block, "symmetric": self.symmetric}

    @staticmethod
    def from_dict(value: dict[str, Any]) -> WeightFormat:
        return WeightFormat(cast(Kind, value["kind"]), int(value["block"]), bool(value["symmetric"]))


def _divisors(n: int) -> str:
    usual = [b for b in (16, 32, 64, 128, 256) if n % b == 0]
    return ", ".join(map(str, usual or [n]))
