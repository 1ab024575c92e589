"""The export stage: an HF folder in, an exported folder out, or a named refusal and nothing written."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from enginebay.export.checkpoint import open_checkpoint
from enginebay.export.convert import Source, opened
from enginebay.export.emitter import WEIGHTS_FILE
from enginebay.export.errors import ExportError
from enginebay.export.families import read_spec
from enginebay.export.graph import build_graph
from enginebay.export.quantized import read_scheme
from enginebay.export.spec import ModelSpec
from enginebay.export.staging import obstacle, staged
from enginebay.export.weights import Initializer, WeightPlan, plan_weights, write_sidecar

MODEL_FILE = "model.onnx"
SPEC_FILE = "spec.json"
SOURCE_FILE = "source.json"
SOURCE_SCHEMA = 1
MAX_CONFIG_BYTES = 50_000_000

# Copied as they are: what serving needs to turn text into ids and back, and the model's generation defaults.
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)


@dataclass(frozen=True)
class ExportReport:
    """What an export made, or with `dry_run` would make.

    `identity`: SHA-256 of config.json and the checkpoint's headers. `weight_bytes`: the sidecar. `ignored`:
    tensors left out because they hold nothing a forward pass needs. `notes`: decisions the user should
    know.
    """

    spec: ModelSpec
    identity: str
    parameters: int
    weight_bytes: int
    cache_bytes_per_token: int
    tensors: tuple[Initializer, ...]
    ignored: tuple[str, ...]
    notes: tuple[str, ...]
    companions: tuple[str, ...]
    dry_run: bool


def export_model(
    source: Path,
    out: Path,
    *,
    progress: Callable[[int, int], None] | None = None,
    dry_run: bool = False,
    force: bool = False,
) -> ExportReport:
    """Exports the HF folder or GGUF file `source` to `out`, which appears whole or not at all.

    `progress(done, total)` counts bytes of weights. An existing `out` is replaced only where it is an
    earlier export, or with `force`; never where it holds `source`. Raises ExportError (or SpecError)
    before anything large is written.
    """
    if not source.is_dir() and not (source.is_file() and source.suffix == ".gguf"):
        raise ExportError(
            f"{source} is neither a folder nor a .gguf file: give the folder of an HF checkpoint"
        )
    if not dry_run:
        check_output(out, source, force=force)
    with opened(source, out.parent) as real:
        return _export(source, real, out, progress=progress, dry_run=dry_run)


def _export(
    source: Path,
    real: Source,
    out: Path,
    *,
    progress: Callable[[int, int], None] | None,
    dry_run: bool,
) -> ExportReport:
    """`real` is where `source`'s tensors can be read."""
    config_bytes = read_config(real.folder)
    config = parse_config(config_bytes)
    scheme = read_scheme(config)
    family, spec = read_spec(config)
    checkpoint = open_checkpoint(real.folder)
    plan = plan_weights(spec, family, checkpoint, scheme)
    identity = hashlib.sha256(config_bytes + checkpoint.identity.encode()).hexdigest()
    companions = tuple(name for name in COMPANIONS if (real.folder / name).is_file())
    report = ExportReport(
        spec=plan.spec,
        identity=identity,
        parameters=sum(
            math.prod(weight.shape)
            for role, weight in plan.initializers.items()
            if not role.startswith("rope.") and not role.endswith((".scale", ".zero", ".minimum", ".order"))
        ),
        weight_bytes=plan.total_bytes,
        cache_bytes_per_token=_cache_bytes_per_token(plan.spec),
        tensors=tuple(plan.initializers.values()),
        ignored=plan.ignored,
        notes=(*real.notes, *plan.notes),
        companions=companions,
        dry_run=dry_run,
    )
    if not dry_run:
        with staged(out) as folder:
            _write(folder, real, report, plan)
            stamped = real.files or tuple(path.name for path in checkpoint.files)
            record_source(
                folder,
                source,
                identity=identity,
                weight_bytes=report.weight_bytes,
                parameters=report.parameters,
                names=("config.json", *companions, *stamped),
                ignored=plan.ignored,
                notes=(*real.notes, *plan.notes),
            )
            write_sidecar(plan, folder / WEIGHTS_FILE, progress)
    return report


