"""Say what a folder is: a Hugging Face model, an exported model, an engine or a Triton model repository."""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from enginebay.builder.exported import read_exported
from enginebay.builder.manifest import MANIFEST, EngineManifest
from enginebay.cli.console import print_json
from enginebay.export.exporter import SPEC_FILE, describe, export_model


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--json", action="store_true", help="everything known, as JSON")


def run(args: argparse.Namespace) -> int:
    kind, facts, lines = look(args.folder)
    if args.json:
        print_json({"kind": kind, **facts})
        return 0
    print(f"{args.folder}: {kind}")
    for name, value in lines.items():
        print(f"  {name:16} {value}")
    return 0


def look(folder: Path) -> tuple[str, dict[str, Any], dict[str, str]]:
    """What `folder` is, everything known of it, and lines for a person. ValueError: nothing of ours."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder")
    if (folder / MANIFEST).is_file():
        manifest = EngineManifest.load(folder)
        return "engine", asdict(manifest), engine_lines(manifest)
    if (folder / SPEC_FILE).is_file():
        exported = read_exported(folder)
        return "exported model", {"spec": exported.spec_document}, {
            "architecture": exported.spec.architecture,
            "layers": str(len(exported.spec.layers)),
            "positions": str(exported.spec.max_positions),
        }  # fmt: skip
    if (folder / "config.json").is_file():
        report = export_model(folder, folder, dry_run=True)
        return "Hugging Face model", describe(report), {
            "architecture": report.spec.architecture,
            "parameters": f"{report.parameters / 1e6:.1f} M",
            "weights": f"{report.weight_bytes / 1e6:.1f} MB once exported",
            "cache": f"{report.cache_bytes_per_token // 2} bytes per token in 16 bits",
        }  # fmt: skip
    engines = sorted(folder.glob(f"*/1/engine/{MANIFEST}"))
    if engines:
        held = {path.parts[-4]: EngineManifest.load(path.parent) for path in engines}
        facts = {"models": {name: asdict(manifest) for name, manifest in held.items()}}
        return "Triton model repository", facts, {
            name: f"{manifest.source.name}, {manifest.quantization.recipe}" for name, manifest in held.items()
        }  # fmt: skip
    raise ValueError(
        f"{folder} is no Hugging Face model (config.json), exported model ({SPEC_FILE}), "
        f"engine ({MANIFEST}) or model repository of EngineBay"
    )


def engine_lines(manifest: EngineManifest) -> dict[str, str]:
    formats = Counter(layer.format for layer in manifest.quantization.layers.values())
    limits = manifest.limits
    return {
        "model": manifest.source.name,
        "target": f"{manifest.target.name}, {manifest.target.library} {manifest.target.library_version}",
        "recipe": manifest.quantization.recipe,
        "layers": ", ".join(f"{count} x {name}" for name, count in formats.most_common()),
        "weights": f"{manifest.weight_bytes / 1e6:.1f} MB",
        "cache": ", ".join(
            f"{group.kind} {group.dtype}, {group.block_bytes // group.block_size:,} bytes a token"
            + "".join(
                f"; from an age of {tier.age:,} on {tier.dtype}, {size // group.block_size:,}"
                for tier, size in zip(group.tiers, group.pool_bytes[1:], strict=True)
            )
            for group in manifest.cache_groups
        ),
        "limits": f"{limits.max_batch} sequences, {limits.max_step_tokens} tokens a step, "
        f"{limits.max_sequence} tokens a sequence",
        "built": f"{manifest.built_at} by EngineBay {manifest.enginebay_version}",
    }
