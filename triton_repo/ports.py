"""TCP ports: free ones, and who holds the others."""

from __future__ import annotations

import os
import socket
from pathlib import Path

_MOST = 65535
_LISTEN = "0A"  # of /proc/net/tcp


class PortBusyError(RuntimeError):
    """A wanted port is taken; the message names it and its holder."""


def check_range(port: int, purpose: str, option: str) -> None:
    """ValueError where there is no such port; it names `option`."""
    if not 0 <= port <= _MOST:
        raise ValueError(
            f"{purpose} port {port} is out of range; {option} takes 0 to {_MOST} (0 takes a free one)"
        )


def free_ports(address: str, count: int) -> list[int]:
    """`count` different ports that nobody listens on at the moment."""
    sockets = []
    try:
        for _ in range(count):
            sockets.append(_bound(address, 0))
        return [int(held.getsockname()[1]) for held in sockets]
    finally:
        for held in sockets:
            held.close()


def check_free(address: str, port: int, purpose: str, option: str) -> None:
    """PortBusyError if `port` cannot be listened on; it names `option`, which chooses another."""
    try:
        _bound(address, port).close()
    except OSError as error:
        raise PortBusyError(
            f"{purpose} port {port} of {address}: {error.strerror}{_held_by(port)}; "
            f"stop it, or choose another port with {option} (0 takes a free one)"
        ) from error


def _bound(address: str, port: int) -> socket.socket:
    held = socket.socket()
    try:
        # As servers do: connections of an earlier server that linger are no obstacle.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((address, port))
        held.listen(1)
    except OSError:
        held.close()
        raise
    return held


def _held_by(port: int) -> str:
    """ ", by process 12 (name)" where /proc tells; another user's processes may be hidden."""
    sockets = set()
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        for line in _lines(table)[1:]:
            fields = line.split()
            if fields[3] == _LISTEN and int(fields[1].rsplit(":", 1)[1], 16) == port:
                sockets.add(f"socket:[{fields[9]}]")
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(os.readlink(entry) in sockets for entry in (process / "fd").iterdir()):
                return f", held by process {process.name} ({(process / 'comm').read_text().strip()})"
        except OSError:  # gone, or not ours to look into
            continue
    return ""


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return [""]
