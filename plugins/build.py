"""Compile the CPU plugin library: `python -m enginebay.plugins.build`.

Every `.cc` file below kernels/cpu and adapters/ort becomes part of `lib/libenginebay_cpu.so`. A kernel file
is compiled for baseline x86-64 unless its name ends in one of `ISA_FLAGS`; such a file is only entered after
CPUID allowed it. What is up to date is kept.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from enginebay.plugins import ort_headers

HERE = Path(__file__).resolve().parent
LIBRARY = HERE / "lib" / "libenginebay_cpu.so"
EXPORTS = HERE / "adapters" / "ort" / "exports.map"
JOBS = 2

# Contraction is off because a row's answer may not depend on which loop the compiler chose to fuse: kernels
# ask for fused multiply-adds by name. ABI calls never throw, but ONNX Runtime's C++ header does.
CXX_FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden", "-pthread"),
    *("-ffp-contract=off", "-fno-math-errno", "-Wall", "-Wextra", "-Werror=return-type"),
)
LINK_FLAGS = (
    *("-shared", "-pthread", "-static-libstdc++", "-static-libgcc", "-Wl,--no-undefined", "-Wl,-O1"),
    *("-Wl,--exclude-libs,ALL", "-Wl,--gc-sections", "-Wl,-soname,libenginebay_cpu.so"),
    f"-Wl,--version-script,{EXPORTS}",
)
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
# GCC 12 finds its own AVX-512 intrinsics uninitialised.
_AVX512 = (
    *(*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"),
    *("-Wno-uninitialized", "-Wno-maybe-uninitialized"),
)
_VNNI = (*_AVX512, "-mavx512vnni")
ISA_FLAGS: Mapping[str, tuple[str, ...]] = {
    "_avx2": _AVX2,
    "_avx512": _AVX512,
    "_avx512vnni": _VNNI,
    "_avx512bf16": (*_VNNI, "-mavx512bf16"),
    "_amx": (*_VNNI, "-mavx512bf16", "-mamx-tile", "-mamx-int8", "-mamx-bf16"),
}


class BuildError(RuntimeError):
    """The library could not be built; the message says what to do."""


@dataclass(frozen=True)
class Unit:
    """One source file, the object it becomes and the command that makes it."""

    source: Path
    object: Path
    command: tuple[str, ...]

    @property
    def stamp(self) -> Path:
        """Holds the command the object was made with: other flags mean another object."""
        return self.object.with_suffix(".cmd")

    def up_to_date(self) -> bool:
        dependencies = self.object.with_suffix(".d")
        if not (self.object.is_file() and dependencies.is_file() and self.stamp.is_file()):
            return False
        if self.stamp.read_text() != "\n".join(self.command):
            return False
        made = self.object.stat().st_mtime_ns
        # Make's syntax: "object: file file \ file"; a file that is gone counts as changed.
        files = dependencies.read_text().replace("\\\n", " ").split(": ", 1)[1].split()
        return all(Path(f).is_file() and Path(f).stat().st_mtime_ns <= made for f in files)


def default_build_directory() -> Path:
    """`build/plugins` of a source tree; the user's cache for an installed package."""
    if (HERE.parent / "pyproject.toml").is_file():
        return HERE.parent / "build" / "plugins"
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "enginebay" / "plugins"


def isa_flags(source: Path) -> tuple[str, ...]:
    """Flags of a file by the ending of its name, e.g. `quant_linear_avx512vnni.cc`."""
    for ending, flags in ISA_FLAGS.items():
        if source.stem.endswith(ending):
            return flags
    return ()


def units(compiler: str, build: Path, ort_include: Path, root: Path = HERE) -> list[Unit]:
    """One unit per source. Kernels see no ONNX Runtime header: only the adapter's include path has them."""
    kernels, adapter = root / "kernels" / "cpu", root / "adapters" / "ort"
    found = []
    for folder in (kernels, adapter):
        for source in sorted(folder.rglob("*.cc")):
            target = build / source.relative_to(root).with_suffix(".o")
            includes = [f"-I{root / 'include'}", f"-I{folder}"]
            if folder == adapter:
                includes += ["-isystem", str(ort_include), "-DORT_API_MANUAL_INIT"]
            command = (compiler, *CXX_FLAGS, *isa_flags(source), *includes, "-MMD", "-MF")
            command += (str(target.with_suffix(".d")), "-c", str(source), "-o", str(target))
            found.append(Unit(source, target, command))
    if not found:
        raise BuildError(f"no C++ source below {root}; the package was installed without its sources")
    return found


def build(directory: Path | None = None, library: Path = LIBRARY, jobs: int = JOBS) -> Path:
    """Bring `library` up to date and return it. BuildError or HeadersNotFoundError says what is missing."""
    directory = directory or default_build_directory()
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise BuildError(
            f"the C++ compiler '{compiler}' is not on PATH; install g++ 11 or newer (apt install g++), "
            "or name another one in CXX"
        )
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second build waits, then finds everything up to date
        ort_include = ort_headers.find(directory / "onnxruntime")
        everything = units(compiler, directory / "obj", ort_include)
        stale = [unit for unit in everything if not unit.up_to_date()]
        print(f"plugins: {len(everything) - len(stale)} of {len(everything)} objects up to date", flush=True)
        with ThreadPoolExecutor(jobs) as pool:
            for unit in pool.map(_compile, stale):
                print(f"plugins: compiled {unit.source.relative_to(HERE)}", flush=True)
        return _link(compiler, everything, library, relink=bool(stale))


def _compile(unit: Unit) -> Unit:
    unit.object.parent.mkdir(parents=True, exist_ok=True)
    unit.stamp.unlink(missing_ok=True)
    began = time.time_ns()
    _call(unit.command, f"compiling {unit.source}")
    os.utime(unit.object, ns=(began, began))  # a source edited while it compiled is newer than its object
    unit.stamp.write_text("\n".join(unit.command))
    return unit


def _link(compiler: str, everything: list[Unit], library: Path, *, relink: bool) -> Path:
    objects = [str(unit.object) for unit in everything]
    digest = hashlib.sha256("\n".join([*LINK_FLAGS, EXPORTS.read_text(), *objects]).encode()).hexdigest()
    stamp = library.with_suffix(".link")
    if not relink and library.is_file() and stamp.is_file() and stamp.read_text() == digest:
        print(f"plugins: {library} is up to date", flush=True)
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    # A process that has the old library mapped keeps its file: the new one takes the name in one step.
    fresh = library.with_suffix(f".{os.getpid()}.tmp")
    try:
        _call((compiler, *LINK_FLAGS, *objects, "-o", str(fresh)), f"linking {library.name}")
        fresh.replace(library)
    finally:
        fresh.unlink(missing_ok=True)
    stamp.write_text(digest)
    print(f"plugins: linked {library}", flush=True)
    return library


def _call(command: tuple[str, ...], doing: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.stderr:
        print(done.stderr, file=sys.stderr, flush=True)
    if done.returncode != 0:
        raise BuildError(f"{doing} failed with status {done.returncode}; the compiler's words are above")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m enginebay.plugins.build", description=__doc__)
    parser.add_argument("--jobs", type=int, default=JOBS, help="compilers at a time (default %(default)s)")
    parser.add_argument("--build-dir", type=Path, help="objects and fetched headers (default build/plugins)")
    parser.add_argument("--output", type=Path, default=LIBRARY, help="the library (default %(default)s)")
    options = parser.parse_args(arguments)
    try:
        build(options.build_dir, options.output, options.jobs)
    except (BuildError, ort_headers.HeadersNotFoundError) as error:
        print(f"plugins: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
