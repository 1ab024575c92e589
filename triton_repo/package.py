"""Puts an engine folder into a Triton model repository that needs nothing of ours from outside."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from enginebay.builder.manifest import MANIFEST, EngineManifest, ManifestError, enginebay_version
from enginebay.export.staging import staged
from enginebay.plugins.load import KernelLibrary
from enginebay.triton_repo.backend.service import ENGINE
from enginebay.triton_repo.backend.settings import ServingSettings
from enginebay.triton_repo.runtime.ort_engine import machine_facts
from enginebay.triton_repo.vendor import copy_modules

_TEMPLATES = Path(__file__).parent / "models" / "llm"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_PLACEHOLDER = re.compile(r"\$\{([^}]*)\}?")
_ENTRY = "enginebay.triton_repo.backend.service"


class PackageError(ValueError):
    """The repository cannot be made as asked; the message names the file, the key and what to do."""


@dataclass(frozen=True)
class PackageConfig:
    """`name` is the model's in Triton. `link`: hard links to the engine's files where possible."""

    name: str = "llm"
    settings: ServingSettings = field(default_factory=ServingSettings)
    link: bool = True


@dataclass(frozen=True)
class Packaged:
    """What was made. `linked` of `bytes` share their storage with the engine folder."""

    repository: Path
    model: Path
    bytes: int
    linked: int
    notes: tuple[str, ...]


def package_repo(engine: Path, repository: Path, config: PackageConfig | None = None) -> Packaged:
    """Makes `repository`/`name` from an engine folder; other models in the repository stay.

    The model appears complete or not at all, and replaces an older one of the same name. It holds the engine,
    the serving code and the kernel library, and no path outside itself. ManifestError where the folder is no
    engine or does not fit this machine; PackageError for the rest.
    """
    config = config or PackageConfig()
    if not _NAME.fullmatch(config.name):
        raise PackageError(
            f"name: '{config.name}' cannot be a model's; letters, digits, '.', '_' and '-', 128 at most, "
            "a letter or digit first"
        )
    manifest = EngineManifest.load(engine)
    library = KernelLibrary()
    notes = tuple(manifest.check(engine, machine_facts(manifest, library)))
    if not (engine / "tokenizer.json").is_file():
        raise PackageError(
            f"{engine / 'tokenizer.json'}: no such file; the model serves text, so put the checkpoint's "
            "tokenizer files into the Hugging Face folder, then export and build again"
        )
    target = repository / config.name
    if target.exists() and not (target / "config.pbtxt").is_file():
        raise PackageError(f"{target}: exists and is no Triton model; choose another name or repository")
    if (repository / MANIFEST).exists() or _holds_something_else(repository):
        raise PackageError(
            f"{repository}: has files in it and no Triton model; choose an empty folder or a model repository"
        )
    text = fill(
        (_TEMPLATES / "config.pbtxt").read_text(),
        {"name": escape(config.name), "parameters": _parameters(config.settings)},
        "config.pbtxt",
    )
    repository.mkdir(parents=True, exist_ok=True)
    # Beside the repository, on the same disk; a server that reads the repository must not see it half made.
    with staged(target, repository.parent) as work:
        version = work / "1"
        version.mkdir(parents=True)
        (work / "config.pbtxt").write_text(text)
        shutil.copyfile(_TEMPLATES / "1" / "model.py", version / "model.py")
        copy_modules(_ENTRY, version / "lib", library.path, enginebay_version())
        size, linked = _place(engine, version / ENGINE, link=config.link)
    return Packaged(repository, target, size, linked, notes)


def _holds_something_else(repository: Path) -> bool:
    """Whether the folder is there, not empty, and no model repository."""
    if not repository.is_dir() or not any(repository.iterdir()):
        return False
    return not any(repository.glob("*/config.pbtxt"))


def fill(template: str, values: Mapping[str, str], name: str) -> str:
    """A template with its `${key}` replaced. PackageError naming a key without a value, or one left over."""

    def replace(match: re.Match[str]) -> str:
        if match[1] not in values:
            raise PackageError(f"{name}: no value for placeholder '{match[0]}'")
        return values[match[1]]

    for key in values:
        if f"${{{key}}}" not in template:
            raise PackageError(f"{name}: has no placeholder '${{{key}}}' for its value")
    filled = _PLACEHOLDER.sub(replace, template)
    left = _PLACEHOLDER.search(filled)
    if left is not None:
        raise PackageError(f"{name}: placeholder '{left[0]}' is left in a value")
    return filled


def escape(value: str) -> str:
    """A value as it stands between the quotes of a protobuf text file."""
    return (
        value.replace("\\", "\\\\")
        .replace('"', '\\"')
        .replace("\n", "\\n")
        .replace("\r", "\\r")
        .replace("\t", "\\t")
    )


def _parameters(settings: ServingSettings) -> str:
    return "\n".join(
        f'parameters {{ key: "{escape(key)}" value: {{ string_value: "{escape(value)}" }} }}'
        for key, value in settings.parameters().items()
    )


def _place(engine: Path, target: Path, *, link: bool) -> tuple[int, int]:
    """The engine's files into `target`. Bytes in all, and of them hard-linked."""
    target.mkdir()
    size = linked = 0
    for source in sorted(engine.iterdir()):
        if not source.is_file():
            continue
        size += source.stat().st_size
        if link:
            try:
                os.link(source.resolve(), target / source.name)
            except OSError:  # another disk, or one without links
                shutil.copyfile(source, target / source.name)
            else:
                linked += source.stat().st_size
        else:
            shutil.copyfile(source, target / source.name)
    return size, linked


__all__ = ["ManifestError", "PackageConfig", "PackageError", "Packaged", "package_repo"]
