"""Scratch folders of servers, and the sweeping up after those that were killed.

Every server has a folder and beside it a lock file that its processes inherit open and locked. While any
of them lives the lock is held; once it is free, the folder and the shared memory named after it belong to
nobody.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

_PLAIN = re.compile(r"[A-Za-z0-9/._+-]+")
_FALLBACK = "/tmp"  # noqa: S108 (of a folder of this user's, checked to be that)
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 (where POSIX shared memory lives)


@dataclass(frozen=True)
class Scratch:
    """A server's folder. `lock` is an open file descriptor to hand to its processes."""

    folder: Path
    lock: int

    @property
    def shared_memory_prefix(self) -> str:
        """What the names of the server's shared memory regions must start with."""
        return _prefix(self.folder)

    @staticmethod
    def create() -> Scratch:
        """A new folder. Sweeps up what killed servers left."""
        base = _base()
        sweep(base)
        while True:
            folder = base / secrets.token_hex(6)
            path = _lock_path(folder)
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if path.exists():  # or a sweep of another process got in between
                folder.mkdir()
                return Scratch(folder, lock)
            os.close(lock)

    def release(self, timeout: float = 5.0) -> None:
        """Lets go of the lock and removes the folder as soon as no process of the server is left."""
        os.close(self.lock)
        deadline = time.monotonic() + timeout
        while True:
            sweep(self.folder.parent)
            if not _lock_path(self.folder).exists() or time.monotonic() > deadline:
                return
            time.sleep(0.02)


def sweep(base: Path) -> None:
    """Removes what belongs to the locks under `base` that nobody holds, and at last the locks."""
    for path in base.glob("*.lock"):
        try:
            lock = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # swept by another process
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue  # in use
        else:
            folder = path.with_suffix("")
            for region in _SHARED_MEMORY.glob(_prefix(folder) + "*"):
                region.unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                path.unlink(missing_ok=True)
        finally:
            os.close(lock)


def _lock_path(folder: Path) -> Path:
    return folder.with_suffix(".lock")


def _prefix(folder: Path) -> str:
    return f"enginebay_{folder.name}_"


def _base() -> Path:
    """This user's folder; refused where another user made it.

    In /tmp where TMPDIR has characters that Triton's Python backend cannot handle: it hands paths under the
    folder to a shell unquoted, and its interpreter knows no others than ASCII.
    """
    temporary = tempfile.gettempdir()
    base = Path(temporary if _PLAIN.fullmatch(temporary) else _FALLBACK) / f"enginebay-{os.getuid()}"
    base.mkdir(mode=0o700, exist_ok=True)
    if base.is_symlink() or base.stat().st_uid != os.getuid():
        raise PermissionError(f"{base}: belongs to another user; remove it or set TMPDIR")
    return base
