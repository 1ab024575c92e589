"""The `enginebay` command: composition root of the pipeline.

Each command is a module of `cli/commands` with `configure(parser)` and `run(args) -> int`.
Exit status: 0 done, 1 it could not be done (the reason is on standard error), 2 wrong usage, 70 a fault of
EngineBay's own, 128 and the signal's number where one ended it: 130 interrupted, 143 terminated, 129 hung up.
"""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

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

INTERNAL_ERROR = 70  # EX_SOFTWARE of sysexits.h
ENDING = (signal.SIGTERM, signal.SIGHUP)

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


class Ended(KeyboardInterrupt):
    """SIGTERM or SIGHUP came: what is under way unwinds as on Ctrl-C."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(signal.Signals(number).name)


@contextmanager
def unwinding_at_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP raise Ended while the block runs, so that nothing half-written stays behind.

    A signal that is ignored (nohup) stays ignored. Once one came, more of them do not disturb the
    cleaning up.
    """

    def end(number: int, _frame: Any) -> None:
        for each in ENDING:
            signal.signal(each, signal.SIG_IGN)
        raise Ended(number)

    main_thread = threading.current_thread() is threading.main_thread()  # others may not set handlers
    heard = [each for each in ENDING if main_thread and signal.getsignal(each) == signal.SIG_DFL]
    for each in heard:
        signal.signal(each, end)
    try:
        yield
    finally:
        for each in heard:
            signal.signal(each, signal.SIG_DFL)


def explain(error: Exception) -> int:
    """Say what went wrong; the exit status."""
    if isinstance(error, (ValueError, OSError, RuntimeError)):  # every room's own errors derive from these
        return fail(str(error) or type(error).__name__)
    if isinstance(error, MemoryError):
        return fail(": ".join(filter(None, ("not enough memory", str(error)))))
    return fail(
        f"internal error: {type(error).__name__}: {error} (please report; --debug shows the traceback)",
        status=INTERNAL_ERROR,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    debug = "--debug" in arguments
    try:
        args = build_parser(arguments).parse_args(arguments)
        with unwinding_at_signals():  # `serve` replaces them by its own, which drain
            status: int = args.run(args)
    except Ended as ended:
        return fail(f"ended by {ended}", status=128 + ended.number)
    except KeyboardInterrupt:
        return fail("interrupted", status=130)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has gone: nobody is left to tell
        return 1
    except Exception as error:
        if debug:
            raise
        return explain(error)
    return status


if __name__ == "__main__":
    sys.exit(main())
