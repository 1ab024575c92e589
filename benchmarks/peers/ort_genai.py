"""ONNX Runtime GenAI, int4 block 32, accuracy level 4. Builds its model beside the checkpoint's name once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnxruntime_genai as og
from common import arguments, measure


def built(model: str) -> Path:
    out = Path("build/peers") / f"genai-int4-{Path(model).name}"
    if not (out / "genai_config.json").is_file():
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
            command = [
                sys.executable,
                "-m",
                "onnxruntime_genai.models.builder",
                "-m",
                model,
                "-o",
                f"{scratch}/m",
            ]
            options = ["int4_block_size=32", "int4_accuracy_level=4"]
            command += ["-p", "int4", "-e", "cpu", "-c", scratch, "--extra_options", *options]
            subprocess.run(command, check=True, stdout=sys.stderr)
            os.rename(f"{scratch}/m", out)
    return out


def main() -> None:
    args = arguments()
    folder = built(args.model)
    config = og.Config(str(folder))
    config.overlay(
        json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": args.threads}}}})
    )
    model = og.Model(config)
    rng = np.random.default_rng(0)

    def steps(batch: int) -> Iterator[None]:
        params = og.GeneratorParams(model)
        total = args.prompt + args.new
        params.set_search_options(
            batch_size=batch, max_length=total, min_length=total, do_sample=False, early_stopping=False
        )
        generator = og.Generator(model, params)
        generator.append_tokens(rng.integers(100, 40000, (batch, args.prompt), dtype=np.int32))
        for _ in range(args.new):
            generator.generate_next_token()
            yield

    measure("ort-genai int4", args, steps)


if __name__ == "__main__":
    main()
