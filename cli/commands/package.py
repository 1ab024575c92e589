"""Engine -> Triton model repository, complete in itself and free to move.

The repository holds the engine, the serving code and the kernel library. It runs under `enginebay serve` and
in NVIDIA's Triton container (docs/serving.md). Other models in REPO stay as they are.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from enginebay.cli.console import print_json, say
from enginebay.triton_repo.backend.settings import ServingSettings
from enginebay.triton_repo.package import PackageConfig, package_repo


def configure(parser: argparse.ArgumentParser) -> None:
    default = ServingSettings()
    parser.add_argument("engine", type=Path, metavar="ENGINE", help="folder `enginebay build` wrote")
    parser.add_argument("repo", type=Path, metavar="REPO", help="model repository to write into")
    parser.add_argument(
        "--name", default=PackageConfig().name, help="the model's name in Triton (default llm)"
    )
    parser.add_argument("--threads", type=int, metavar="N", help="engine threads (default: every core)")
    parser.add_argument("--max-batch", type=int, metavar="N", help="sequences that run together")
    parser.add_argument(
        "--max-waiting", type=int, default=default.max_waiting, metavar="N", help="queue length"
    )
    parser.add_argument("--cache-mb", type=int, metavar="N", help="memory for the KV cache, in MB")
    parser.add_argument("--no-prefix-cache", action="store_true", help="never reuse blocks of equal prefixes")
    parser.add_argument("--copy", action="store_true", help="copy the engine's files instead of linking them")
    parser.add_argument("--json", action="store_true", help="what was made, as JSON on standard output")


def run(args: argparse.Namespace) -> int:
    settings = ServingSettings(
        threads=args.threads,
        max_batch=args.max_batch,
        max_waiting=args.max_waiting,
        cache_bytes=None if args.cache_mb is None else args.cache_mb * 1_000_000,
        prefix_caching=not args.no_prefix_cache,
    )
    made = package_repo(args.engine, args.repo, PackageConfig(args.name, settings, link=not args.copy))
    if args.json:
        print_json({**asdict(made), "repository": str(made.repository), "model": str(made.model)})
        return 0
    for note in made.notes:
        say(f"  note: {note}")
    say(f"packaged {args.engine} as model '{args.name}' in {args.repo} ({made.bytes / 1e6:.1f} MB)")
    return 0
