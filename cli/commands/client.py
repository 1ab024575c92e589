"""Ask a running server; the answer streams to standard output as it comes.

The prompt goes through the model's chat template unless --raw.
"""

from __future__ import annotations

import argparse
import socket
import sys
from collections.abc import Callable
from urllib.parse import urlsplit

from enginebay.cli.commands.serve import GRPC_PORT, HTTP_PORT
from enginebay.cli.console import say
from enginebay.triton_repo.client import Answer, generate_grpc, generate_http

CLIENTS: dict[str, Callable[..., Answer]] = {"grpc": generate_grpc, "http": generate_http}
DEFAULT_URLS = {"grpc": f"127.0.0.1:{GRPC_PORT}", "http": f"http://127.0.0.1:{HTTP_PORT}"}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", metavar="PROMPT", help="what to ask; '-' reads standard input")
    parser.add_argument(
        "--protocol", choices=sorted(CLIENTS), help="default: http for a URL with http://, else grpc"
    )
    parser.add_argument(
        "--url", help=f"the server (default {DEFAULT_URLS['grpc']} or {DEFAULT_URLS['http']})"
    )
    parser.add_argument("--model", default="llm", help="default llm")
    parser.add_argument("--raw", action="store_true", help="send the text as it is, no chat template")
    parser.add_argument("--max-tokens", type=int, default=256, metavar="N", help="default 256")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 (default): greedy")
    parser.add_argument("--seed", type=int, metavar="N", help="makes sampled answers repeatable")


def run(args: argparse.Namespace) -> int:
    parameters = {"max_tokens": args.max_tokens, "temperature": args.temperature}
    if args.seed is not None:
        parameters["seed"] = args.seed
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    if not prompt:
        raise ValueError("the prompt is empty; say what to ask")
    protocol = args.protocol or ("http" if (args.url or "").startswith("http://") else "grpc")
    url = args.url or DEFAULT_URLS[protocol]
    require_listener(url)
    show(CLIENTS[protocol](url, prompt, parameters, chat=not args.raw, model=args.model))
    return 0


def require_listener(url: str) -> None:
    """ValueError where nothing listens at `url`, with the command that starts a server."""
    parts = urlsplit(url if "//" in url else f"//{url}")
    try:
        address = (parts.hostname or "", parts.port or 80)
        socket.create_connection(address, timeout=10).close()
    except (OSError, ValueError) as error:
        raise ValueError(f"no server at {url} ({error}); start one with: enginebay serve REPO") from error


def show(answer: Answer) -> None:
    """Prints the pieces as they come, then what was measured."""
    with answer:
        for piece in answer:
            print(piece, end="", flush=True)
    print(flush=True)
    say(f"[{answer.finish_reason}: {answer.tokens} tokens, {figures(answer)}]")


def figures(answer: Answer) -> str:
    first, rate = answer.first_token_seconds, answer.tokens_per_second
    after = f"first after {1e3 * first:.0f} ms" if first is not None else "no token"
    return after if rate is None else f"{after}, then {rate:.0f} tokens/s"
