"""What a build did: per layer format, size and error, and what every rewrite matched and left."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from enginebay.builder.lower.graph import RewriteReport
from enginebay.builder.manifest import EngineManifest
from enginebay.builder.packing import LayerResult


@dataclass(frozen=True)
class BuildReport:
    """`engine`: the folder. `nodes`: of the engine's graph. `seconds`: the whole build."""

    engine: Path
    manifest: EngineManifest
    layers: tuple[LayerResult, ...]
    rewrites: tuple[RewriteReport, ...]
    nodes: int
    seconds: float

    @property
    def bits_per_weight(self) -> float:
        """Packed bits over weights, of all packed layers."""
        weights = sum(layer.shape[0] * layer.shape[1] for layer in self.layers)
        return 8 * sum(layer.packed_bytes for layer in self.layers) / max(1, weights)

    def to_dict(self) -> dict[str, Any]:
        worst = sorted(self.layers, key=lambda layer: layer.relative_error, reverse=True)[:5]
        return {
            "recipe": self.manifest.quantization.recipe,
            "target": self.manifest.target.name,
            "nodes": self.nodes,
            "seconds": round(self.seconds, 3),
            "weight_bytes": self.manifest.weight_bytes,
            "source_bytes": sum(layer.source_bytes for layer in self.layers),
            "bits_per_weight": round(self.bits_per_weight, 4),
            "largest_errors": {layer.layer: layer.relative_error for layer in worst},
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

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(self.to_dict(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
