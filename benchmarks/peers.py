"""EngineBay beside its peers on this machine, in one run: `make bench`.

Peers run in environments of their own, since their pins differ from ours. This makes them, a folder each for
ONNX Runtime GenAI, transformers and llama.cpp (compiled for this machine), and for vLLM's CPU build:
    make peers
A peer that is not installed is reported as not run, one that stops early with its last words; the others'
rows stay. Rounds alternate between engines, since a machine's speed drifts: each figure is the best of its
rounds, and ratios compare those, to the best peer of each column at each batch. `--quick` checks that
everything runs; its figures mean little.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LOGS = ROOT / "build" / "peers"
OURS = "enginebay int4"
FIGURES = ("prefill_tok_s", "decode_tok_s")
FULL = {"batch": "1,8,16", "prompt": 128, "new": 64, "rounds": 3, "repeats": 3}
QUICK = {"batch": "1,8", "prompt": 32, "new": 8, "rounds": 1, "repeats": 1}

Row = dict[str, Any]
Key = tuple[str, int]


@dataclass(frozen=True)
class Peer:
    """A script in benchmarks/peers that prints rows, the module it needs and the environment that has it."""

    module: str
    script: str
    environment: str = ".venv-peers"

    @property
    def python(self) -> Path:
        return ROOT / self.environment / "bin" / "python"


PEERS = {
    "ort-genai": Peer("onnxruntime_genai", "ort_genai.py"),
    "llama.cpp": Peer("llama_cpp", "llamacpp.py"),
    "vllm": Peer("vllm", "vllm_cpu.py", ".venv-peers-vllm"),
    "transformers": Peer("transformers", "hf_transformers.py"),
}


def why_absent(peer: Peer) -> str | None:
    """Why the peer cannot be started; None where its module is installed."""
    if not peer.python.exists():
        return f"there is no {peer.environment}; `make peers` makes it"
    probe = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({peer.module!r}) is None)"
    if subprocess.run([str(peer.python), "-c", probe], check=False).returncode:
        return f"{peer.environment} has no {peer.module}; `make peers` installs it"
    return None


def rows_of_lines(text: str) -> list[Row]:
    """The JSON objects among the lines of a peer's output; libraries print lines of their own."""
    return [json.loads(line) for line in text.splitlines() if line.startswith('{"engine"')]


def rows_of_ours(text: str) -> list[Row]:
    return [{"engine": OURS, **row} for row in json.loads(text)] if text.strip() else []


