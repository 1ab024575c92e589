"""What this machine has that EngineBay can use: the probes behind `enginebay doctor`.

A probe looks and reports; it never installs, starts or raises.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Finding:
    """One thing looked for. `needed_for` names the stage; `fix` says what to do where it is not `ok`."""

    name: str
    ok: bool
    detail: str
    needed_for: str
    fix: str = ""


def python_version() -> Finding:
    version = platform.python_version()
    return Finding(
        "python", sys.version_info[:2] == (3, 11), version, "everything",
        "use Python 3.11: the Triton wheel's stub and numpy below 2 meet there",
    )  # fmt: skip


def package(name: str, module: str, needed_for: str, fix: str) -> Finding:
    """Whether `module` can be imported, and the version of the distribution `name`. Nothing is imported."""
    if importlib.util.find_spec(module) is None:
        return Finding(name, ok=False, detail="not installed", needed_for=needed_for, fix=fix)
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        version = "version unknown"
    return Finding(name, ok=True, detail=version, needed_for=needed_for)


def compiler() -> Finding:
    path = shutil.which(os.environ.get("CXX", "g++"))
    return Finding(
        "C++ compiler", path is not None, path or "not found", "make plugins",
        "install g++ (Debian, Ubuntu: apt-get install g++), or set CXX",
    )  # fmt: skip


def plugin_library() -> Finding:
    from enginebay.plugins.load import KernelLibrary

    try:
        library = KernelLibrary()
    except (OSError, ValueError, RuntimeError) as error:
        return _library_fault("plugin library", error)
    return Finding("plugin library", True, str(library.path), "ort-cpu")


def _library_fault(name: str, error: Exception) -> Finding:
    fix = "unset ENGINEBAY_ISA" if "ENGINEBAY_ISA=" in str(error) else "make plugins"
    return Finding(name, ok=False, detail=str(error), needed_for="ort-cpu", fix=fix)


def cpu_kernels() -> Finding:
    """What the library's measurement chose, "not used" included; some milliseconds of arithmetic."""
    from enginebay.plugins.load import KernelLibrary

    try:
        library = KernelLibrary()
        chosen = {
            "int4": library.linear_kernels(format="i4", block_size=32, symmetric=False),
            "int8": library.linear_kernels(format="i8", block_size=128, symmetric=True),
        }
    except (OSError, ValueError, RuntimeError) as error:
        return _library_fault("CPU kernels", error)
    detail = "; ".join(f"{kind}: {words}" for kind, words in chosen.items())
    return Finding("CPU kernels", ok=True, detail=detail, needed_for="ort-cpu")


def triton_server() -> Finding:
    from enginebay.triton_repo.install import find_server

    try:
        found = find_server()
    except (OSError, ValueError, RuntimeError) as error:
        return Finding(
            "Triton server", ok=False, detail=str(error), needed_for="enginebay serve",
            fix="pip install 'enginebay[triton]', or use NVIDIA's container (docs/serving.md)",
        )  # fmt: skip
    return Finding("Triton server", ok=True, detail=str(found), needed_for="enginebay serve")


def memory() -> Finding:
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return Finding("memory", ok=True, detail=f"{pages * size / 2**30:.1f} GiB", needed_for="everything")


def cores() -> Finding:
    return Finding("cores", ok=True, detail=str(len(os.sched_getaffinity(0))), needed_for="everything")


def gpu() -> Finding:
    """The NVIDIA driver by its own library; devices by /proc, which needs no CUDA call."""
    devices = sorted(Path("/proc/driver/nvidia/gpus").glob("*"))
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        detail = "no NVIDIA driver (libcuda.so.1)" + (f", {len(devices)} devices" if devices else "")
        return Finding(
            "NVIDIA GPU", ok=False, detail=detail, needed_for="GPU targets", fix="not needed for ort-cpu"
        )
    return Finding(
        "NVIDIA GPU", bool(devices), f"{len(devices)} devices", "GPU targets", "no device is visible"
    )


PROBES: tuple[Callable[[], Finding], ...] = (
    python_version,
    cores,
    memory,
    compiler,
    plugin_library,
    cpu_kernels,
    lambda: package("numpy", "numpy", "everything", "pip install -c constraints.txt numpy"),
    lambda: package("onnxruntime", "onnxruntime", "ort-cpu", "pip install onnxruntime"),
    lambda: package("onnx", "onnx", "export, build", "pip install 'enginebay[build]'"),
    lambda: package("tokenizers", "tokenizers", "serving text", "pip install tokenizers"),
    triton_server,
    lambda: package("tritonclient", "tritonclient", "enginebay client", "pip install 'enginebay[triton]'"),
    lambda: package("torch", "torch", "enginebay verify, tests", "make venv"),
    lambda: package("transformers", "transformers", "enginebay verify, tests", "make venv"),
    gpu,
    lambda: package("tensorrt", "tensorrt", "target tensorrt", "NVIDIA's TensorRT; not needed for ort-cpu"),
)


def examine() -> list[Finding]:
    """Every probe's finding."""
    return [probe() for probe in PROBES]
