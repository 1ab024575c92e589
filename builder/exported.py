"""The folder `enginebay export` writes, read and checked before anything is built from it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from enginebay.builder.manifest import FileRecord, SourceModel
from enginebay.export.spec import ModelSpec

MODEL, WEIGHTS, SPEC, SOURCE = "model.onnx", "weights.bin", "spec.json", "source.json"
INPUTS = ("input_ids", "position_ids", "query_start", "kv_len", "logits_index")


class ExportedError(ValueError):
    """A folder that is not a complete exported model. The message names the file and what to do."""


@dataclass(frozen=True)
class ExportedModel:
    """A canonical graph with its weights still in the sidecar."""

    folder: Path
    spec: ModelSpec
    model: ir.Model
    source: SourceModel

    @property
    def spec_document(self) -> dict[str, Any]:
        """The ModelSpec as plain JSON values."""
        document: dict[str, Any] = json.loads(self.spec.to_json())
        return document

    @property
    def companions(self) -> list[Path]:
        """Files that go into the engine as they are: tokenizer, chat template, generation config."""
        own = {MODEL, WEIGHTS, SPEC, SOURCE}
        return sorted(p for p in self.folder.iterdir() if p.is_file() and p.name not in own)


def read_exported(folder: Path) -> ExportedModel:
    """Reads `folder` without loading weights.

    Raises ExportedError for a missing file, a spec of another version, an unreadable or foreign graph, and
    a sidecar that is not where or as long as the graph says.
    """
    again = "make it with: enginebay export MODEL EXPORTED"  # not into `folder`: it may be the checkpoint
    if not folder.is_dir():
        raise ExportedError(f"{folder}: no such folder; {again}")
    for name in (SPEC, MODEL, WEIGHTS):
        if not (folder / name).is_file():
            hint = " (a Hugging Face folder is exported first)" if (folder / "config.json").is_file() else ""
            raise ExportedError(f"{folder}: not an exported model, {name} is missing{hint}; {again}")
    try:
        spec = ModelSpec.from_json((folder / SPEC).read_text(encoding="utf-8"))
    except ValueError as error:  # a spec that cannot be, or bytes that are no text
        raise ExportedError(f"{folder / SPEC}: {error}; {again}") from error
    try:
        model = ir.load(folder / MODEL)
    except Exception as error:  # protobuf and onnx-ir raise many kinds for bytes that are no model
        raise ExportedError(f"{folder / MODEL}: not a readable ONNX model ({error}); {again}") from error
    _check_graph(folder, model, spec, again)
    return ExportedModel(folder, spec, model, _source(folder, model))


def _check_graph(folder: Path, model: ir.Model, spec: ModelSpec, again: str) -> None:
    where = folder / MODEL
    names = {value.name for value in model.graph.inputs}
    wanted = [*INPUTS, *(f"cache.{layer}" for group in spec.cache_groups for layer in group.layers)]
    if missing := [name for name in wanted if name not in names]:
        raise ExportedError(f"{where}: not a canonical graph, input {missing[0]} is missing; {again}")
    size = (folder / WEIGHTS).stat().st_size
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if tensor is None:
            raise ExportedError(f"{where}: initializer {name} has no value; {again}")
        if not isinstance(tensor, ir.ExternalTensor):
            continue
        if tensor.location != WEIGHTS:
            raise ExportedError(
                f"{where}: initializer {name} lies in {tensor.location!r}, not {WEIGHTS!r}; {again}"
            )
        end = (tensor.offset or 0) + tensor.nbytes
        if (tensor.offset or 0) < 0 or end > size:
            raise ExportedError(
                f"{folder / WEIGHTS}: too short: tensor {name} ends at byte {end}, the file has {size}; "
                f"copy it again or {again}"
            )


def _source(folder: Path, model: ir.Model) -> SourceModel:
    digest = hashlib.sha256()
    for name in (SPEC, MODEL):
        digest.update((folder / name).read_bytes())
    digest.update(FileRecord.of(folder / WEIGHTS).digest.encode())
    return SourceModel(model.metadata_props.get("source", folder.resolve().name), digest.hexdigest())
