"""How the worker process hears from whoever started the server, and how it notices that the server died."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

# The server's environment names a folder. A file `drain` in it asks the models to take no more requests and
# to give up those in flight after the seconds that it holds; they answer with `drained` when nothing is in
# flight. Without the variable nobody asks.
ENVIRONMENT = "ENGINEBAY_CONTROL"
DRAIN = "drain"
DRAINED = "drained"

_POLL = 0.25


class Control:
    """Watches from a thread of its own: calls `drain` once when asked to, with the seconds it may take.

    Ends this process when its parent, the server, is gone: the backend's own worker would wait for ever.
    """

    def __init__(self, drain: Callable[[float], None]) -> None:
        folder = os.environ.get(ENVIRONMENT)
        self._folder = Path(folder) if folder else None
        self._drain = drain
        self._parent = os.getppid()
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="enginebay-control", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        asked = False
        while not self._closed.wait(_POLL):
            if os.getppid() != self._parent:
                os._exit(1)
            if not asked and self._folder is not None and (self._folder / DRAIN).exists():
                asked = True
                threading.Thread(target=self._obey, args=(self._folder,), daemon=True).start()

    def _obey(self, folder: Path) -> None:
        self._drain(float((folder / DRAIN).read_text()))
        (folder / DRAINED).touch()
