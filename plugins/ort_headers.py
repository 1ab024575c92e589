"""Where the ONNX Runtime C++ headers are: they are not in its Python wheel, yet the adapter needs them.

Any ONNX Runtime from 1.17 on will do: the C API only grows, and the adapter asks the runtime for no more than
the version it was compiled against.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

HEADER = "onnxruntime_cxx_api.h"
ENVIRONMENT = "ENGINEBAY_ORT_INCLUDE"
SYSTEM_DIRECTORIES = (Path("/usr/include/onnxruntime"), Path("/usr/local/include/onnxruntime"))
PACKAGE = "libonnxruntime-dev"
# The first Debian release that ships the package; headers of a newer release serve an older system.
RELEASE = "trixie"
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
APT = Path("/etc/apt")
FETCH_TIMEOUT = 120  # seconds per apt command


class HeadersNotFoundError(RuntimeError):
    """No way led to the headers; the message lists each way and why it failed."""


def find(
    cache: Path,
    *,
    environment: Mapping[str, str] = os.environ,
    system: Iterable[Path] = SYSTEM_DIRECTORIES,
    apt: Path = APT,
) -> Path:
    """The directory that holds `onnxruntime_cxx_api.h`.

    Tried in order: `ENGINEBAY_ORT_INCLUDE`, the system's include directories, what an earlier call fetched
    into `cache`, and Debian's `libonnxruntime-dev`, unpacked (not installed) into `cache`.
    A set but wrong `ENGINEBAY_ORT_INCLUDE` is an error of its own: a wish is never quietly overruled.
    """
    if wish := environment.get(ENVIRONMENT):
        if (Path(wish) / HEADER).is_file():
            return Path(wish)
        raise HeadersNotFoundError(f"{ENVIRONMENT}={wish} holds no {HEADER}; correct it or unset it")
    tried = [f"{ENVIRONMENT}: not set"]
    for directory in system:
        if (directory / HEADER).is_file():
            return directory
        tried.append(f"{directory}: no {HEADER}")
    fetched = cache / "usr" / "include" / "onnxruntime"
    if (fetched / HEADER).is_file():
        return fetched
    try:
        _fetch(cache, apt)
    except HeadersNotFoundError as error:
        tried.append(f"{PACKAGE} of Debian {RELEASE}: {error}")
    else:
        if (fetched / HEADER).is_file():
            return fetched
        tried.append(f"{PACKAGE} of Debian {RELEASE}: unpacked, but it has no {fetched / HEADER}")
    ways = "\n".join(f"  - {way}" for way in tried)
    raise HeadersNotFoundError(
        f"the ONNX Runtime C++ headers were not found. Tried:\n{ways}\n"
        f"Install {PACKAGE}, or unpack the headers of any ONNX Runtime release from 1.17 on and set "
        f"{ENVIRONMENT} to the directory that holds {HEADER}."
    )


def debian_mirror(apt: Path = APT) -> str | None:
    """URI of the Debian archive among this system's own apt sources; None where it has none."""
    sources = [*sorted(apt.glob("sources.list.d/*.sources")), apt / "sources.list"]
    sources += sorted(apt.glob("sources.list.d/*.list"))
    for source in sources:
        if not source.is_file():
            continue
        for line in source.read_text(errors="replace").splitlines():
            found = re.match(r"(?:URIs:|deb\s+(?:\[[^]]*\]\s+)?)\s*(\S+)", line)
            if found and re.fullmatch(r"\w+(?:\+\w+)?://.+/debian/?", found[1]):
                return found[1]
    return None


def _fetch(cache: Path, apt: Path) -> None:
    """Unpack the package into `cache`, with lists and state of our own: the system's apt stays as it is."""
    for tool in ("apt-get", "dpkg"):
        if shutil.which(tool) is None:
            raise HeadersNotFoundError(f"{tool} is not on this system")
    mirror = debian_mirror(apt)
    if mirror is None:
        raise HeadersNotFoundError(f"no Debian archive among the sources of {apt}")
    root = cache.resolve() / "apt"
    shutil.rmtree(root, ignore_errors=True)
    for directory in ("lists/partial", "archives/partial", "download"):
        (root / directory).mkdir(parents=True)
    (root / "status").touch()
    (root / "sources.list").write_text(f"deb [signed-by={KEYRING}] {mirror} {RELEASE} main\n")
    options = {
        "Dir::Etc::SourceList": root / "sources.list",
        "Dir::Etc::SourceParts": "/dev/null",
        "Dir::State": root,
        "Dir::State::Lists": root / "lists",
        "Dir::State::Status": root / "status",
        "Dir::Cache": root,
        "Dir::Cache::Archives": root / "archives",
        "APT::Sandbox::User": "",
    }
    flags = [part for key, value in options.items() for part in ("-o", f"{key}={value}")]
    _call(["apt-get", *flags, "-qq", "update"], root)
    _call(["apt-get", *flags, "-qq", "download", PACKAGE], root / "download")
    packages = list((root / "download").glob("*.deb"))
    if len(packages) != 1:
        raise HeadersNotFoundError(f"apt-get download left {len(packages)} packages, expected 1")
    _call(["dpkg", "-x", str(packages[0]), str(cache.resolve())], root)
    shutil.rmtree(root)


def _call(command: list[str], directory: Path) -> None:
    try:
        done = subprocess.run(
            command, cwd=directory, capture_output=True, text=True, timeout=FETCH_TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise HeadersNotFoundError(f"{command[0]} took longer than {FETCH_TIMEOUT} s") from error
    if done.returncode != 0:
        raise HeadersNotFoundError(
            f"{command[0]} failed with status {done.returncode}: {done.stderr.strip()[-500:]}"
        )
