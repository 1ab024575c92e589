"""How commands end: by a signal, by a fault of EngineBay's own, by Ctrl-C in the middle of a line."""

from __future__ import annotations

import argparse
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from enginebay.cli import main as cli
from enginebay.cli.commands import doctor, generate
from enginebay.cli.sample_model import save_weights

# Stops an export or a build in the middle of its weights, by a signal to itself.
HALF_WAY = """
import os, sys
from enginebay.builder import build
from enginebay.cli.main import main
from enginebay.export import exporter

def stop(*_):
    os.kill(os.getpid(), int(sys.argv[1]))
    while True: pass

exporter.write_sidecar = build.SidecarWriter.write = stop
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)]
)
@pytest.mark.parametrize("command", ["export", "build"])
def test_a_signal_leaves_nothing_behind(
    model: Path, exported: Path, tmp_path: Path, command: str, number: signal.Signals, status: int
) -> None:
    source = model if command == "export" else exported
    arguments = [str(int(number)), command, str(source), str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "-c", HALF_WAY, *arguments], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_handlers_are_as_they_were_and_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with cli.unwinding_at_signals():
            os.kill(os.getpid(), signal.SIGHUP)
            with pytest.raises(cli.Ended, match="SIGTERM"):
                os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_thread_runs_commands_too() -> None:
    statuses: list[int] = []
    thread = threading.Thread(target=lambda: statuses.append(cli.main(["inspect", "nowhere"])))
    thread.start()
    thread.join()
    assert statuses == [1]


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (TypeError("unhashable"), 70, "internal error: TypeError: unhashable (please report; --debug shows"),
        (ZeroDivisionError(), 70, "internal error: ZeroDivisionError"),
        (OverflowError("too big"), 70, "internal error: OverflowError: too big"),
        (MemoryError(), 1, "not enough memory"),
        (RecursionError("deep"), 1, "deep"),
    ],
)
def test_no_error_reaches_users_as_a_traceback_unless_they_ask(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    status: int,
    words: str,
) -> None:
    def fault(_args: argparse.Namespace) -> int:
        raise error

    monkeypatch.setattr(doctor, "run", fault)
    assert cli.main(["doctor"]) == status
    assert words in capsys.readouterr().err
    with pytest.raises(type(error)):
        cli.main(["--debug", "doctor"])


class Interrupted:
    """An LLM that gives one piece of text and is then interrupted."""

    tokenizer = SimpleNamespace(has_chat_template=False, encode=lambda text: (1, 2))

    def __enter__(self) -> Interrupted:
        return self

    def __exit__(self, *_: object) -> None: ...

    def generate(self, *_: object) -> Iterator[Any]:
        yield SimpleNamespace(token_ids=(5,), text="The capital", finish_reason=None)
        raise KeyboardInterrupt


def test_ctrl_c_ends_the_line_of_the_answer(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    load: Callable[..., Interrupted] = lambda *_, **__: Interrupted()  # noqa: E731
    monkeypatch.setattr(generate, "LLM", SimpleNamespace(load=load))
    assert cli.main(["generate", "engine", "hello"]) == 130
    shown = capfd.readouterr()
    assert shown.out == "The capital\n"
    assert shown.err == "enginebay: interrupted\n"


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o027, 0o640)])
def test_the_sample_model_is_readable_as_the_umask_says(tmp_path: Path, mask: int, mode: int) -> None:
    before = os.umask(mask)
    try:
        save_weights({"a": np.zeros(3, np.float16)}, tmp_path / "model.safetensors")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "model.safetensors").stat().st_mode) == mode
