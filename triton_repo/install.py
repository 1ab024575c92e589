"""Finds a Triton server on this machine and what its Python backend needs to run under this interpreter."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

_STUB = "triton_python_backend_stub"
_CONTAINER = Path("/opt/tritonserver")


class ServerNotFoundError(RuntimeError):
    """No usable Triton server; the message says where it was looked for and how to get one."""


@dataclass(frozen=True)
class ServerInstall:
    """A Triton server: its binary and its backends.

    `stub` is the Python backend's worker for this interpreter where it lies apart from the backends, as in
    the `nvidia-pytriton` wheel; None where the backend folder is complete. `libraries` go on LD_LIBRARY_PATH.
    """

    binary: Path
    backends: Path
    stub: Path | None = None
    libraries: tuple[Path, ...] = ()

    def __str__(self) -> str:
        return str(self.binary)

    def backend_folder(self, scratch: Path) -> Path:
        """A backend folder to start the server with. Built of links under `scratch` where need be."""
        if self.stub is None:
            return self.backends
        folder = scratch / "backends"
        python = folder / "python"
        python.mkdir(parents=True)
        for item in (self.backends / "python").iterdir():
            if item.name not in (_STUB, "__pycache__"):
                (python / item.name).symlink_to(item)
        (python / _STUB).symlink_to(self.stub)
        return folder

    def environment(self) -> dict[str, str]:
        """The server's: ours, with its libraries, this interpreter's library and this virtual environment.

        The stub embeds Python and ignores PYTHONPATH; it takes the environment whose `python3` comes first
        on PATH.
        """
        environment = dict(os.environ)
        if self.stub is None:
            return environment
        libraries = [*map(str, self.libraries), sysconfig.get_config_var("LIBDIR") or ""]
        inherited = environment.get("LD_LIBRARY_PATH", "")
        environment["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, [*libraries, inherited]))
        scripts = str(Path(sys.prefix) / "bin")
        environment["PATH"] = os.pathsep.join(filter(None, [scripts, environment.get("PATH", "")]))
        return environment


def find_server(binary: Path | None = None) -> ServerInstall:
    """The server to use: `binary` if given, else `tritonserver` on PATH, else NVIDIA's container's,
    else the one in this environment's `nvidia-pytriton` wheel. ServerNotFoundError where there is none."""
    if binary is not None:
        if not os.access(binary, os.X_OK):
            raise ServerNotFoundError(f"{binary}: no such executable")
        return _beside(binary.resolve())
    found = shutil.which("tritonserver") or shutil.which(_CONTAINER / "bin" / "tritonserver")
    if found is not None:
        return _beside(Path(found).resolve())
    spec = importlib.util.find_spec("pytriton")
    if spec is None or spec.origin is None:
        raise ServerNotFoundError(
            f"no Triton server: none on PATH, none in {_CONTAINER}, and this environment has no "
            "nvidia-pytriton; install the extra: pip install 'enginebay[triton]', or serve in NVIDIA's "
            "container (docs/serving.md)"
        )
    return _in_wheel(Path(spec.origin).parent / "tritonserver")


def _beside(binary: Path) -> ServerInstall:
    """A server whose folder has the usual layout: bin/tritonserver, backends/python."""
    root = binary.parent.parent
    if (root / "python_backend_stubs").is_dir():
        return _in_wheel(root)
    if not (root / "backends" / "python" / _STUB).exists():
        raise ServerNotFoundError(
            f"{binary}: its Python backend {root / 'backends' / 'python' / _STUB} is missing; "
            "use a Triton build that has it"
        )
    return ServerInstall(binary, root / "backends")


def _in_wheel(root: Path) -> ServerInstall:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    binary = root / "bin" / "tritonserver"
    stub = root / "python_backend_stubs" / version / _STUB
    if not binary.exists():
        raise ServerNotFoundError(f"{binary}: not found; reinstall nvidia-pytriton")
    if not stub.exists():
        have = sorted(path.name for path in (root / "python_backend_stubs").glob("3.*"))
        raise ServerNotFoundError(
            f"nvidia-pytriton has no Python backend for Python {version}, only for {', '.join(have)}; "
            "use one of these"
        )
    if shutil.which("bash") is None:
        raise ServerNotFoundError(
            "Triton's Python backend starts its worker through bash, which is not on PATH"
        )
    library = Path(sysconfig.get_config_var("LIBDIR") or "") / f"libpython{version}.so.1.0"
    if not library.exists() and not Path(f"/usr/lib/{_triplet()}/{library.name}").exists():
        raise ServerNotFoundError(
            f"{library}: not found; Triton's Python backend needs an interpreter built with --enable-shared "
            f"(Debian, Ubuntu: apt-get install libpython{version})"
        )
    return ServerInstall(binary, root / "backends", stub, (root.parent.parent / "nvidia_pytriton.libs",))


def _triplet() -> str:
    return str(sysconfig.get_config_var("MULTIARCH") or "x86_64-linux-gnu")
