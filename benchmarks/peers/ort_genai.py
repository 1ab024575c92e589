"""ONNX Runtime GenAI, int4 block 32, accuracy level 4. Builds its model once for each checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import onnxruntime_genai as og
from common import arguments, measure, prepared, prompts


def built(model: Path) -> Path:
    out = prepared(model, "genai-int4")
    if not out.is_dir():
        with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
            command = [sys.executable, "-m", "onnxruntime_genai.models.builder"]
            command += ["-m", str(model), "-o", f"{scratch}/m", "-p", "int4", "-e", "cpu", "-c", scratch]
            command += ["--extra_options", "int4_block_size=32", "int4_accuracy_level=4"]
            subprocess.run(command, check=True, stdout=sys.stderr)
            os.rename(f"{scratch}/m", out)
    return out


def main() -> None:
    args = arguments()
    config = og.Config(str(built(args.model)))
    config.overlay(
        json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": args.threads}}}})
    )
    model = og.Model(config)

    def start(batch: int) -> Iterator[None]:
        params = og.GeneratorParams(model)
        total = args.prompt + args.new
        params.set_search_options(
            batch_size=batch, max_length=total, min_length=total, do_sample=False, early_stopping=False
        )
        generator = og.Generator(model, params)
        ids = prompts(args, batch)

        def steps() -> Iterator[None]:
            generator.append_tokens(ids)
            for _ in range(args.new):
                generator.generate_next_token()
                yield

        return steps()

    measure("ort-genai int4", args, start)


if __name__ == "__main__":
    main()
