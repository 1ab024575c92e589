"""Compare an engine with the model it came from: logits, divergence, greedy choices, perplexity.

Runs the engine in steps that mix prefill, chunked prefill and decode, and transformers in float32 beside it,
over text this Python ships (random token ids where the model has no tokenizer). Needs torch and transformers.

max_abs_logit_error is the largest difference of any logit, mean_kl in nats per token, greedy_match the share
of positions where both choose the same token. With --max-perplexity-ratio the status says whether it holds.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from enginebay.cli.console import print_json, progress, say
from enginebay.export.verify import verify
from enginebay.triton_repo.runtime.ort_engine import OrtEngine


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("engine", type=Path, metavar="ENGINE", help="folder `enginebay build` wrote")
    parser.add_argument(
        "--reference", type=Path, required=True, metavar="MODEL", help="its Hugging Face folder or .gguf file"
    )
    parser.add_argument(
        "--tokens", type=int, default=2048, metavar="N", help="positions to compare (default 2048)"
    )
    parser.add_argument(
        "--window", type=int, default=256, metavar="N", help="tokens of context (default 256)"
    )
    parser.add_argument("--max-perplexity-ratio", type=float, metavar="R", help="exit 1 above this")
    parser.add_argument("--json", action="store_true", help="the figures as JSON on standard output")


def run(args: argparse.Namespace) -> int:
    engine = OrtEngine(args.engine)
    with progress("verify", unit="token") as report:
        result = verify(engine, args.reference, tokens=args.tokens, window=args.window, progress=report)
    ratio = result.perplexity / result.reference_perplexity
    if args.json:
        print_json(asdict(result))
    else:
        kind = "text" if result.text else "random token ids (no tokenizer)"
        print(f"over {result.tokens} positions of {kind}:")
        for name in ("max_abs_logit_error", "mean_kl", "greedy_match", "perplexity", "reference_perplexity"):
            print(f"  {name:22} {getattr(result, name):.6g}")
        print(f"  {'perplexity ratio':22} {ratio:.4f}")
    if args.max_perplexity_ratio is not None and not ratio <= args.max_perplexity_ratio:
        say(f"enginebay: the perplexity ratio is {ratio:.4f}, above {args.max_perplexity_ratio}")
        return 1
    return 0