def run_engine(
    command: Sequence[str], log: Path, seconds: float, read: Callable[[str], list[Row]]
) -> tuple[list[Row], str | None]:
    """Runs a measuring command, its standard error into `log`. Its rows, and why it stopped early or None.

    Rows that it printed before it stopped are kept. After `seconds` it is killed with its children.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w+", encoding="utf-8", errors="replace") as stderr:
        child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stderr, text=True, cwd=ROOT, start_new_session=True
        )
        end = ""
        try:
            text, _ = child.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            text, _ = child.communicate()
            end = f"killed after {seconds:g} s"
        except BaseException:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            raise
        if not end and child.returncode:
            end = how_it_ended(child.returncode)
        stderr.seek(0)
        last = [line.strip() for line in stderr if line.strip()][-3:]
    return read(text), f"{end}; {log} ends: {' / '.join(last)}" if end else None


def how_it_ended(status: int) -> str:
    return f"ended by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"


def best(rows: list[Row]) -> dict[Key, Row]:
    """The best of each figure over the rounds, by engine and batch."""
    table: dict[Key, Row] = {}
    for row in rows:
        held = table.setdefault((row["engine"], row["batch"]), dict(row))
        for figure in FIGURES:
            held[figure] = max(held[figure], row[figure])
        held["step_ms_p50"] = min(held["step_ms_p50"], row["step_ms_p50"])
    return table


def with_ratios(table: dict[Key, Row]) -> list[Row]:
    """Rows by batch, ours first, then the peers as they were run.

    Each row also gets `<figure>_ratio`: the figure over the best peer's at that batch; None without a peer.
    """
    order = list(dict.fromkeys(engine for engine, _ in table))
    rows = []
    for (engine, batch), row in sorted(
        table.items(), key=lambda item: (item[0][1], item[0][0] != OURS, order.index(item[0][0]))
    ):
        peers = [other for (name, at), other in table.items() if at == batch and name != OURS]
        ratios = {
            f"{figure}_ratio": row[figure] / max(peer[figure] for peer in peers) if peers else None
            for figure in FIGURES
        }
        rows.append({**row, "engine": engine, "batch": batch, **ratios})
    return rows


def markdown(rows: list[Row]) -> list[str]:
    """The table's lines, in Markdown; ratios to the best peer of the column at that batch."""
    head = [
        "engine",
        "batch",
        "prefill tok/s",
        "to the best peer",
        "decode tok/s",
        "to the best peer",
        "step ms",
    ]
    lines = [head]
    for row in rows:
        cells = [row["engine"], str(row["batch"])]
        for figure in FIGURES:
            ratio = row[f"{figure}_ratio"]
            cells += [f"{row[figure]:.0f}", "" if ratio is None else f"{ratio:.2f}×"]
        lines.append([*cells, f"{row['step_ms_p50']:.2f}"])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    return [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"
        for cells in lines
    ]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=ROOT / "build/quickstart/model")
    parser.add_argument("--engine", type=Path, default=ROOT / "build/quickstart/engine")
    parser.add_argument("--batch", help=f"sequences, comma separated (default {FULL['batch']})")
    parser.add_argument("--prompt", type=int, help=f"tokens in (default {FULL['prompt']})")
    parser.add_argument("--new", type=int, help=f"tokens out (default {FULL['new']})")
    parser.add_argument("--rounds", type=int, help=f"turns of every engine (default {FULL['rounds']})")
    parser.add_argument("--repeats", type=int, help=f"a peer's runs in a turn (default {FULL['repeats']})")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=900, help="limit of an engine's turn (default 900)")
    parser.add_argument("--quick", action="store_true", help="one short round as a check")
    parser.add_argument("--skip", action="append", default=[], choices=PEERS, help="a peer not to run")
    parser.add_argument("--json", action="store_true", help="a JSON object for each row instead of the table")
    args = parser.parse_args()
    for name, value in (QUICK if args.quick else FULL).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    for folder in (args.model, args.engine):
        if not folder.is_dir():
            parser.error(
                f"{folder} does not exist: run `make quickstart` first, or name --model and --engine"
            )
    args.model, args.engine = args.model.resolve(), args.engine.resolve()
    return args


def stop(number: int, _: object) -> None:
    """A signal's handler: raises, so that the engine that is running is killed on the way out."""
    raise SystemExit(128 + number)


def main() -> int:
    args = arguments()
    signal.signal(signal.SIGTERM, stop)
    shape = ["--batch", args.batch, "--prompt", str(args.prompt), "--new", str(args.new)]
    shape += ["--threads", str(args.threads)]
    ours = [sys.executable, "-m", "enginebay.cli.main", "bench", str(args.engine), "--json", *shape]
    turns = {"enginebay": (ours, rows_of_ours)}
    notes = {}
    for name, peer in PEERS.items():
        script = ROOT / "benchmarks" / "peers" / peer.script
        absent = "left out by --skip" if name in args.skip else why_absent(peer)
        if absent:
            notes[name] = f"not run: {absent}"
            continue
        command = [str(peer.python), str(script), str(args.model), *shape, "--repeats", str(args.repeats)]
        turns[name] = (command, rows_of_lines)
    rows: list[Row] = []
    failed = False
    for turn in range(args.rounds):
        for name, (command, read) in list(turns.items()):
            print(f"round {turn + 1} of {args.rounds}: {name}", file=sys.stderr)
            found, stopped = run_engine(command, LOGS / f"{name}.log", args.seconds, read)
            rows += found
            if stopped:
                failed = True
                notes[name] = f"stopped early in round {turn + 1}, its rows are what came before: {stopped}"
                del turns[name]
    report = with_ratios(best(rows))
    lines = [json.dumps(row) for row in report] if args.json else markdown(report)
    print("\n".join(lines))
    for name, note in notes.items():
        print(f"{name}: {note}", file=sys.stderr if args.json else sys.stdout)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
