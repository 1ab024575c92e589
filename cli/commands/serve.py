"""Run the Triton server over a model repository until Ctrl-C or SIGTERM.

Stopping refuses new requests and lets those in flight finish. The server listens on this machine alone unless
--address says otherwise, and never outlives this command.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from enginebay.builder.manifest import MANIFEST
from enginebay.cli.console import say, status_line
from enginebay.triton_repo.install import find_server
from enginebay.triton_repo.server import ServerOptions, TritonServer

HTTP_PORT, GRPC_PORT, METRICS_PORT = 8000, 8001, 8002  # Triton's own defaults


def configure(parser: argparse.ArgumentParser) -> None:
    default = ServerOptions()
    parser.add_argument("repo", type=Path, metavar="REPO", help="folder `enginebay package` wrote")
    parser.add_argument("--address", default=default.address, help="to listen on (default 127.0.0.1)")
    for name, port in (("http", HTTP_PORT), ("grpc", GRPC_PORT), ("metrics", METRICS_PORT)):
        parser.add_argument(
            f"--{name}-port", type=int, default=port, metavar="N", help=f"default {port}; 0: any"
        )
    parser.add_argument("--drain-timeout", type=float, default=default.drain_timeout, metavar="S",
                        help="seconds that requests in flight get when stopping (default 30)")  # fmt: skip
    parser.add_argument(
        "--server", type=Path, metavar="BINARY", help="tritonserver to use (default: the one found)"
    )
    parser.add_argument("--log", type=Path, metavar="FILE", help="where the server's own output goes")


def run(args: argparse.Namespace) -> int:
    models = served_models(args.repo)
    options = ServerOptions(
        address=args.address,
        http_port=args.http_port,
        grpc_port=args.grpc_port,
        metrics_port=args.metrics_port,
        drain_timeout=args.drain_timeout,
        log=args.log,
    )
    with status_line() as progress:
        server = TritonServer(args.repo, options, install=find_server(args.server), progress=progress)
        with server:
            say("ready; Ctrl-C stops it")
            for model in models:
                say(f"  HTTP     {server.http_url}/v2/models/{model}/generate_stream")
            say(f"  gRPC     {server.grpc_url}")
            say(f"  metrics  {server.metrics_url}")
            server.run_until_signal()
    say("stopped")
    return 0


def served_models(repo: Path) -> list[str]:
    """The models of a repository. ValueError where the folder is none, with the command that makes one."""
    models = sorted(path.parent.name for path in repo.glob("*/config.pbtxt"))
    if not models:
        what = "an engine folder" if (repo / MANIFEST).is_file() else "no Triton model repository"
        raise ValueError(f"{repo} is {what}; make a repository with: enginebay package ENGINE REPO")
    return models
