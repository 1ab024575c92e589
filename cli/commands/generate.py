"""Answer one prompt in this process, without a server: the quickest look at an engine.

The prompt goes through the model's chat template where it has one, unless --raw. The answer streams to
standard output, figures follow on standard error.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from enginebay.cli.console import fail, print_json, say
from enginebay.triton_repo.runtime.llm import LLM
from enginebay.triton_repo.runtime.ort_engine import EngineOptions
from enginebay.triton_repo.runtime.request import SamplingParams
from enginebay.triton_repo.runtime.text import TextTokenizer


def configure(parser: argparse.ArgumentParser) -> None:
    default = SamplingParams()
    parser.add_argument("engine", type=Path, metavar="ENGINE", help="folder `enginebay build` wrote")
    parser.add_argument("prompt", metavar="PROMPT", help="what to ask; '-' reads standard input")
    parser.add_argument("--raw", action="store_true", help="send the text as it is, no chat template")
    parser.add_argument("--max-tokens", type=int, default=256, metavar="N", help="default 256")
    parser.add_argument("--temperature", type=float, default=default.temperature, help="0 (default): greedy")
    parser.add_argument("--top-p", type=float, default=default.top_p, metavar="P")
    parser.add_argument("--top-k", type=int, default=default.top_k, metavar="K")
    parser.add_argument("--seed", type=int, metavar="N", help="makes sampled answers repeatable")
    parser.add_argument("--threads", type=int, metavar="N", help="compute threads (default: every core)")
    parser.add_argument("--json", action="store_true", help="answer, reason and figures as JSON, at the end")


def run(args: argparse.Namespace) -> int:
    text = sys.stdin.read() if args.prompt == "-" else args.prompt
    sampling = SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        seed=args.seed,
    )
    with LLM.load(args.engine, options=EngineOptions(threads=args.threads)) as llm:
        if llm.tokenizer is None:
            raise ValueError(f"{args.engine} has no tokenizer.json: it takes token ids only")
        prompt = prompt_ids(llm.tokenizer, text, raw=args.raw)
        began = time.perf_counter()
        first, pieces, count = began, [], 0
        try:
            for output in llm.generate(prompt, sampling):
                if count == 0 and output.token_ids:
                    first = time.perf_counter()
                count += len(output.token_ids)
                pieces.append(output.text)
                if not args.json:
                    print(output.text, end="", flush=True)
        except KeyboardInterrupt:
            if not args.json:
                print(flush=True)  # what follows begins a line of its own
            raise
        ended = time.perf_counter()
    if output.finish_reason == "error":
        return fail(output.error or "the request failed")
    rate = (count - 1) / (ended - first) if count > 1 else 0.0
    figures = {
        "prompt_tokens": len(prompt),
        "completion_tokens": count,
        "time_to_first_token_s": round(first - began, 4),
        "tokens_per_s": round(rate, 1),
    }
    if args.json:
        print_json({"text": "".join(pieces), "finish_reason": output.finish_reason, **figures})
        return 0
    print()
    say(
        f"[{output.finish_reason}: {len(prompt)} tokens in, {count} out, "
        f"first after {1e3 * (first - began):.0f} ms, then {rate:.0f} tokens/s]"
    )
    return 0


def prompt_ids(tokenizer: TextTokenizer, text: str, *, raw: bool) -> tuple[int, ...]:
    """Token ids of `text`: through the chat template where there is one, unless `raw`."""
    if raw or not tokenizer.has_chat_template:
        return tokenizer.encode(text)
    return tokenizer.chat([{"role": "user", "content": text}])
