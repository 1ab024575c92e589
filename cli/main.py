"""The `enginebay` command: composition root of the pipeline.

Each command is a module of `cli/commands` with `configure(parser)` and `run(args) -> int`.
Exit status: 0 done, 1 it could not be done (the reason is on standard error), 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from enginebay.cli.console import fail, package_version

COMMANDS = {
    "quickstart": "the whole pipeline on a small real model",
    "sample-model": "a small real model to try things with",
    "export": "Hugging Face folder -> canonical ONNX",
    "build": "canonical ONNX -> engine",
    "package": "engine -> Triton model repository",
    "serve": "run the Triton server on a model repository",
    "client": "ask a running server",
    "generate": "answer one prompt in this process, without a server",
    "verify": "compare an engine with its Hugging Face model",
    "bench": "measure an engine by itself",
    "inspect": "say what a folder holds",
    "doctor": "what this machine can build and run, and why not the rest",
}

EPILOG = """\
from a checkpoint to a server:
  enginebay export  models/my-llama  exported/       Hugging Face folder -> canonical ONNX
  enginebay build   exported/  engine/ --quant int4   canonical ONNX -> engine for this machine's CPU
  enginebay package engine/  repo/                    engine -> Triton model repository
  enginebay serve   repo/                             run the Triton server on it
  enginebay client  "What is the capital of France?"  ask it, answer streamed

`enginebay COMMAND --help` explains each. `enginebay doctor` says what this machine can do.
"""


def build_parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """The parser for `arguments`. Of all commands' modules only the one asked for is imported."""
    parser = argparse.ArgumentParser(
        prog="enginebay",
        description="Turn a Hugging Face language model into an optimised engine and a Triton deployment.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"enginebay {package_version()}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    asked = next((argument for argument in arguments if not argument.startswith("-")), None)
    for name, words in COMMANDS.items():
        sub = commands.add_parser(name, help=words, formatter_class=argparse.RawDescriptionHelpFormatter)
        if name == asked:
            module = importlib.import_module(f"enginebay.cli.commands.{name.replace('-', '_')}")
            sub.description = module.__doc__
            module.configure(sub)
            sub.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    debug = "--debug" in arguments
    try:
        args = build_parser(arguments).parse_args(arguments)
        status: int = args.run(args)
    except KeyboardInterrupt:
        return fail("interrupted", status=130)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has gone: nobody is left to tell
        return 1
    except (ValueError, OSError, RuntimeError) as error:  # the domain errors of every room derive from these
        if debug:
            raise
        return fail(str(error) or type(error).__name__)
    return status


if __name__ == "__main__":
    sys.exit(main())
