"""Compile ONNX Runtime's adapter of the CUDA kernels: `python -m enginebay.plugins.build_ort_cuda`.

`lib/libenginebay_ort_cuda.so` holds no kernel and needs no CUDA header: it is linked to
`libenginebay_cuda.so`, which `build_cuda` makes and which must lie beside it. It shares its sources with the
CPU library's adapter, except for what `adapters/ort_cuda` has of its own.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

from enginebay.plugins import build_cuda, ort_headers
from enginebay.plugins.build import CXX_FLAGS, HERE, BuildError, Unit, default_build_directory
from enginebay.plugins.build import _call as call
from enginebay.plugins.build import _compile as compile_unit

LIBRARY = build_cuda.LIBRARY.with_name("libenginebay_ort_cuda.so")
SHARED = HERE / "adapters" / "ort"
OWN = HERE / "adapters" / "ort_cuda"
# Of SHARED; the others register and serve the CPU's ops.
SHARED_SOURCES = ("elementwise", "moe", "ort", "paged_attention", "quant_linear", "spec_verify")
LINK_FLAGS = (
    *("-shared", "-pthread", "-static-libstdc++", "-static-libgcc", "-Wl,--no-undefined", "-Wl,-O1"),
    *("-Wl,--exclude-libs,ALL", "-Wl,--gc-sections", f"-Wl,-soname,{LIBRARY.name}", "-Wl,-rpath,$ORIGIN"),
    f"-Wl,--version-script,{OWN / 'exports.map'}",
)


def units(compiler: str, build: Path, ort_include: Path) -> list[Unit]:
    """One object a source."""
    sources = [SHARED / f"{name}.cc" for name in SHARED_SOURCES] + sorted(OWN.glob("*.cc"))
    includes = (f"-I{HERE / 'include'}", f"-I{SHARED}", "-isystem", str(ort_include), "-DORT_API_MANUAL_INIT")
    found = []
    for source in sources:
        target = build / source.parent.name / f"{source.stem}.o"
        command = (compiler, *CXX_FLAGS, *includes, "-MMD", "-MF", str(target.with_suffix(".d")))
        found.append(Unit(source, target, (*command, "-c", str(source), "-o", str(target))))
    return found


def build(directory: Path | None = None, library: Path = LIBRARY) -> Path:
    """Bring `library` up to date and return it. BuildError or HeadersNotFoundError says what is missing."""
    kernels = library.with_name(build_cuda.LIBRARY.name)
    if not kernels.is_file():
        raise BuildError(f"no CUDA kernels at {kernels}; python -m enginebay.plugins.build_cuda")
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise BuildError(f"the C++ compiler '{compiler}' is not on PATH; install g++ 11 or newer, or set CXX")
    ort_include = ort_headers.find(default_build_directory() / "onnxruntime")
    everything = units(compiler, directory or default_build_directory().parent / "ort_cuda", ort_include)
    for unit in everything:
        if not unit.up_to_date():
            compile_unit(unit)
            print(f"ort-cuda: compiled {unit.source.parent.name}/{unit.source.name}", flush=True)
    fresh = library.with_suffix(f".{os.getpid()}.tmp")
    objects = [str(unit.object) for unit in everything]
    against = (f"-L{kernels.parent}", f"-l:{kernels.name}")  # by name: the two files may move together
    try:
        call((compiler, *LINK_FLAGS, *objects, *against, "-o", str(fresh)), f"linking {library.name}")
        fresh.replace(library)
    finally:
        fresh.unlink(missing_ok=True)
    print(f"ort-cuda: {library}", flush=True)
    return library


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m enginebay.plugins.build_ort_cuda", description=__doc__)
    parser.add_argument("--build-dir", type=Path, help="objects (default build/ort_cuda)")
    parser.add_argument("--output", type=Path, default=LIBRARY, help="the library (default %(default)s)")
    options = parser.parse_args(arguments)
    try:
        build(options.build_dir, options.output)
    except (BuildError, ort_headers.HeadersNotFoundError) as error:
        print(f"ort-cuda: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
