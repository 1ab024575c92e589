"""Output folders that appear whole or not at all, and never in place of what they are made from."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SWAPS_MAX = 100
_AT_FDCWD, _EXCHANGE = -100, 2  # of linux/fcntl.h and linux/fs.h


def obstacle(out: Path, source: Path) -> str | None:
    """Why `out` must never be replaced by what is made from folder `source`, and what to do; None where it
    may be.

    A folder that holds the source, a file the source links to, or the current folder is no output.
    """
    if out.is_symlink():
        return f"{out} is a link to {os.readlink(out)}: name the folder itself"
    if out.exists() and not out.is_dir():
        return f"{out} is not a folder: choose another place"
    place = out.resolve()
    files = [path for path in source.iterdir() if path.is_file()] if source.is_dir() else []
    for path in (source, *files):
        read = path.resolve()
        if read.is_relative_to(place):
            what = "is" if read == place else "holds"
            return f"{out} {what} {read}, which is read to make it: choose another folder"
    if Path.cwd().is_relative_to(place):
        return f"{out} is the current folder or holds it: name a folder to make"
    return None


@contextmanager
def staged(out: Path, work: Path | None = None) -> Iterator[Path]:
    """A folder to write into, below `work` (where None: beside `out`): it takes `out`'s place when the block
    succeeds and is gone when it fails.

    What stood at `out` stays until then. OSError naming `out` where the disk is full or other runs keep
    putting theirs there.
    """
    with scratch_folder(work or out.parent, f".{out.name}.partial-") as scratch:
        new = scratch / "new"
        new.mkdir()
        try:
            yield new
        except OSError as error:
            if error.errno is None or error.filename is not None:
                raise
            # What fails on an open file, as a full disk does, knows no name.
            raise OSError(error.errno, error.strerror, str(out)) from error
        for attempt in range(SWAPS_MAX):
            if _swap(new, out, scratch / f"retired{attempt}"):
                return
        raise OSError(errno.EEXIST, "other runs keep writing there; choose another place", str(out))


def _swap(new: Path, out: Path, retired: Path) -> bool:
    """Puts `new` at `out` and what stood there at `retired`; False where another run came between.

    In one step where the file system can: nobody ever finds nothing at `out`, kill -9 or not."""
    if _exchange(new, out):
        return True
    try:
        with suppress(FileNotFoundError):
            out.rename(retired)
        new.rename(out)
    except BaseException as error:
        if retired.exists() and not out.exists():
            retired.rename(out)
        if isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise
    return True


def _exchange(one: Path, other: Path) -> bool:
    """Whether both were there and changed places (renameat2(2), RENAME_EXCHANGE)."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)  # None: a C library before glibc 2.28
    return rename is not None and rename(_AT_FDCWD, bytes(one), _AT_FDCWD, bytes(other), _EXCHANGE) == 0


@contextmanager
def scratch_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """A new folder `prefix`* below `parent`, gone after the block; so are those of runs that were killed.

    A folder is locked while its run lives: the kernel lets go of the lock whatever ends the process.
    """
    parent.mkdir(parents=True, exist_ok=True)
    _sweep(parent, prefix)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        lock = _lock(folder)
        if lock is not None or folder.exists():  # some file systems have no locks; nothing is swept there
            break
    try:
        yield folder
    finally:
        try:
            shutil.rmtree(folder)
        finally:
            if lock is not None:
                os.close(lock)


def _sweep(parent: Path, prefix: str) -> None:
    made_here = re.compile(re.escape(prefix) + "[a-z0-9_]{8}")  # as mkdtemp names them
    for path in parent.iterdir():
        if made_here.fullmatch(path.name) and (lock := _lock(path)) is not None:
            shutil.rmtree(path, ignore_errors=True)  # another's leavings: not being able to is no failure
            os.close(lock)


def _lock(folder: Path) -> int | None:
    """A descriptor that holds `folder`'s lock; None where another has it or the folder is gone."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(handle), os.stat(folder)):
            return handle
    except OSError:
        pass  # held by another, removed meanwhile, or a file system without locks
    os.close(handle)
    return None
