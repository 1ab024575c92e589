"""What the manifest says of each file, and how a file is compared with it."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

WHOLE_BYTES_MAX = 256 << 20  # files up to this size are hashed whole, in 0.2 to 0.5 s
_SAMPLES = 64
_SAMPLE_BYTES = 4096


@dataclass(frozen=True)
class FileRecord:
    """A file of the folder.

    `digest` is SHA-256 of the whole, so that any changed bit shows; or, where `sampled`, of the size and 64
    pieces of 4096 bytes, the first and the last bytes among them and the others evenly between: enough to
    tell a moved, cut, exchanged or partly copied sidecar without reading gigabytes, not to tell a changed bit
    between two pieces.
    """

    name: str
    size: int
    digest: str
    sampled: bool

    @staticmethod
    def of(path: Path, *, sampled: bool | None = None) -> FileRecord:
        """The record of the file at `path`; sampled where it is larger than WHOLE_BYTES_MAX, unless said."""
        size = path.stat().st_size
        chosen = size > WHOLE_BYTES_MAX if sampled is None else sampled
        return FileRecord(path.name, size, _digest(path, sampled=chosen), chosen)

    def difference(self, path: Path) -> str | None:
        """What tells the file at `path` from the one recorded, and what to do; None where nothing does."""
        if not path.is_file():
            return "not found, but manifest.json lists it; move an engine folder as a whole"
        size = path.stat().st_size
        if size != self.size:
            what = "cut short" if size < self.size else "too long"
            return f"{what}: manifest.json has {self.size} bytes, the file {size}; copy it again"
        if (digest := _digest(path, sampled=self.sampled)) != self.digest:
            return (
                f"not the file that was built: manifest.json has digest {self.digest[:12]}, the file "
                f"{digest[:12]}; copy it again"
            )
        return None


def _digest(path: Path, *, sampled: bool) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        if not sampled:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
            return digest.hexdigest()
        size = file.seek(0, os.SEEK_END)
        digest.update(size.to_bytes(8, "little"))
        last = max(0, size - _SAMPLE_BYTES)
        for index in range(_SAMPLES):
            file.seek(last * index // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
