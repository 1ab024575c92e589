"""`manifest.json`: what an engine folder holds, what it was built from and what it needs to run.

Serving imports this module, so it needs numpy and the standard library only. `EngineManifest.load` reads and
validates the document itself; `EngineManifest.check` compares it with the folder's files and with the
machine.

What must agree, and how strictly:

* strict: schema version; EngineBay's major.minor version; target; the target library's exact version; the
  version of every op in the graph; the weight layout of every format the engine holds; size and identity of
  every file.
* reported, not refused: EngineBay's patch version and the plugin library's hash. A library rebuilt from the
  same sources by another compiler has another hash, but ops and layouts say what it can read.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from enginebay.builder.cache_record import COUNT_MAX, CacheGroupRecord, TierRecord, count_fault
from enginebay.builder.document import DocumentError, from_json
from enginebay.builder.file_record import FileRecord

MANIFEST = "manifest.json"
SCHEMA_VERSION = 2
MANIFEST_BYTES_MAX = 64 << 20
_FORMAT = re.compile(r"(f32|f16|bf16|f8|i8|i4)(\.b[1-9][0-9]{0,8})?(\.a?sym)?")
ENGINE, WEIGHTS, SCALES = "engine.onnx", "weights.bin", "cache_scales.npz"

__all__ = [
    "COUNT_MAX",
    "ENGINE",
    "MANIFEST",
    "SCALES",
    "SCHEMA_VERSION",
    "WEIGHTS",
    "CacheGroupRecord",
    "EngineManifest",
    "FileRecord",
    "LayerRecord",
    "LimitsRecord",
    "ManifestError",
    "PluginRecord",
    "QuantizationRecord",
    "RuntimeFacts",
    "SourceModel",
    "TargetRecord",
    "TierRecord",
    "enginebay_version",
]


class ManifestError(ValueError):
    """An engine folder that cannot be used here. `problems` lists every disagreement, one line each."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(problems))


@dataclass(frozen=True)
class SourceModel:
    """The checkpoint behind the engine. `identity` is a hex digest over its configuration and weights."""

    name: str
    identity: str


@dataclass(frozen=True)
class TargetRecord:
    """Where the engine runs, e.g. ort-cpu with onnxruntime 1.32.0."""

    name: str
    library: str
    library_version: str


@dataclass(frozen=True)
class PluginRecord:
    """The kernel library the weights were packed by.

    `ops`: op the graph uses -> version; `layouts`: weight format key -> layout name and version.
    """

    ops: Mapping[str, int]
    layouts: Mapping[str, str]
    library_sha256: str


@dataclass(frozen=True)
class LayerRecord:
    """What one layer became. `format` is a WeightFormat's key, such as i4.b32.asym; `method` how it was
    reached."""

    format: str
    method: str
    shape: tuple[int, ...]
    packed_bytes: int


@dataclass(frozen=True)
class QuantizationRecord:
    recipe: str
    layers: Mapping[str, LayerRecord]


@dataclass(frozen=True)
class LimitsRecord:
    """All counts. `max_sequence`: tokens of prompt and output together; `max_step_tokens`: of all
    sequences."""

    max_batch: int
    max_step_tokens: int
    max_sequence: int
    vocab_size: int


@dataclass(frozen=True)
class RuntimeFacts:
    """This machine, as `check` compares it. `layouts` need only hold the formats of the engine; `ops` are
    those its kernel library has."""

    target: str
    library: str
    library_version: str
    ops: Mapping[str, int]
    layouts: Mapping[str, str]
    plugin_sha256: str


