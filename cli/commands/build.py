"""Canonical ONNX -> engine for a target.

An engine is a folder: the lowered graph, packed weights, a manifest that says what was built from what,
and a report of every layer's format and error. Recipes trade size and speed for accuracy; `enginebay verify`
measures the result.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from enginebay.builder.build import BuildConfig, build_engine
from enginebay.builder.exported import read_exported
from enginebay.builder.manifest import EngineManifest, ManifestError
from enginebay.builder.quant.recipes import RECIPES
from enginebay.builder.report import BuildReport
from enginebay.builder.targets import PLANNED, TARGETS
from enginebay.cli.console import print_json, progress, say
from enginebay.plugins.load import KernelLibrary
from enginebay.triton_repo.runtime.ort_engine import machine_facts


def configure(parser: argparse.ArgumentParser) -> None:
    default = BuildConfig()
    recipes = "; ".join(f"{name}: {recipe.summary}" for name, recipe in RECIPES.items())
    parser.add_argument("exported", type=Path, metavar="EXPORTED", help="folder `enginebay export` wrote")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write; replaces an engine")
    parser.add_argument(
        "--target", default=default.target, help=f"{', '.join(TARGETS)}; not yet: {', '.join(PLANNED)}"
    )
    parser.add_argument(
        "--quant", default=default.quant, metavar="RECIPE", help=f"{recipes} (default {default.quant})"
    )
    parser.add_argument(
        "--max-batch", type=int, default=default.max_batch, metavar="N", help="sequences of a step"
    )
    parser.add_argument(
        "--max-step-tokens", type=int, default=default.max_step_tokens, metavar="N",
        help="tokens of a step, all sequences together",
    )  # fmt: skip
    parser.add_argument("--max-sequence", type=int, metavar="N", help="tokens of prompt and answer together")
    parser.add_argument(
        "--cache-dtype", metavar="DTYPE", help="float32, float16, bfloat16; default: the recipe's"
    )
    parser.add_argument("--keep", action="store_true", help="do nothing where OUT is this engine already")
    parser.add_argument("--json", action="store_true", help="the report as JSON on standard output")


def run(args: argparse.Namespace) -> int:
    config = BuildConfig(
        target=args.target,
        quant=args.quant,
        max_batch=args.max_batch,
        max_step_tokens=args.max_step_tokens,
        max_sequence=args.max_sequence,
        cache_dtype=args.cache_dtype,
    )
    report = build(args.exported, args.out, config, keep=args.keep)
    if report is not None and args.json:
        print_json(report.to_dict())
    return 0


def build(exported: Path, out: Path, config: BuildConfig, *, keep: bool = False) -> BuildReport | None:
    """Build with a progress bar and say what was built. None where `keep` found this engine already."""
    if keep and is_current(exported, out, config):
        say(f"kept {out}: it is this model's {config.quant} engine already")
        return None
    with progress("build") as report_bytes:
        report = build_engine(exported, out, config, lambda done, total, _what: report_bytes(done, total))
    megabytes = report.manifest.weight_bytes / 1e6
    bits = report.bits_per_weight
    say(f"built {out} ({config.target}, {config.quant}) in {report.seconds:.1f} s")
    say(f"  {megabytes:.1f} MB of weights, {bits:.2f} bits per weight, {report.nodes} nodes")
    say(f"  every layer's format and error: {out / 'report.json'}")
    return report


def is_current(exported: Path, engine: Path, config: BuildConfig) -> bool:
    """Whether `engine` was built from `exported` with `config`, is whole, and runs on this machine."""
    try:
        manifest = EngineManifest.load(engine)
        manifest.check(engine, machine_facts(manifest, KernelLibrary()))
    except (ManifestError, OSError):
        return False
    return manifest.config == config.to_dict() and manifest.source == read_exported(exported).source
