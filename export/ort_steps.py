"""Runs a canonical graph as it is in ONNX Runtime, with the kernel library given.

For verification, not for serving.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginebay.export.spec import ModelSpec

STEP_INPUTS = {
    "input_ids": "input_ids",
    "position_ids": "position_ids",
    "query_start": "query_start",
    "kv_len": "kv_len",
    "block_table.0": "block_table",
    "slot_mapping.0": "slot_mapping",
    "logits_index": "logits_index",
}


@dataclass(frozen=True)
class CanonicalLimits:
    vocab_size: int
    max_sequence: int
    rope_switch: int
    max_batch: int = 8
    max_step_tokens: int = 1024
    block_size: int = 16
    num_blocks: int = 256


class CanonicalRunner:
    """A step runner (enginebay.export.stepping).

    `extra` names further outputs of the graph, kept in `extras`.
    """

    def __init__(self, graph: Path, spec: ModelSpec, library: Path, extra: Sequence[str] = ()) -> None:
        import onnxruntime as ort  # type: ignore[import-untyped]

        self.limits = CanonicalLimits(spec.vocab_size, spec.max_positions, spec.rope_switch)
        settings = ort.SessionOptions()
        settings.register_custom_ops_library(str(library))
        settings.log_severity_level = 4
        self._session = ort.InferenceSession(str(graph), settings, providers=["CPUExecutionProvider"])
        self._binding: Any = self._session.io_binding()
        self._extra = tuple(extra)
        self.extras: list[NDArray[np.float32]] = []
        self._pools = []
        for layer in range(spec.num_layers):
            shape = spec.cache_groups[spec.group_of(layer)].block_shape(self.limits.block_size)
            pool = ort.OrtValue.ortvalue_from_numpy(
                np.full((self.limits.num_blocks, *shape), np.nan, np.float32)
            )
            self._pools.append(pool)
            self._binding.bind_ortvalue_input(f"cache.{layer}", pool)
            self._binding.bind_ortvalue_output(f"cache_out.{layer}", pool)

    def run(self, inputs: Any, /) -> NDArray[np.float32]:
        """Logits [R, vocab]."""
        for name, field in STEP_INPUTS.items():
            self._binding.bind_cpu_input(name, getattr(inputs, field))
        for name in ("logits", *self._extra):
            self._binding.bind_output(name)
        self._session.run_with_iobinding(self._binding)
        logits, *extras = self._binding.get_outputs()[len(self._pools) :]  # in the order they were bound
        self.extras = [extra.numpy() for extra in extras]
        result: NDArray[np.float32] = logits.numpy()
        return result
