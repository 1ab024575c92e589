"""Ask a running server; the answer streams to standard output as it comes.

The prompt goes through the model's chat template unless --raw.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from enginebay.cli.commands.serve import GRPC_PORT, HTTP_PORT
from enginebay.cli.console import say
from enginebay.triton_repo.client import Answer, ClientError, generate_grpc, generate_http

CLIENTS: dict[str, Callable[..., Answer]] = {"grpc": generate_grpc, "http": generate_http}
DEFAULT_URLS = {"grpc": f"127.0.0.1:{GRPC_PORT}", "http": f"http://127.0.0.1:{HTTP_PORT}"}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", metavar="PROMPT", help="what to ask; '-' reads standard input")
    parser.add_argument("--protocol", choices=sorted(CLIENTS), default="grpc", help="default grpc")
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
    url = args.url or DEFAULT_URLS[args.protocol]
    answer = CLIENTS[args.protocol](url, prompt, parameters, chat=not args.raw, model=args.model)
    try:
        show(answer)
    except ClientError as error:
        raise ClientError(f"{error} (is the server running? enginebay serve REPO)") from error
    return 0


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
