"""Hugging Face folder -> canonical ONNX with one sidecar of weights.

Reads config.json and safetensors (sharded or not); neither torch nor transformers is needed, and memory stays
flat in the model's size. What the exporter does not understand it refuses by name.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from enginebay.cli.console import print_json, progress, say
from enginebay.export.exporter import describe, export_model, is_current

HELP = "Hugging Face folder -> canonical ONNX"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder with config.json and *.safetensors")
    parser.add_argument("out", type=Path, metavar="OUT", nargs="?", help="folder to write")
    parser.add_argument("--dry-run", action="store_true", help="say what would be exported; read no weights")
    existing = parser.add_mutually_exclusive_group()
    existing.add_argument("--keep", action="store_true", help="do nothing where OUT is its export already")
    existing.add_argument("--force", action="store_true", help="replace OUT whatever it holds")
    parser.add_argument("--json", action="store_true", help="the report as JSON on standard output")


def run(args: argparse.Namespace) -> int:
    if args.out is None and not args.dry_run:
        raise ValueError("say where to write: enginebay export MODEL OUT (or --dry-run)")
    if args.keep and is_current(args.model, args.out):
        say(f"kept {args.out}: it is this model's export already")
        return 0
    with progress("export") as report_bytes:
        report = export_model(
            args.model, args.out, progress=report_bytes, dry_run=args.dry_run, force=args.force
        )
    if args.json:
        print_json(describe(report))
        return 0
    verb = "would export" if args.dry_run else "exported"
    say(
        f"{verb} {report.spec.architecture}: {report.parameters / 1e6:.1f} M parameters, "
        f"{report.weight_bytes / 1e6:.1f} MB of weights, {len(report.spec.layers)} layers"
        + ("" if args.dry_run else f" -> {args.out}")
    )
    for note in report.notes:
        say(f"  note: {note}")
    for name in report.ignored:
        say(f"  left out: {name}")
    return 0
