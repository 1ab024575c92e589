"""Compile the CUDA kernel library: `python -m enginebay.plugins.build_cuda [--arch 90] [--subset ci]`.

Every `.cu` file of kernels/cuda becomes one object, attention_instance.cu one for each entry of `ATTENTION`.
The CUDA runtime is linked statically, so the library loads on machines without a GPU, where its host side
(plans, sizes, packing, validation) works.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from enginebay.plugins.build import HERE, BuildError, default_build_directory
from enginebay.plugins.build import _call as call

LIBRARY = HERE / "lib" / "libenginebay_cuda.so"
SOURCES = HERE / "kernels" / "cuda"
INSTANCE = "attention_instance"
OPS = (
    "PagedAttention",
    "QuantLinear",
    "Embedding",
    "AddRMSNorm",
    "GatedActivation",
    "QuantMoE",
    "SpecVerify",
    "Sample",
)

# sm_90 and sm_100 kernels use instructions that exist on that very architecture only.
ARCHITECTURES = {80: "80", 86: "86", 89: "89", 90: "90a", 100: "100a", 120: "120a"}

FLAGS = (
    *("-std=c++17", "-O3", "--expt-relaxed-constexpr", "-cudart=static", "-lineinfo"),
    *("-Xcompiler", "-fPIC,-fvisibility=hidden,-Wall", "-Xptxas", "-warn-spills"),
)


@dataclass(frozen=True)
class Attention:
    """One instantiation of PagedAttention: dtypes of queries and cache, head size; `ci`: CI builds it too."""

    io: str
    cache: str
    head_dim: int
    ci: bool = False

    @property
    def name(self) -> str:
        return f"attention_{self.io}_{self.cache}_{self.head_dim}"


TYPES = {
    "f16": ("half", "EB_F16"),
    "bf16": ("__nv_bfloat16", "EB_BF16"),
    "f8": ("__nv_fp8_e4m3", "EB_F8E4M3"),
    "i8": ("int8_t", "EB_I8"),
}
HEAD_DIMS = (64, 96, 128, 192, 256)

# Every instantiation that is built. The subset for CI keeps one of each kind.
ATTENTION = tuple(
    Attention(io, cache, head_dim, ci=(io, cache, head_dim) in {("f16", "f16", 128), ("bf16", "f8", 64)})
    for io in ("f16", "bf16")
    for cache in (io, "f8", "i8")
    for head_dim in HEAD_DIMS
)


def attention_table(subset: str) -> tuple[Attention, ...]:
    """The entries of `ATTENTION` a build holds: all of them, or those marked for CI."""
    return tuple(entry for entry in ATTENTION if subset == "all" or entry.ci)


def _compiler() -> str:
    nvcc = os.environ.get("NVCC", "nvcc")
    found = shutil.which(nvcc)
    if found is None:
        raise BuildError(
            f"the CUDA compiler '{nvcc}' is not on PATH; install CUDA 13.0's nvcc (or name one in NVCC). "
            "The CPU library does not need it"
        )
    return found


def cublas_include(nvcc: str) -> Path:
    """Where cublasLt.h is: `CUBLAS_INCLUDE`, the toolkit or the nvidia-cublas wheel; else BuildError."""
    candidates = [Path(nvcc).resolve().parent.parent / "include", Path("/usr/local/cuda/include")]
    if wish := os.environ.get("CUBLAS_INCLUDE"):
        candidates.insert(0, Path(wish))
    for entry in sys.path:
        candidates.append(Path(entry) / "nvidia" / "cu13" / "include")
    for candidate in candidates:
        if (candidate / "cublasLt.h").is_file():
            return candidate
    raise BuildError(
        "cublasLt.h was not found in "
        + ", ".join(str(c) for c in candidates)
        + "; `pip install --no-deps nvidia-cublas==13.0.2.14` or name its folder in CUBLAS_INCLUDE"
    )


@dataclass(frozen=True)
class Unit:
    """One object: its source, its file and the command that makes it."""

    source: Path
    object: Path
    command: tuple[str, ...]

    def up_to_date(self) -> bool:
        """Whether object and headers are as old as they should be, made by this very command."""
        stamp, listing = self.object.with_suffix(".cmd"), self.object.with_suffix(".d")
        if not (self.object.is_file() and stamp.is_file() and listing.is_file()):
            return False
        if stamp.read_text() != "\n".join(self.command):
            return False
        made = self.object.stat().st_mtime_ns
        files = listing.read_text().replace("\\\n", " ").split(" : ", 1)[1].split()
        return all(Path(f).is_file() and Path(f).stat().st_mtime_ns <= made for f in files)


def units(nvcc: str, build: Path, architectures: tuple[int, ...], subset: str) -> list[Unit]:
    """Every object of the library, for `architectures` and the entries of `subset` ("all" or "ci")."""
    generated = build / "generated"
    generated.mkdir(parents=True, exist_ok=True)
    table = attention_table(subset)
    text = "#define EB_ATTENTION_INSTANCES(X) " + " ".join(f"X({entry.name})" for entry in table) + "\n"
    header = generated / "attention_instances.h"
    if not header.is_file() or header.read_text() != text:
        header.write_text(text)
    code = [
        f"-gencode=arch=compute_{ARCHITECTURES[a]},code=sm_{ARCHITECTURES[a]}" for a in sorted(architectures)
    ]
    op_table = "".join(f"{name}=1;" for name in OPS)
    common = (
        *(nvcc, *FLAGS, *code, f"-I{HERE / 'include'}", f"-I{HERE / 'kernels' / 'cpu'}", f"-I{SOURCES}"),
        *(f"-I{generated}", f"-DEB_CUDA_ARCHITECTURES={','.join(str(a) for a in sorted(architectures))}"),
        f'-DEB_CUDA_OP_TABLE="{op_table}"',
    )
    found = []

    def add(source: Path, name: str, *more: str) -> None:
        target = build / f"{name}.o"
        found.append(
            Unit(
                source,
                target,
                (
                    *common,
                    *more,
                    "-MD",
                    "-MF",
                    str(target.with_suffix(".d")),
                    "-c",
                    str(source),
                    "-o",
                    str(target),
                ),
            )
        )

    for source in sorted(SOURCES.glob("*.cu")):
        if source.stem == INSTANCE:
            for entry in table:
                (io, io_dtype), (cache, cache_dtype) = TYPES[entry.io], TYPES[entry.cache]
                add(
                    source,
                    entry.name,
                    *(f"-DEB_INSTANCE={entry.name}", f"-DEB_IO={io}", f"-DEB_CACHE={cache}"),
                    *(f"-DEB_IO_DTYPE={io_dtype}", f"-DEB_CACHE_DTYPE={cache_dtype}"),
                    f"-DEB_HEAD_DIM={entry.head_dim}",
                )
        elif source.stem == "lt_linear":
            add(source, source.stem, "-isystem", str(cublas_include(nvcc)))
        else:
            add(source, source.stem)
    add(HERE / "kernels" / "cpu" / "status.cc", "status")
    return found


def build(
    architectures: tuple[int, ...],
    *,
    subset: str = "all",
    directory: Path | None = None,
    library: Path = LIBRARY,
    jobs: int = 1,
) -> Path:
    """Bring `library` up to date and return it. BuildError says what is missing."""
    unknown = [a for a in architectures if a not in ARCHITECTURES]
    if unknown or not architectures:
        raise BuildError(
            f"no kernels for sm_{unknown}; there are {', '.join(f'sm_{a}' for a in ARCHITECTURES)}"
        )
    directory = directory or default_build_directory().parent / "cuda"
    nvcc = _compiler()
    directory.mkdir(parents=True, exist_ok=True)
    everything = units(nvcc, directory, architectures, subset)
    stale = [unit for unit in everything if not unit.up_to_date()]
    print(f"cuda: {len(everything) - len(stale)} of {len(everything)} objects up to date", flush=True)

    def compile_unit(unit: Unit) -> Unit:
        call(unit.command, f"compiling {unit.source}")
        unit.object.with_suffix(".cmd").write_text("\n".join(unit.command))
        return unit

    with ThreadPoolExecutor(jobs) as pool:
        for unit in pool.map(compile_unit, stale):
            print(f"cuda: compiled {unit.object.stem}", flush=True)
    library.parent.mkdir(parents=True, exist_ok=True)
    fresh = library.with_suffix(f".{os.getpid()}.tmp")
    objects = [str(unit.object) for unit in everything]
    link = (nvcc, "-shared", "-cudart=static", "-Xcompiler", "-fPIC", *objects, "-ldl", "-o", str(fresh))
    try:
        call(
            (*link, "-Xlinker", "--exclude-libs,ALL", "-Xlinker", "--no-undefined"), f"linking {library.name}"
        )
        fresh.replace(library)
    finally:
        fresh.unlink(missing_ok=True)
    print(f"cuda: {library}, {library.stat().st_size / 1e6:.1f} MB", flush=True)
    return library


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m enginebay.plugins.build_cuda", description=__doc__)
    parser.add_argument(
        "--arch", type=int, action="append", help="compute capability, e.g. 90; may be repeated"
    )
    parser.add_argument(
        "--subset", choices=("all", "ci"), default="all", help="which instantiations (default all)"
    )
    parser.add_argument("--jobs", type=int, default=1, help="compilers at a time (default %(default)s)")
    parser.add_argument("--build-dir", type=Path, help="objects (default build/cuda)")
    parser.add_argument("--output", type=Path, default=LIBRARY, help="the library (default %(default)s)")
    options = parser.parse_args(arguments)
    try:
        build(
            tuple(options.arch or (90,)),
            subset=options.subset,
            directory=options.build_dir,
            library=options.output,
            jobs=options.jobs,
        )
    except BuildError as error:
        print(f"cuda: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
