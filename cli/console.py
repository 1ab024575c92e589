"""What commands print: progress and words on standard error, results on standard output."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def package_version() -> str:
    """The installed version of EngineBay."""
    return importlib.metadata.version("enginebay")


def say(message: str) -> None:
    """A line for the person who watches."""
    print(f"\r\x1b[K{message}" if sys.stderr.isatty() else message, file=sys.stderr, flush=True)


def fail(message: str, *, status: int = 1) -> int:
    """Print the reason on standard error; returns the exit status."""
    say(f"enginebay: {message}")
    return status


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    print(json.dumps(value, indent=2, allow_nan=False))


@contextmanager
def progress(label: str, unit: str = "B") -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal, nothing elsewhere. Yields `report(done, total)`, counts of `unit`."""
    from tqdm import tqdm

    with tqdm(desc=label, unit=unit, unit_scale=True, disable=not sys.stderr.isatty(), leave=False) as bar:

        def report(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield report


@contextmanager
def status_line() -> Iterator[Callable[[str], None]]:
    """Yields `report(words)`: one line overwritten in place on a terminal, each change a line elsewhere.

    Elsewhere a trailing count of seconds is left out, so that waiting prints one line.
    """
    last = ""
    terminal = sys.stderr.isatty()

    def report(words: str) -> None:
        nonlocal last
        shown = words if terminal else words.partition(",")[0]
        if shown != last:
            print(f"\r\x1b[K{shown}" if terminal else shown, end="" if terminal else "\n", file=sys.stderr)
            sys.stderr.flush()
            last = shown

    yield report
