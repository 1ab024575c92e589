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
import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from enginebay.builder.document import DocumentError, from_json

MANIFEST = "manifest.json"
SCHEMA_VERSION = 2
MANIFEST_BYTES_MAX = 64 << 20
# Of an element of a cache pool. int4: a block's rows are bytes, two codes each, then scales and minimums.
CACHE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "float8e4m3fn": 1, "int4": 1}
BLOCK_AXES = {"paged": (4, 1), "latent": (2, 0)}  # dimensions of a block's shape, and the one of its tokens
COUNT_MAX = 2**31 - 1  # kernels count in int32

_SAMPLES = 64
_SAMPLE_BYTES = 4096


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
class TierRecord:
    """A colder pool of each layer, [blocks, *block_shape] of `dtype`, for blocks whose tokens all have `age`
    newer ones at least."""

    dtype: str
    age: int
    block_shape: tuple[int, ...]


@dataclass(frozen=True)
class CacheGroupRecord:
    """Layers whose caches share a block table; the pool of each is [blocks, *block_shape] of `dtype`.

    `constant_shape`: of what calibration found for each layer, scales or for int4 offsets, which the graph
    holds; [] where there is none. `tiers`: pools behind that one, by age; the scales of an int8 one are in
    cache_scales.npz too, by the cache's name.
    """

    kind: str
    layers: tuple[int, ...]
    dtype: str
    block_size: int
    block_shape: tuple[int, ...]
    constant_shape: tuple[int, ...]
    tiers: tuple[TierRecord, ...] = ()

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers of the group; with tiers, of the first pool."""
        return self.pool_bytes[0]

    @property
    def pools(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """dtype and block shape of each pool of a layer."""
        return ((self.dtype, self.block_shape), *((tier.dtype, tier.block_shape) for tier in self.tiers))

    @property
    def pool_bytes(self) -> tuple[int, ...]:
        """`block_bytes` of each pool."""
        return tuple(len(self.layers) * math.prod(shape) * CACHE_BYTES[dtype] for dtype, shape in self.pools)

    def faults(self, key: str) -> Iterator[str]:
        """What no group can have; `key` is the group's own in the manifest."""
        if self.dtype not in CACHE_BYTES:
            yield f"{key}.dtype: {self.dtype!r} is none of {', '.join(CACHE_BYTES)}"
        if not self.layers:
            yield f"{key}.layers: empty"
        elif min(self.layers) < 0:
            yield f"{key}.layers: {min(self.layers)} is no layer"
        yield from _count_fault(f"{key}.block_size", self.block_size)
        youngest = 1
        for at, tier in enumerate(self.tiers):
            if tier.dtype not in CACHE_BYTES:
                yield f"{key}.tiers[{at}].dtype: {tier.dtype!r} is none of {', '.join(CACHE_BYTES)}"
            if tier.age < youngest:
                yield f"{key}.tiers[{at}].age: {tier.age} is less than {youngest}; ages ascend"
            for axis, size in enumerate(tier.block_shape):
                yield from _count_fault(f"{key}.tiers[{at}].block_shape[{axis}]", size)
            if tier.block_shape[:-1] != self.block_shape[:-1]:
                yield (
                    f"{key}.tiers[{at}].block_shape: {list(tier.block_shape)} are not rows of the blocks "
                    f"{list(self.block_shape)} of the first pool"
                )
            youngest = tier.age + 1
        for at, size in enumerate(self.block_shape):
            yield from _count_fault(f"{key}.block_shape[{at}]", size)
        if self.kind not in BLOCK_AXES:
            yield f"{key}.kind: {self.kind!r} is none of {', '.join(BLOCK_AXES)}"
            return
        dimensions, axis = BLOCK_AXES[self.kind]
        if len(self.block_shape) != dimensions or self.block_shape[axis] != self.block_size:
            yield (
                f"{key}.block_shape: {list(self.block_shape)} is no shape of a {self.kind} block of "
                f"{self.block_size} tokens"
            )


@dataclass(frozen=True)
class LimitsRecord:
    """All counts. `max_sequence`: tokens of prompt and output together; `max_step_tokens`: of all
    sequences."""

    max_batch: int
    max_step_tokens: int
    max_sequence: int
    vocab_size: int


@dataclass(frozen=True)
class FileRecord:
    """A file of the folder. `digest` is SHA-256 of the whole, or, where `sampled`, of the size and evenly
    spaced samples: enough to tell a moved, cut or exchanged sidecar without reading gigabytes."""

    name: str
    size: int
    digest: str
    sampled: bool

    @staticmethod
    def of(path: Path, *, sampled: bool) -> FileRecord:
        return FileRecord(path.name, path.stat().st_size, _digest(path, sampled=sampled), sampled)


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
        if cache == "tiers":
            chosen += " --cache-ages " + ",".join(map(str, self.config["cache_ages"]))
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
                    f"{path}: not found; {folder} is not an engine folder: build one with "
                    f"'enginebay build EXPORTED {folder}'"
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
        """What no engine can have: the key, its value and what it may be."""
        if not self.files:
            yield "files: empty, but an engine has files"
        for index, record in enumerate(self.files):
            if Path(record.name).name != record.name:
                yield f"files[{index}].name: {record.name!r} is not a plain file name"
        for name, value in vars(self.limits).items():
            yield from _count_fault(f"limits.{name}", value)
        if not self.cache_groups:
            yield "cache_groups: empty, but every layer has a cache"
        for index, group in enumerate(self.cache_groups):
            yield from group.faults(f"cache_groups[{index}]")
        layers = [layer for group in self.cache_groups for layer in group.layers]
        if len(set(layers)) < len(layers):
            yield "cache_groups: a layer is in them twice"

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
        problems = []
        for record in self.files:
            path = folder / record.name
            if not path.is_file():
                problems.append(
                    f"{path}: not found, but {MANIFEST} lists it; move an engine folder as a whole, or "
                    + self.rebuild_command.format(engine=folder)
                )
                continue
            size = path.stat().st_size
            if size != record.size:
                what = "cut short" if size < record.size else "too long"
                problems.append(
                    f"{path}: {what}: {MANIFEST} has {record.size} bytes, the file {size}; copy it again, or "
                    + self.rebuild_command.format(engine=folder)
                )
            elif (digest := _digest(path, sampled=record.sampled)) != record.digest:
                problems.append(
                    f"{path}: not the file that was built: {MANIFEST} has digest {record.digest[:12]}, the "
                    f"file {digest[:12]}; copy it again, or " + self.rebuild_command.format(engine=folder)
                )
        return problems


def _count_fault(key: str, value: int) -> Iterator[str]:
    if not 1 <= value <= COUNT_MAX:
        yield f"{key}: {value} is out of range; it must be between 1 and {COUNT_MAX}"


def enginebay_version() -> str:
    """The version of the installed distribution."""
    from importlib.metadata import version

    return version("enginebay")


def _minor(version: str) -> tuple[str, ...]:
    return tuple(version.split(".")[:2])


def _digest(path: Path, *, sampled: bool) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        if not sampled:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
            return digest.hexdigest()
        size = file.seek(0, os.SEEK_END)
        digest.update(size.to_bytes(8, "little"))
        last = max(0, size - _SAMPLE_BYTES)
        for index in range(_SAMPLES):
            file.seek(last * index // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
