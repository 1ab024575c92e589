"""The architecture as tests: which room may import which, and that the package list is the tree on disk."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# docs/ARCHITECTURE.md, column "may import": a room and the prefixes of `enginebay.` it may name.
ALLOWED = {
    "plugins": ("plugins",),
    "export": ("export", "plugins.ops"),
    "builder": ("builder", "export.spec", "export.staging", "plugins"),
    "triton_repo": (
        *("triton_repo", "builder.manifest", "export.staging"),
        *("plugins.load", "plugins.load_cache", "plugins.ops"),
    ),
    "cli": ("",),
}
# Serving must never pull in what only exporting, building or testing needs.
SERVING = (
    "triton_repo/runtime",
    "builder/manifest.py",
    "plugins/load.py",
    "plugins/load_cache.py",
    "plugins/ops.py",
)
NOT_WHEN_SERVING = {"torch", "transformers", "onnx", "onnx_ir", "safetensors", "tqdm"}


def imported_names(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; name the room in full"
            module = node.module or ""
            names.update(f"{module}.{alias.name}" for alias in node.names)
    return names


def python_files(folder: str) -> list[Path]:
    place = ROOT / folder
    return [place] if place.is_file() else sorted(place.rglob("*.py"))


@pytest.mark.parametrize("room", sorted(ALLOWED))
def test_a_room_imports_only_what_it_may(room: str) -> None:
    files = python_files(room)
    assert files
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in files
        for name in sorted(imported_names(path))
        if name.startswith("enginebay.")
        and not any(
            (name.removeprefix("enginebay.") + ".").startswith(f"{p}." if p else "") for p in ALLOWED[room]
        )
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("place", SERVING)
def test_serving_imports_neither_torch_nor_onnx(place: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in python_files(place)
        for name in sorted(imported_names(path))
        if name.split(".")[0] in NOT_WHEN_SERVING
    ]
    assert not wrong, "\n".join(wrong)


def test_the_package_list_is_the_tree() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        setuptools = tomllib.load(file)["tool"]["setuptools"]
    on_disk = {
        "enginebay." + ".".join(path.parent.relative_to(ROOT).parts): str(path.parent.relative_to(ROOT))
        for room in ALLOWED
        for path in (ROOT / room).rglob("__init__.py")
    }
    assert setuptools["package-dir"] == on_disk
    assert sorted(setuptools["packages"]) == sorted(on_disk)


def test_no_file_outgrows_a_reader() -> None:
    long = [
        f"{path.relative_to(ROOT)}: {count} lines"
        for room in (*ALLOWED, "tests", "benchmarks")
        for pattern in ("*.py", "*.cc", "*.h", "*.cu", "*.cuh")
        for path in sorted((ROOT / room).rglob(pattern))
        if (count := len(path.read_text(encoding="utf-8").splitlines())) > 450
    ]
    assert not long, "split by what they are about:\n" + "\n".join(long)
