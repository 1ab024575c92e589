"""What a build did: per layer format, size and error, what every rewrite matched and left, and what it
cost."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginebay.builder.lower.graph import RewriteReport
from enginebay.builder.manifest import EngineManifest
from enginebay.builder.packing import LayerResult
from enginebay.builder.quant.agreement import EngineError
from enginebay.builder.quant.evaluate import ModelError
from enginebay.builder.quant.search import Mix
from enginebay.builder.report_html import page

REPORT, PAGE = "report.json", "report.html"


@dataclass(frozen=True)
class BuildReport:
    """`engine`: the folder. `nodes`: of the engine's graph. `seconds`: the whole build. `error`: of the
    weights and the cache, where the build was asked to measure it, and `engine_error` of what else the engine
    rounds; `mix`: how a search chose formats;
    `cache_constants`: of a cache that has any, by its name."""

    engine: Path
    manifest: EngineManifest
    layers: tuple[LayerResult, ...]
    rewrites: tuple[RewriteReport, ...]
    nodes: int
    seconds: float
    error: ModelError | None = None
    engine_error: EngineError | None = None
    mix: Mix | None = None
    cache_constants: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)

    @property
    def bits_per_weight(self) -> float:
        """Packed bits over weights, of all packed layers."""
        weights = sum(layer.shape[0] * layer.shape[1] for layer in self.layers)
        return 8 * sum(layer.packed_bytes for layer in self.layers) / max(1, weights)

    def to_dict(self) -> dict[str, Any]:
        """The whole as plain data. `dominant`: the layers with the largest share of the squared weight
        error."""
        return {
            "recipe": self.manifest.quantization.recipe,
            "target": self.manifest.target.name,
            "source": self.manifest.source.name,
            "nodes": self.nodes,
            "seconds": round(self.seconds, 3),
            "weight_bytes": self.manifest.weight_bytes,
            "source_bytes": sum(layer.source_bytes for layer in self.layers),
            "bits_per_weight": round(self.bits_per_weight, 4),
            "error": None if self.error is None else dataclasses.asdict(self.error),
            "engine_error": None if self.engine_error is None else dataclasses.asdict(self.engine_error),
            "cache": self._cache(),
            "search": None if self.mix is None else _search(self.mix),
            "dominant": _dominant(self.layers),
            "layers": [
                {
                    "layer": layer.layer,
                    "tensor": layer.tensor,
                    "shape": list(layer.shape),
                    "format": layer.format.key,
                    "method": layer.method,
                    "source_bytes": layer.source_bytes,
                    "packed_bytes": layer.packed_bytes,
                    "relative_error": layer.relative_error,
                    "max_error": layer.max_error,
                }
                for layer in self.layers
            ],
            "rewrites": [
                {
                    "rewrite": report.rewrite,
                    "matched": report.matched,
                    "left": [{"node": miss.node, "reason": miss.reason} for miss in report.misses],
                }
                for report in self.rewrites
            ],
        }

    def _cache(self) -> dict[str, Any]:
        """The cache's groups, and of constants the largest of each head: keys', then values'."""
        return {
            "groups": [
                {
                    "dtype": group.dtype,
                    "bytes_per_token": group.block_bytes / group.block_size,
                    "constant_shape": list(group.constant_shape),
                }
                for group in self.manifest.cache_groups
            ],
            "constants": {
                name: np.abs(constants).max(axis=-1).tolist()
                for name, constants in self.cache_constants.items()
            },
        }

    def save(self, folder: Path) -> None:
        """Writes report.json and report.html."""
        document = self.to_dict()
        text = json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        (folder / REPORT).write_text(text, encoding="utf-8")
        (folder / PAGE).write_text(page(document), encoding="utf-8")


def _search(mix: Mix) -> dict[str, Any]:
    return {
        "bits": mix.bits,
        "expected_kl": mix.expected_kl,
        "sensitivities": [
            {
                "layer": s.layer,
                "weights": s.weights,
                "options": [{"format": fmt.key, "bits": bits, "kl": kl} for fmt, bits, kl in s.options],
            }
            for s in mix.sensitivities
        ],
    }


def _dominant(layers: tuple[LayerResult, ...], count: int = 5) -> list[dict[str, Any]]:
    """The layers whose rounding changed the weights most, with their share of the sum of squares of the
    changes."""
    changes = {layer.layer: layer.squared_error for layer in layers}
    total = sum(changes.values())
    worst = sorted(changes.items(), key=lambda item: item[1], reverse=True)[:count]
    return [{"layer": name, "share": change / total} for name, change in worst if change]
