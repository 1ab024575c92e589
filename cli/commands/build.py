"""Canonical ONNX -> engine for a target.

An engine is a folder: the lowered graph, packed weights, a manifest that says what was built from what,
and a report of every layer's format and error. Recipes trade size and speed for accuracy; `enginebay verify`
measures the result.
"""

from __future__ import annotations

import argparse
import filecmp
from pathlib import Path

from enginebay.builder.build import BuildConfig, BuildError, build_engine, choose
from enginebay.builder.exported import read_exported
from enginebay.builder.manifest import EngineManifest, ManifestError
from enginebay.builder.quant.cache import CACHES
from enginebay.builder.quant.formats import QuantizationError
from enginebay.builder.quant.recipes import RECIPES, Override
from enginebay.builder.quant.text import CalibrationConfig
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
    _configure_weights(parser)
    parser.add_argument(
        "--max-batch", type=int, default=default.max_batch, metavar="N", help="sequences of a step"
    )
    parser.add_argument(
        "--max-step-tokens", type=int, default=default.max_step_tokens, metavar="N",
        help="tokens of a step, all sequences together",
    )  # fmt: skip
    parser.add_argument("--max-sequence", type=int, metavar="N", help="tokens of prompt and answer together")
    caches = "; ".join(f"{name}: {cache.summary}" for name, cache in CACHES.items())
    parser.add_argument(
        "--kv-cache", default=default.kv_cache, metavar="FORMAT",
        help=f"of the key/value cache: {caches}; auto: the recipe's (default {default.kv_cache})",
    )  # fmt: skip
    parser.add_argument(
        "--cache-ages", type=_two_numbers, default=default.cache_ages, metavar="N,N",
        help="of --kv-cache tiers: how many newer tokens there are when blocks become int8, and when they "
        "become int4 (default {},{})".format(*default.cache_ages),
    )  # fmt: skip
    parser.add_argument(
        "--check-only", action="store_true", help="check the options alone: read and write nothing"
    )
    parser.add_argument("--keep", action="store_true", help="do nothing where OUT is this engine already")
    parser.add_argument("--json", action="store_true", help="the report as JSON on standard output")


def _two_numbers(text: str) -> tuple[int, int]:
    first, second = map(int, text.split(","))
    return first, second


def _configure_weights(parser: argparse.ArgumentParser) -> None:
    calibration = CalibrationConfig()
    group = parser.add_argument_group("weights")
    group.add_argument(
        "--block",
        type=int,
        metavar="N",
        help="int4 weights that share a scale: 32, 64, 128; default: the recipe's",
    )
    sign = group.add_mutually_exclusive_group()
    sign.add_argument(
        "--symmetric",
        dest="symmetric",
        action="store_const",
        const=True,
        help="int4 by scales alone",
    )
    sign.add_argument(
        "--asymmetric",
        dest="symmetric",
        action="store_const",
        const=False,
        help="int4 with scales and minimums",
    )
    group.add_argument(
        "--override", type=_override, action="append", default=[], metavar="PATTERN=FORMAT",
        help="another format for some layers, such as 'layers.0.*=i8' or '*.mlp.down=i4.b32.asym'; the first "
        "that matches decides",
    )  # fmt: skip
    group.add_argument(
        "--bits", type=float, metavar="B",
        help="search a format for each layer: B bits a weight on average, scales counted, without the head",
    )  # fmt: skip
    group.add_argument(
        "--calibrate", type=Path, metavar="FILE",
        help="text, or token ids as .json or .npy; default: half of Python's help topics",
    )  # fmt: skip
    group.add_argument(
        "--calibration-sequences", type=int, default=calibration.sequences, metavar="N",
        help=f"at most so many sequences of --calibration-length (default {calibration.sequences})",
    )  # fmt: skip
    group.add_argument(
        "--calibration-length", type=int, default=calibration.length, metavar="N",
        help=f"tokens of a sequence (default {calibration.length})",
    )  # fmt: skip
    group.add_argument(
        "--evaluate", type=int, default=0, metavar="TOKENS",
        help="measure perplexity and KL of weights and cache on so many tokens not calibrated on",
    )  # fmt: skip


def _override(text: str) -> Override:
    try:
        return Override.parse(text)
    except QuantizationError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run(args: argparse.Namespace) -> int:
    config = BuildConfig(
        target=args.target,
        quant=args.quant,
        weight_block=args.block,
        weight_symmetric=args.symmetric,
        overrides=tuple(args.override),
        bits=args.bits,
        evaluate=args.evaluate,
        calibration=CalibrationConfig(args.calibrate, args.calibration_sequences, args.calibration_length),
        max_batch=args.max_batch,
        max_step_tokens=args.max_step_tokens,
        max_sequence=args.max_sequence,
        kv_cache=args.kv_cache,
        cache_ages=args.cache_ages,
    )
    if not _looks_at_text(config) and args.calibrate is not None:
        raise BuildError(
            f"--calibrate {args.calibrate}: --quant {args.quant} with --kv-cache {args.kv_cache} looks at no "
            "text; leave it out, or choose a recipe that calibrates, such as int4-gptq"
        )
    if args.check_only:
        return 0
    report = build(args.exported, args.out, config, keep=args.keep)
    if report is not None and args.json:
        print_json(report.to_dict())
    return 0


def _looks_at_text(config: BuildConfig) -> bool:
    """Whether weights or cache are chosen by what a text does; errors as of `choose`."""
    recipe, _, cache = choose(config)
    return recipe.calibrated or config.bits is not None or bool(cache.calibrated.constants)


def build(exported: Path, out: Path, config: BuildConfig, *, keep: bool = False) -> BuildReport | None:
    """Build with a progress bar and say what was built. None where `keep` found this engine already."""
    if keep and is_current(exported, out, config):
        say(f"kept {out}: it is this model's {config.quant} engine already")
        return None
    if _looks_at_text(config):
        text = config.calibration
        say(f"calibrating on up to {text.sequences} sequences of {text.length} tokens: this may take minutes")
    with progress("build") as report_bytes:
        report = build_engine(exported, out, config, lambda done, total, _what: report_bytes(done, total))
    megabytes = report.manifest.weight_bytes / 1e6
    bits = report.bits_per_weight
    say(f"built {out} ({config.target}, {config.quant}) in {report.seconds:.1f} s")
    say(f"  {megabytes:.1f} MB of weights, {bits:.2f} bits per weight, {report.nodes} nodes")
    if error := report.error:
        ratio = error.perplexity / error.reference_perplexity
        say(
            f"  perplexity {error.perplexity:.3f}, {ratio:.4f} times the model's; mean KL {error.mean_kl:.2e}"
        )
    say(f"  every layer's format and error: {out / 'report.html'}, {out / 'report.json'}")
    return report


def is_current(exported: Path, engine: Path, config: BuildConfig) -> bool:
    """Whether `engine` was built from `exported` with `config`, is whole, and runs on this machine."""
    try:
        manifest = EngineManifest.load(engine)
        manifest.check(engine, machine_facts(manifest, KernelLibrary()))
    except (ManifestError, OSError):
        return False
    source = read_exported(exported)
    held = {record.name for record in manifest.files}
    companions = all(
        path.name in held and filecmp.cmp(path, engine / path.name, shallow=False)
        for path in source.companions
    )
    return companions and manifest.config == config.to_dict() and manifest.source == source.source
