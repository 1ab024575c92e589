"""The table of `benchmarks/peers.py`: what is compared with what, and what becomes of a peer that fails."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def script(path: str) -> ModuleType:
    """A script of benchmarks/ as a module; the folder is no package."""
    name = f"benchmark_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


peers = script("peers.py")
common = script("peers/common.py")


def row(engine: str, batch: int, prefill: float, decode: float, step: float = 1.0) -> dict[str, Any]:
    return {
        "engine": engine,
        "batch": batch,
        "prefill_tok_s": prefill,
        "decode_tok_s": decode,
        "step_ms_p50": step,
    }


def printing(*rows: dict[str, Any], then: str = "") -> list[str]:
    """A command that prints rows between lines of other things, then runs `then`."""
    lines = ["loading {", *map(json.dumps, rows), '{"other": 1}']
    return [sys.executable, "-c", f"import os, sys, time\nprint({chr(10).join(lines)!r}, flush=True)\n{then}"]


def test_each_figure_is_the_best_of_the_rounds() -> None:
    table = peers.best([row("a", 1, 10, 5, 3.0), row("a", 1, 8, 6, 2.0), row("a", 8, 1, 1)])
    assert table["a", 1] == row("a", 1, 10, 6, 2.0)
    assert table["a", 8] == row("a", 8, 1, 1)


def test_ratios_are_to_the_best_peer_of_each_column_at_each_batch() -> None:
    rows = [
        row("slow", 1, 50, 8),
        row("fast", 1, 20, 10),
        row(peers.OURS, 1, 100, 15),
        row("fast", 8, 30, 40),
    ]
    found = {(r["engine"], r["batch"]): r for r in peers.with_ratios(peers.best(rows))}
    ours = found[peers.OURS, 1]
    assert (ours["prefill_tok_s_ratio"], ours["decode_tok_s_ratio"]) == (2.0, 1.5)
    slow = found["slow", 1]
    assert (slow["prefill_tok_s_ratio"], slow["decode_tok_s_ratio"]) == (1.0, 0.8)
    assert found["fast", 8]["decode_tok_s_ratio"] == 1.0


def test_rows_stand_by_batch_with_ours_first() -> None:
    rows = [row("z", 8, 1, 1), row("z", 1, 1, 1), row("a", 1, 1, 1), row(peers.OURS, 1, 1, 1)]
    order = [(r["batch"], r["engine"]) for r in peers.with_ratios(peers.best(rows))]
    assert order == [(1, peers.OURS), (1, "z"), (1, "a"), (8, "z")]


def test_without_peers_there_is_no_ratio() -> None:
    (only,) = peers.with_ratios(peers.best([row(peers.OURS, 1, 100, 15)]))
    assert only["prefill_tok_s_ratio"] is None
    head, rule, line = peers.markdown([only])
    assert [len(head)] * 2 == [len(rule), len(line)]
    assert "×" not in line


def test_the_table_names_ratio_beside_its_figure() -> None:
    lines = peers.markdown(peers.with_ratios(peers.best([row(peers.OURS, 1, 90, 15), row("a", 1, 30, 10)])))
    cells = [cell.strip() for cell in lines[2].strip("|").split("|")]
    assert cells == [peers.OURS, "1", "90", "3.00×", "15", "1.50×", "1.00"]


def test_a_peer_that_dies_keeps_its_rows_and_its_last_words(tmp_path: Path) -> None:
    command = printing(
        row("a", 1, 2, 3),
        then="print('no such instruction', file=sys.stderr); sys.stderr.flush(); os.abort()",
    )
    rows, stopped = peers.run_engine(command, tmp_path / "log", 60, peers.rows_of_lines)
    assert rows == [row("a", 1, 2, 3)]
    assert "SIGABRT" in stopped
    assert "no such instruction" in stopped


def test_an_exit_status_is_reported(tmp_path: Path) -> None:
    rows, stopped = peers.run_engine(printing(then="sys.exit(3)"), tmp_path / "log", 60, peers.rows_of_lines)
    assert rows == []
    assert stopped.startswith("exit status 3")


def test_a_peer_that_hangs_is_killed_and_reported(tmp_path: Path) -> None:
    began = time.monotonic()
    command = printing(row("a", 1, 2, 3), then="time.sleep(100)")
    rows, stopped = peers.run_engine(command, tmp_path / "log", 2, peers.rows_of_lines)
    assert time.monotonic() - began < 60
    assert stopped.startswith("killed after 2 s")
    assert rows == [row("a", 1, 2, 3)]


def test_the_running_engine_does_not_outlive_the_benchmark(tmp_path: Path) -> None:
    pid = tmp_path / "pid"

    def signal_once_it_runs() -> None:
        while not (pid.exists() and pid.read_text()):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, peers.stop)
    then = f"open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(100)"
    try:
        threading.Thread(target=signal_once_it_runs, daemon=True).start()
        with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)):
            peers.run_engine(printing(then=then), tmp_path / "log", 60, peers.rows_of_lines)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not Path(f"/proc/{pid.read_text()}").exists()


def test_one_that_ends_well_is_not_reported(tmp_path: Path) -> None:
    rows, stopped = peers.run_engine(printing(row("a", 1, 2, 3)), tmp_path / "log", 60, peers.rows_of_lines)
    assert (rows, stopped) == ([row("a", 1, 2, 3)], None)


def test_an_absent_peer_says_what_is_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "ROOT", tmp_path)
    peer = peers.Peer("no_such_module", "x.py", ".venv-x")
    assert "there is no .venv-x" in peers.why_absent(peer)
    (tmp_path / ".venv-x/bin").mkdir(parents=True)
    (tmp_path / ".venv-x/bin/python").symlink_to(sys.executable)
    assert ".venv-x has no no_such_module" in peers.why_absent(peer)
    assert peers.why_absent(peers.Peer("json", "x.py", ".venv-x")) is None


def measured(capsys: pytest.CaptureFixture[str], steps: Any, new: int) -> dict[str, Any]:
    args = common.argparse.Namespace(batch=[4], prompt=100, new=new, repeats=2)
    common.measure("a", args, steps)
    return dict(json.loads(capsys.readouterr().out))


def test_measure_counts_the_tokens_of_all_rows(capsys: pytest.CaptureFixture[str]) -> None:
    def start(batch: int) -> Any:
        time.sleep(0.2)  # not timed
        return (time.sleep(0.05 if step == 0 else 0.01) for step in range(3))

    found = measured(capsys, start, 3)
    assert 4 * 100 / 0.2 < found["prefill_tok_s"] <= 4 * 100 / 0.05
    assert 4 * 2 / 0.2 < found["decode_tok_s"] <= 4 * 2 / 0.02
    assert found["step_ms_p50"] >= 10


def test_a_peer_that_takes_too_few_steps_is_no_measurement(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match="took 2 steps for 3 tokens"):
        measured(capsys, lambda batch: iter(range(2)), 3)
