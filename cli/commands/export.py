"""Hugging Face folder -> canonical ONNX with one sidecar of weights.

Reads config.json and safetensors (sharded or not); neither torch nor transformers is needed, and memory stays
flat in the model's size. What the exporter does not understand it refuses by name.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from enginebay.cli.console import print_json, progress, say
from enginebay.export.exporter import (
    SOURCE_FILE,
    ExportReport,
    describe,
    engine_bytes,
    export_model,
    is_current,
)

MOST_NAMES = 10  # of tensors left out


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", type=Path, metavar="MODEL", help="folder with config.json and *.safetensors, or a .gguf file"
    )
    parser.add_argument("out", type=Path, metavar="OUT", nargs="?", help="folder to write")
    parser.add_argument("--dry-run", action="store_true", help="say what would be exported; read no weights")
    existing = parser.add_mutually_exclusive_group()
    existing.add_argument("--keep", action="store_true", help="do nothing where OUT is its export already")
    existing.add_argument(
        "--force", action="store_true", help="replace folder OUT whatever it holds, save the model itself"
    )
    parser.add_argument(
        "--generic", action="store_true", help="trace it from transformers (an architecture without a family)"
    )
    parser.add_argument("--json", action="store_true", help="the report as JSON on standard output")


def run(args: argparse.Namespace) -> int:
    if args.dry_run:
        return show(
            export_model(args.model, args.out or args.model, dry_run=True), args.out, as_json=args.json
        )
    if args.out is None:
        raise ValueError("say where to write: enginebay export MODEL OUT (or --dry-run)")
    if args.generic:
        return trace(args)
    report = export(args.model, args.out, keep=args.keep, force=args.force)
    return 0 if report is None else show(report, args.out, as_json=args.json)


def trace(args: argparse.Namespace) -> int:
    """Export through transformers; what comes out has been verified against it."""
    from enginebay.export.generic import describe_traced, export_traced
    from enginebay.plugins.load import library_path

    if args.keep and is_current(args.model, args.out):
        say(f"kept {args.out}: it is this model's export already")
        return 0
    held = names_to_lose(args.out) if args.force else []
    report = export_traced(args.model, args.out, plugin_library=library_path(), force=args.force)
    say_replaced(args.out, held)
    if args.json:
        print_json(describe_traced(report))
        return 0
    say(
        f"traced {report.spec.architecture}: {report.parameters / 1e6:.1f} M parameters, logits within "
        f"{report.max_error:.1e} of transformers -> {args.out}"
    )
    return 0


def export(model: Path, out: Path, *, keep: bool = False, force: bool = False) -> ExportReport | None:
    """Export with a progress bar. None where `keep` found a current export."""
    if keep and is_current(model, out):
        say(f"kept {out}: it is this model's export already")
        return None
    held = names_to_lose(out) if force else []
    with progress("export") as report_bytes:
        report = export_model(model, out, progress=report_bytes, force=force)
    say_replaced(out, held)
    return report


def names_to_lose(out: Path) -> list[str]:
    """What a folder that is no earlier export holds."""
    if not out.is_dir() or (out / SOURCE_FILE).is_file():
        return []
    return sorted(path.name for path in out.iterdir())


def say_replaced(out: Path, held: list[str]) -> None:
    if held:
        more = f" and {len(held) - MOST_NAMES} more" if len(held) > MOST_NAMES else ""
        say(f"--force: replaced {out}, which held {', '.join(held[:MOST_NAMES])}{more}")


def show(report: ExportReport, out: Path | None, *, as_json: bool = False) -> int:
    """Print what was exported, or would be."""
    if as_json:
        print_json(describe(report))
        return 0
    verb = "would export" if report.dry_run else "exported"
    say(
        f"{verb} {report.spec.architecture}: {report.parameters / 1e6:.1f} M parameters, "
        f"{report.weight_bytes / 1e6:.1f} MB of weights, {len(report.spec.layers)} layers"
        + ("" if report.dry_run else f" -> {out}")
    )
    if report.dry_run:
        show_plan(report)
    for note in report.notes:
        say(f"  note: {note}")
    if "tokenizer.json" not in report.companions:
        say("  note: no tokenizer.json in the model: its engine takes token ids and cannot be served as text")
    for name in report.ignored[:MOST_NAMES]:
        say(f"  left out: {name}")
    if len(report.ignored) > MOST_NAMES:
        say(f"  left out: {len(report.ignored) - MOST_NAMES} more, all in source.json")
    return 0


def show_plan(report: ExportReport) -> None:
    """The tensors, the spec and the memory of a dry run, on standard output."""
    # One line for the same tensor of every layer; --json lists each.
    alike = Counter(
        (re.sub(r"\.\d+\.", ".*.", weight.name), weight.dtype, weight.shape, weight.nbytes)
        for weight in report.tensors
    )
    for (name, dtype, shape, nbytes), count in alike.items():
        print(f"{count:5} x {nbytes:13,d}  {dtype:4}  {'x'.join(map(str, shape)):>18}  {name}")
    document = asdict(report.spec)
    layers = document.pop("layers")
    print(f"spec: {json.dumps(document)}")
    first = 0
    for index, layer in enumerate(layers):
        if index + 1 == len(layers) or layers[index + 1] != layer:
            print(f"layers {first} to {index}: {json.dumps(layer)}")
            first = index + 1
    engines = ", ".join(f"{name} {size / 1e6:,.0f} MB" for name, size in engine_bytes(report).items())
    print(
        f"an engine's weights: {engines}; its float32 cache: {report.cache_bytes_per_token:,} bytes a token"
    )