@dataclass(frozen=True)
class EngineManifest:
    """The whole document; field names are its keys.

    `model` is the ModelSpec as export/spec.py writes it, `config` the BuildConfig as it was asked for.
    """

    schema_version: int
    enginebay_version: str
    source: SourceModel
    config: Mapping[str, Any]
    model: Mapping[str, Any]
    target: TargetRecord
    plugins: PluginRecord
    opset: int
    quantization: QuantizationRecord
    cache_groups: tuple[CacheGroupRecord, ...]
    limits: LimitsRecord
    files: tuple[FileRecord, ...]
    weight_bytes: int
    built_at: str
    build_seconds: float

    @property
    def rebuild_command(self) -> str:
        """The command that makes this engine again from its exported model."""
        cache = self.config.get("kv_cache", "auto")
        chosen = "" if cache == "auto" else f" --kv-cache {cache}"
        if ages := [str(tier.age) for group in self.cache_groups for tier in group.tiers]:
            chosen += f" --cache-ages {','.join(ages)}"
        return (
            f"rebuild with: enginebay build EXPORTED {{engine}} --target {self.target.name} "
            f"--quant {self.quantization.recipe}{chosen}"
        )

    def save(self, folder: Path) -> None:
        text = json.dumps(dataclasses.asdict(self), indent=1, ensure_ascii=False)
        (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")

    @staticmethod
    def load(folder: Path) -> EngineManifest:
        """The manifest of engine `folder`. ManifestError naming the file and key for anything malformed."""
        path = folder / MANIFEST
        try:
            size = path.stat().st_size
            text = path.read_text(encoding="utf-8") if size <= MANIFEST_BYTES_MAX else ""
        except FileNotFoundError:
            raise ManifestError(
                [
                    f"{path}: not found; {folder} is not an engine folder: name one that 'enginebay build "
                    "EXPORTED ENGINE' has made"
                ]
            ) from None
        except (OSError, UnicodeDecodeError) as error:
            raise ManifestError([f"{path}: cannot be read: {error}"]) from error
        if size > MANIFEST_BYTES_MAX:
            raise ManifestError([f"{path}: {size} bytes, more than a manifest's {MANIFEST_BYTES_MAX}"])
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ManifestError([f"{path}: not JSON ({error}); build the engine again"]) from error
        if not isinstance(document, dict):
            raise ManifestError([f"{path}: holds {type(document).__name__}, not an object"])
        version = document.get("schema_version")
        if version != SCHEMA_VERSION:
            raise ManifestError(
                [
                    f"{path}: schema_version: the engine has {version!r}, this EngineBay reads "
                    f"{SCHEMA_VERSION}; rebuild with: enginebay build EXPORTED {folder}"
                ]
            )
        try:
            manifest = from_json(EngineManifest, document)
        except DocumentError as fault:
            raise ManifestError([f"{path}: {fault}; build the engine again"]) from None
        if problem := next(manifest._faults(), None):
            raise ManifestError([f"{path}: {problem}; build the engine again"])
        return manifest

    def _faults(self) -> Iterator[str]:
        """What no engine can have: the key, its value and what it may be. Later lines take earlier ones for
        granted: only the first is worth reading."""
        yield from self._file_faults()
        for name, value in vars(self.limits).items():
            yield from count_fault(f"limits.{name}", value)
        for name, most in (("max_sequence", "max_positions"), ("vocab_size", "vocab_size")):
            value, held = getattr(self.limits, name), self.model.get(most)
            yield from count_fault(f"model.{most}", held)
            if value > held or (name == most and value != held):
                yield f"limits.{name}: {value}, but the model has {most} {held}"
        if self.limits.max_step_tokens < self.limits.max_batch:
            yield (
                f"limits.max_step_tokens: {self.limits.max_step_tokens} is less than max_batch "
                f"{self.limits.max_batch}, but a step gives every running sequence a token"
            )
        yield from self._layer_faults()
        yield from self._cache_faults()
        yield from rope_faults(self.model)

    def _file_faults(self) -> Iterator[str]:
        if not self.files:
            yield "files: empty, but an engine has files"
        for index, record in enumerate(self.files):
            if Path(record.name).name != record.name or record.name in ("", "..") or "\0" in record.name:
                yield f"files[{index}].name: {record.name!r} is not a plain file name"
            if record.size < 0:
                yield f"files[{index}].size: {record.size} is no size"
        sizes = {record.name: record.size for record in self.files}
        if len(sizes) < len(self.files):
            yield "files: a name is in them twice"
        tiers = any(group.tiers for group in self.cache_groups)
        for name in (ENGINE, WEIGHTS, *((SCALES,) if tiers else ())):
            if name not in sizes:
                yield f"files: without {name}"
        if self.weight_bytes != sizes[WEIGHTS]:
            yield f"weight_bytes: {self.weight_bytes}, but files has {WEIGHTS} of {sizes[WEIGHTS]} bytes"

    def _layer_faults(self) -> Iterator[str]:
        for name, layer in self.quantization.layers.items():
            key = f"quantization.layers.{name}"
            if len(layer.shape) != 2:
                yield f"{key}.shape: {list(layer.shape)} is not [N, K]"
            for at, size in enumerate(layer.shape):
                yield from count_fault(f"{key}.shape[{at}]", size)
            if layer.packed_bytes < 0:
                yield f"{key}.packed_bytes: {layer.packed_bytes} is no size"
            if not _FORMAT.fullmatch(layer.format):
                yield f"{key}.format: {layer.format!r} is none, such as f16, i8.b32 or i4.b32.asym"
        packed = sum(layer.packed_bytes for layer in self.quantization.layers.values())
        if packed > self.weight_bytes:
            yield f"quantization.layers: {packed} packed bytes, but weight_bytes is {self.weight_bytes}"

    def _cache_faults(self) -> Iterator[str]:
        if not self.cache_groups:
            yield "cache_groups: empty, but every layer has a cache"
        model = self.model.get("cache_groups")
        if not isinstance(model, list) or len(model) != len(self.cache_groups):
            have = len(model) if isinstance(model, list) else "none"
            yield f"cache_groups: {len(self.cache_groups)}, but the model has {have}"
        assert isinstance(model, list)
        layers = [layer for group in self.cache_groups for layer in group.layers]
        if len(set(layers)) < len(layers):
            yield "cache_groups: a layer is in them twice"
        for index, (group, own) in enumerate(zip(self.cache_groups, model, strict=True)):
            yield from group.faults(f"cache_groups[{index}]", own if isinstance(own, dict) else {})

    def check(self, folder: Path, facts: RuntimeFacts) -> list[str]:
        """Compare with the files in `folder` and with this machine.

        Returns the accepted differences, one line each. Raises ManifestError with every disagreement: the
        file and key, both values, and what to do.
        """
        problems = self._file_problems(folder)
        notes: list[str] = []
        where = folder / MANIFEST
        fix = self.rebuild_command.format(engine=folder)

        def differ(key: str, engine: object, here: object) -> None:
            if engine != here:
                problems.append(
                    f"{where}: {key}: the engine has {engine!r}, this machine has {here!r}; {fix}"
                )

        from_here = enginebay_version()
        if _minor(self.enginebay_version) != _minor(from_here):
            differ("enginebay_version", self.enginebay_version, from_here)
        elif self.enginebay_version != from_here:
            notes.append(
                f"{where}: enginebay_version: built by {self.enginebay_version}, running {from_here}"
            )
        differ("target.name", self.target.name, facts.target)
        differ("target.library", self.target.library, facts.library)
        differ("target.library_version", self.target.library_version, facts.library_version)
        for op, version in self.plugins.ops.items():
            differ(f"plugins.ops.{op}", version, facts.ops.get(op, "none"))
        for key, layout in self.plugins.layouts.items():
            differ(f"plugins.layouts.{key}", layout, facts.layouts.get(key, "none"))
        if problems:
            raise ManifestError(problems)
        if self.plugins.library_sha256 != facts.plugin_sha256:
            notes.append(
                f"{where}: plugins.library_sha256: built with {self.plugins.library_sha256[:12]}, running "
                f"{facts.plugin_sha256[:12]}; accepted, as ops and weight layouts agree"
            )
        return notes

    def _file_problems(self, folder: Path) -> list[str]:
        again = self.rebuild_command.format(engine=folder)
        found = ((folder / record.name, record.difference(folder / record.name)) for record in self.files)
        return [f"{path}: {difference}, or {again}" for path, difference in found if difference is not None]


def rope_faults(model: Mapping[str, Any]) -> Iterator[str]:
    """What a runtime cannot read of the model's rotary embeddings."""
    ropes = model.get("ropes", [])
    if not isinstance(ropes, list):
        yield f"model.ropes: {ropes!r} is no list"
    for index, rope in enumerate(ropes):
        if not isinstance(rope, dict) or not isinstance(rope.get("kind"), str):
            yield f"model.ropes[{index}]: without kind"
        yield from count_fault(f"model.ropes[{index}].original_positions", rope.get("original_positions"), 0)


def enginebay_version() -> str:
    """The version of the installed distribution."""
    from importlib.metadata import version

    return version("enginebay")


def _minor(version: str) -> tuple[str, ...]:
    return tuple(version.split(".")[:2])
