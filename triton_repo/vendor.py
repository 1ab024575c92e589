"""Copies the modules that serving needs, and only those, so that a model repository stands by itself."""

from __future__ import annotations

import ast
import importlib.util
import shutil
from pathlib import Path

_NAMESPACE = "enginebay"


def module_closure(entry: str) -> dict[str, Path]:
    """Every module of ours that `entry` imports, directly or not, wherever in the file; packages included.

    ModuleNotFoundError where one does not exist.
    """
    found: dict[str, Path] = {}
    waiting = [entry]
    while waiting:
        name = waiting.pop()
        if name in found or name == _NAMESPACE:
            continue
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError(f"{name}: no such module, though serving imports it", name=name)
        found[name] = Path(spec.origin)
        waiting.append(name.rpartition(".")[0])
        waiting.extend(_imports(found[name]))
    return found


def third_party(modules: dict[str, Path]) -> set[str]:
    """Top-level names of everything else that the modules import."""
    return {
        name.partition(".")[0]
        for path in modules.values()
        for name in _imported(path)
        if not name.startswith(f"{_NAMESPACE}.")
    }


def copy_modules(entry: str, target: Path, library: Path, version: str) -> None:
    """The closure of `entry` under `target`, with the kernel library and the distribution's version."""
    for name, path in module_closure(entry).items():
        parts = name.split(".")
        if path.name == "__init__.py":
            parts.append("__init__")
        copy = target.joinpath(*parts).with_suffix(".py")
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    folder = target / _NAMESPACE / "plugins" / "lib"
    folder.mkdir()
    shutil.copyfile(library, folder / "libenginebay_cpu.so")
    info = target / f"{_NAMESPACE}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {_NAMESPACE}\nVersion: {version}\n")


def _imports(path: Path) -> set[str]:
    """Our modules that a file imports. `from package import name` counts as both package and module."""
    names = set()
    for name in _imported(path):
        if not name.startswith(f"{_NAMESPACE}."):
            continue
        parent = name.rpartition(".")[0]
        if _is_module(name):
            names.add(name)
        elif parent != _NAMESPACE:
            names.add(parent)
    return names


def _imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its parent is a module, not a package
        return False
