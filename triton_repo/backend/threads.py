"""Names for the operating system's threads, so that `top -H` and the benchmark can tell them apart."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

ENGINE_THREADS = "eb-engine"  # the loop's and ONNX Runtime's; 15 characters at most
_COMM = Path("/proc/thread-self/comm")


def name_thread(name: str) -> None:
    """Names the calling thread. Threads that it starts inherit the name."""
    with contextlib.suppress(OSError):  # a sandbox may forbid it, and it is for eyes only
        _COMM.write_text(name)


@contextlib.contextmanager
def started_threads_named(name: str) -> Iterator[None]:
    """Threads started inside get `name`, in whatever library."""
    try:
        own = _COMM.read_text().strip()
    except OSError:
        own = "python"
    name_thread(name)
    try:
        yield
    finally:
        name_thread(own)
