"""What this process may use of the machine, containers included."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")  # version 2; where there is another, only the machine's own limits count


def usable_cpus() -> int:
    """Cores this process may run on: its affinity, cut to the container's CPU quota."""
    count = len(os.sched_getaffinity(0))
    fields = _read(_CGROUP / "cpu.max").split()
    if len(fields) == 2 and fields[0] != "max":
        count = min(count, math.ceil(int(fields[0]) / int(fields[1])))
    return max(1, count)


def available_memory() -> int:
    """Bytes that can still be taken without swapping, cut to what the container's limit leaves."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in _read(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    limit, used = _read(_CGROUP / "memory.max").strip(), _read(_CGROUP / "memory.current").strip()
    if limit.isdigit() and used.isdigit():
        available = min(available, max(0, int(limit) - int(used)))
    return available


def peak_rss() -> int:
    """Most bytes this process has held resident."""
    for line in _read(Path("/proc/self/status")).splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def reset_peak_rss() -> None:
    """Starts `peak_rss` anew. Where the system forbids that, the peak stays that of the whole process."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
