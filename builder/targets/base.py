"""What a target is to the builder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from enginebay.builder.lower.graph import RewriteReport
from enginebay.builder.manifest import TargetRecord
from enginebay.builder.packing import PackingLibrary, WeightPacker
from enginebay.builder.quant.cache import CacheFormat


class TargetError(ValueError):
    """A target that cannot be built, or a graph that it cannot run. The message gives the reason."""


@dataclass(frozen=True)
class CacheLayout:
    """block_size: tokens of a block; constants: by the cache's name (cache.L), where the format has any."""

    format: CacheFormat
    block_size: int
    constants: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)


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