def is_current(source: Path, out: Path) -> bool:
    """Whether `out` holds an export of `source` as it is now.

    Same files, sizes and times of change. Reads no weights.
    """
    try:
        record = json.loads((out / SOURCE_FILE).read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    if not isinstance(record, dict) or record.get("schema") != SOURCE_SCHEMA:
        return False
    if not isinstance(record.get("files"), dict):
        return False
    sidecar = out / WEIGHTS_FILE
    whole = sidecar.is_file() and sidecar.stat().st_size == record.get("weight_bytes")
    return (
        whole
        and (out / MODEL_FILE).is_file()
        and record["files"] == _stamps(source, [*record["files"], *COMPANIONS])
    )


def read_config(source: Path) -> bytes:
    """config.json's bytes. Raises ExportError where there is none."""
    path = source / "config.json"
    if not path.is_file():
        raise ExportError(f"{path} is missing: {source} is not the folder of an HF checkpoint")
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise ExportError(f"{path} has {path.stat().st_size} bytes, more than {MAX_CONFIG_BYTES}")
    return path.read_bytes()


def parse_config(data: bytes) -> dict[str, Any]:
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ExportError(f"config.json is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ExportError("config.json is not an object")
    return values


def _write(folder: Path, real: Source, report: ExportReport, plan: WeightPlan) -> None:
    """Graph, spec and the files that go along; not the weights."""
    ir.save(build_graph(plan.spec, plan.initializers), folder / MODEL_FILE)
    (folder / SPEC_FILE).write_text(plan.spec.to_json())
    copy_companions(real.folder, folder, report.companions)


def copy_companions(source: Path, folder: Path, names: Sequence[str]) -> None:
    for name in names:
        shutil.copyfile(source / name, folder / name)


def record_source(
    folder: Path,
    source: Path,
    *,
    identity: str,
    weight_bytes: int,
    parameters: int,
    names: Sequence[str],
    ignored: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> None:
    """What the export was made from: `is_current` compares the stamps of `names` in `source`."""
    record = {
        "schema": SOURCE_SCHEMA,
        "identity": identity,
        "weight_bytes": weight_bytes,
        "parameters": parameters,
        "files": _stamps(source, dict.fromkeys(names)),
        "ignored": list(ignored),
        "notes": list(notes),
    }
    (folder / SOURCE_FILE).write_text(json.dumps(record, indent=2) + "\n")


def _stamps(source: Path, names: Iterable[str]) -> dict[str, list[int]]:
    """Size and time of change (nanoseconds) of those of the files that are there; of `source` alone where it
    is a file."""
    if source.is_file():
        source, names = source.parent, [source.name]
    paths = {name: source / name for name in names if (source / name).is_file()}
    return {name: [path.stat().st_size, path.stat().st_mtime_ns] for name, path in sorted(paths.items())}


def _cache_bytes_per_token(spec: ModelSpec) -> int:
    """Of all layers together, in the canonical graph's float32."""
    return sum(
        4
        * len(group.layers)
        * (group.head_dim if group.kind == "latent" else 2 * group.kv_heads * group.head_dim)
        for group in spec.cache_groups
    )


def check_output(out: Path, source: Path, *, force: bool) -> None:
    """Raises ExportError where `out` must not be replaced.

    `force` is for any folder but one that holds the source.
    """
    reason = obstacle(out, source)
    if reason is not None:
        raise ExportError(reason)
    if out.exists() and not force and not (out / SOURCE_FILE).is_file():
        raise ExportError(f"{out} exists and is not an earlier export: choose another folder, or --force")


# Bits of a weight by recipe, its scales and minimums counted: of linear layers, and of the head and the
# embedding, which int4 keeps in int8. Vectors and tables stay float32.
_RECIPE_BITS = {"fp32": (32.0, 32.0), "fp16": (16.0, 16.0), "int8": (8.5, 8.5), "int4": (5.0, 8.5)}


def engine_bytes(report: ExportReport) -> dict[str, int]:
    """Bytes of weights that an engine of each recipe will hold, to a few percent."""
    linear = tokens = vectors = 0
    for weight in report.tensors:
        size = math.prod(weight.shape)
        if len(weight.shape) < 2 or weight.name.startswith("rope."):
            vectors += size
        elif weight.shape[0] == report.spec.vocab_size:
            tokens += size
        else:
            linear += size
    return {
        name: int((linear * bits + tokens * token_bits) / 8 + 4 * vectors)
        for name, (bits, token_bits) in _RECIPE_BITS.items()
    }


def describe(report: ExportReport) -> dict[str, Any]:
    """The report as plain data for `--json` and `--dry-run`: spec, tensors with shapes and bytes, memory."""
    return {
        "identity": report.identity,
        "parameters": report.parameters,
        "weight_bytes": report.weight_bytes,
        "cache_bytes_per_token": report.cache_bytes_per_token,
        "engine_bytes": engine_bytes(report),
        "max_positions": report.spec.max_positions,
        "tied_embeddings": report.spec.tied_embeddings,
        "notes": list(report.notes),
        "ignored": list(report.ignored),
        "companions": list(report.companions),
        "tensors": [
            {"name": weight.name, "dtype": weight.dtype, "shape": list(weight.shape), "bytes": weight.nbytes}
            for weight in report.tensors
        ],
        "spec": asdict(report.spec),
        "dry_run": report.dry_run,
    }
