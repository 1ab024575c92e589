"""Exporting an architecture without a family: traced from transformers, then verified against it or refused.

Slower and hungrier than a family: the model is whole in memory, in float32. What comes out has the same
inputs and outputs, and an engine can be built from it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from enginebay.export import traced
from enginebay.export.emitter import WEIGHTS_FILE
from enginebay.export.errors import ExportError
from enginebay.export.exporter import (
    COMPANIONS,
    MODEL_FILE,
    SPEC_FILE,
    check_output,
    copy_companions,
    read_config,
    record_source,
)
from enginebay.export.ort_steps import CanonicalRunner
from enginebay.export.spec import ModelSpec
from enginebay.export.staging import staged
from enginebay.export.stepping import Stepper, Stream
from enginebay.export.traced_graph import attention_nodes, canonicalise
from enginebay.export.verify import load_oracle, ragged_logits
from enginebay.export.weights import ALIGNMENT

TOLERANCE = 1e-3  # of the logits' own scale
_LENGTHS = (40, 23, 7)


class DivergenceError(ExportError):
    """The exported graph does not compute what the model does.

    The message names the first layer that differs.
    """


@dataclass(frozen=True)
class TracedReport:
    """What a traced export made.

    `max_error`: largest difference of a logit, in units of the logits' scale.
    """

    spec: ModelSpec
    identity: str
    weight_bytes: int
    parameters: int
    max_error: float


def export_traced(source: Path, out: Path, *, plugin_library: Path, force: bool = False) -> TracedReport:
    """Exports the HF folder `source` through torch.onnx to `out`, which appears whole, verified, or not at
    all.

    `plugin_library`: the CPU kernel library (enginebay.plugins.load.library_path). Raises
    UnsupportedModelError where the model's attention is not ours to replace, DivergenceError where the
    result is not the model.
    """
    check_output(out, source, force=force)
    config = read_config(source)
    model = traced.load_model(source)
    graph, spec = traced.trace(model)
    canonicalise(graph, spec)
    weights = [path for path in sorted(source.iterdir()) if path.suffix in (".safetensors", ".bin")]
    stamps = "".join(f"{path.name}:{path.stat().st_size};" for path in weights)
    identity = hashlib.sha256(config + stamps.encode()).hexdigest()
    companions = tuple(name for name in COMPANIONS if (source / name).is_file())
    with staged(out) as folder:
        ir.save(
            graph,
            folder / MODEL_FILE,
            external_data=WEIGHTS_FILE,
            size_threshold_bytes=1024,
            alignment=ALIGNMENT,
            align_threshold=0,
        )
        (folder / SPEC_FILE).write_text(spec.to_json())
        error = _verify(source, model, folder, spec, plugin_library)
        copy_companions(source, folder, companions)
        report = TracedReport(
            spec=spec,
            identity=identity,
            weight_bytes=(folder / WEIGHTS_FILE).stat().st_size,
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            max_error=error,
        )
        record_source(
            folder,
            source,
            identity=identity,
            weight_bytes=report.weight_bytes,
            parameters=report.parameters,
            names=("config.json", *companions, *(path.name for path in weights)),
            notes=("traced from transformers",),
        )
    return report


def _verify(source: Path, model: object, folder: Path, spec: ModelSpec, library: Path) -> float:
    """Ragged steps over random tokens against transformers; the error in units of the logits' scale."""
    rng = np.random.default_rng(0)
    oracle, _ = load_oracle(source)
    limit = spec.max_positions
    sequences = [rng.integers(0, spec.vocab_size, min(length, limit)).tolist() for length in _LENGTHS]
    logits = ragged_logits(CanonicalRunner(folder / MODEL_FILE, spec, library), sequences)
    worst = 0.0
    for sequence, actual in zip(sequences, logits, strict=True):
        error = _difference(actual, oracle(sequence))
        if not error <= TOLERANCE:
            layer = first_divergence(model, folder, spec, library, sequence)
            raise DivergenceError(
                f"the traced graph differs from {spec.architecture} by {error:.2g} times the logits' "
                f"scale; {layer}. "
                "It cannot be exported without a family (docs/families.md)"
            )
        worst = max(worst, error)
    return worst


def first_divergence(model: object, folder: Path, spec: ModelSpec, library: Path, tokens: list[int]) -> str:
    """Words for where the graph leaves the model.

    The first layer whose attention differs, over one whole prefill.
    """
    graph = ir.load(folder / MODEL_FILE)
    attended = [node.outputs[0] for node in attention_nodes(graph)]
    for value in attended:
        value.type, value.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(["T", None])
    graph.graph.outputs.extend(attended)
    probe = folder / "probe.onnx"
    ir.save(graph, probe)
    try:
        names = [value.name or "" for value in attended]
        runner = CanonicalRunner(probe, spec, library, names)
        Stepper(runner).step([(Stream(list(tokens)), len(tokens))])
    finally:
        probe.unlink()
    expected = traced.attention_outputs(model, tokens)
    for layer, (actual, wanted) in enumerate(zip(runner.extras, expected, strict=True)):
        if not _difference(actual, wanted) <= TOLERANCE:
            return f"layer {layer} of {spec.num_layers} is the first whose attention differs"
    return f"the attention of all {spec.num_layers} layers agrees, so the difference lies behind the last"


def _difference(actual: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    scale = max(float(expected.std()), 1e-6)
    return float(np.abs(actual - expected).max() / scale)


def describe_traced(report: TracedReport) -> dict[str, Any]:
    """The report as plain data for `--json`."""
    return {
        "architecture": report.spec.architecture,
        "identity": report.identity,
        "parameters": report.parameters,
        "weight_bytes": report.weight_bytes,
        "max_error": report.max_error,
    }
