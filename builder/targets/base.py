"""What a target is to the builder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import onnx_ir as ir

from enginebay.builder.lower.graph import RewriteReport
from enginebay.builder.manifest import TargetRecord
from enginebay.builder.packing import PackingLibrary, WeightPacker


class TargetError(ValueError):
    """A target that cannot be built, or a graph that it cannot run. The message gives the reason."""


@dataclass(frozen=True)
class CacheLayout:
    """dtype: float32, float16 or bfloat16; block_size: tokens of a block."""

    dtype: str
    block_size: int


class PluginLibrary(PackingLibrary, Protocol):
    """The target's kernel library: packs weights and says what it implements."""

    @property
    def sha256(self) -> str: ...


class Target(Protocol):
    name: ClassVar[str]

    @property
    def record(self) -> TargetRecord:
        """Name, runtime library and its exact version."""
        ...

    @property
    def plugins(self) -> PluginLibrary: ...

    def lower(self, model: ir.Model, packer: WeightPacker, cache: CacheLayout) -> list[RewriteReport]:
        """Turns the canonical graph into the target's, in place. TargetError where something cannot run
        there."""
        ...
