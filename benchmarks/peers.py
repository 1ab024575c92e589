"""EngineBay beside its peers on this machine, in one run: `make bench`.

Peers run in an environment of their own (their pins differ from ours):
    python3.11 -m venv .venv-peers
    .venv-peers/bin/pip install torch==2.13.0 transformers==5.24.0 onnxruntime-genai==0.18.0 onnx onnx-ir
One that is not installed there is reported as not run. Rounds alternate between engines, since the machine's
speed drifts; each figure is the best of its rounds and the ratios compare those.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PEERS = {
    "ort-genai int4": ("onnxruntime_genai", "ort_genai.py"),
    "transformers fp32": ("torch", "hf_transformers.py"),
}
OURS = "enginebay int4"
FIGURES = ("prefill_tok_s", "decode_tok_s")

Row = dict[str, Any]


def enginebay_rows(args: argparse.Namespace) -> list[Row]:
    command = [sys.executable, "-m", "enginebay.cli.main", "bench", str(args.engine), "--json"]
    command += ["--batch", args.batch, "--prompt", str(args.prompt), "--new", str(args.new)]
    command += ["--threads", str(args.threads)]
    found = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    return [{"engine": OURS, **row} for row in json.loads(found.stdout)]


def peer_rows(python: Path, script: str, args: argparse.Namespace) -> list[Row]:
    command = [str(python), str(ROOT / "benchmarks" / "peers" / script), str(args.model)]
    command += ["--batch", args.batch, "--prompt", str(args.prompt), "--new", str(args.new)]
    command += ["--threads", str(args.threads)]
    found = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    return [json.loads(line) for line in found.stdout.splitlines() if line.startswith("{")]


def installed(python: Path, module: str) -> bool:
    if not python.exists():
        return False
    probe = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([str(python), "-c", probe], check=False).returncode == 0


def best(rows: list[Row]) -> dict[tuple[str, int], Row]:
    """The best of each figure over the rounds, by engine and batch."""
    table: dict[tuple[str, int], Row] = {}
    for row in rows:
        held = table.setdefault((row["engine"], row["batch"]), dict(row))
        for figure in FIGURES:
            held[figure] = max(held[figure], row[figure])
        held["step_ms_p50"] = min(held["step_ms_p50"], row["step_ms_p50"])
    return table


def show(table: dict[tuple[str, int], Row]) -> None:
    print(f"{'engine':20}{'batch':>6}{'prefill tok/s':>15}{'decode tok/s':>14}{'step ms':>10}  enginebay is")
    for (engine, batch), row in sorted(table.items(), key=lambda item: (item[0][1], item[0][0] != OURS)):
        ratio = ""
        if engine != OURS:
            ours = table[OURS, batch]
            prefill, decode = (ours[figure] / row[figure] for figure in FIGURES)
            ratio = f"  {prefill:.2f}x in prefill, {decode:.2f}x in decode"
        figures = f"{row['prefill_tok_s']:15.1f}{row['decode_tok_s']:14.1f}{row['step_ms_p50']:10.2f}"
        print(f"{engine:20}{batch:6}{figures}{ratio}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=ROOT / "build/quickstart/model")
    parser.add_argument("--engine", type=Path, default=ROOT / "build/quickstart/engine")
    parser.add_argument("--peers-python", type=Path, default=ROOT / ".venv-peers/bin/python")
    parser.add_argument("--batch", default="1,8,16")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--skip", action="append", default=[], help="a peer not to run")
    args = parser.parse_args()
    for folder in (args.model, args.engine):
        if not folder.is_dir():
            parser.error(
                f"{folder} does not exist: run `make quickstart` first, or name --model and --engine"
            )
    peers = {name: spec for name, spec in PEERS.items() if name not in args.skip}
    absent = [name for name, (module, _) in peers.items() if not installed(args.peers_python, module)]
    rows: list[Row] = []
    for turn in range(args.rounds):
        print(f"round {turn + 1} of {args.rounds}", file=sys.stderr)
        rows += enginebay_rows(args)
        for name, (_, script) in peers.items():
            if name not in absent:
                rows += peer_rows(args.peers_python, script, args)
    show(best(rows))
    for name in absent:
        print(
            f"{name}: not run, {args.peers_python} has no such package (see the head of benchmarks/peers.py)"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
