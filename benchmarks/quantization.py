"""Perplexity and speed of the same engines, beside each other, one row a recipe.

    python benchmarks/quantization.py EXPORTED --engines build/quantization \
        --recipes fp32,fp16,int8,w8a8,int4,int4-rtn:64:sym,int4-gptq:64:sym,int4-awq:64:sym,int4-gptq@4.5
        [--json]
    python benchmarks/quantization.py EXPORTED --engines build/quantization \
        --recipes int4+fp16,int4+int8,int4+fp8,int4+int4
    python benchmarks/quantization.py EXPORTED --engines build/quantization --window 2048 \
        --recipes int4+fp16,int4+int8,int4+tiers:128:512,int4+int4

A recipe may carry a block and sym or asym, a budget of bits for a search behind @, and the format of the
cache behind +, of tiers with the two ages. Engines are built once and kept. Perplexity is measured by the
engine itself (activations rounded as it rounds them) on the half of Python's help topics that calibration
does not see, relative to the first recipe; every key and value is read from the cache, those of the same
step too. A step computes 32 tokens, so that blocks of tiers move about as they do in decoding; other caches
give the same bits whatever the steps. Decode runs 32 steps after prompts of 128 tokens; the best of three.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from enginebay.builder.build import BuildConfig, build_engine
from enginebay.builder.manifest import CacheGroupRecord, EngineManifest
from enginebay.builder.quant.text import CalibrationConfig, default_text, text_batch
from enginebay.export.stepping import Stepper, Stream
from enginebay.triton_repo.runtime.ort_engine import EngineOptions, OrtEngine
from enginebay.triton_repo.runtime.pack import Packer
from enginebay.triton_repo.runtime.plan import StepPlan
from enginebay.triton_repo.runtime.request import Request, SamplingParams
from enginebay.triton_repo.runtime.scheduler import Scheduler, SchedulerConfig

PROMPT, STEPS, REPEATS, STEP_TOKENS = 128, 32, 3, 32
RECIPE = re.compile(r"([a-z0-9-]+?)(?::(\d+):(sym|asym))?(?:@([\d.]+))?(?:\+([a-z0-9]+)(?::(\d+):(\d+))?)?")


@dataclass(frozen=True)
class Row:
    recipe: str
    megabytes: float
    cache_bytes: float  # of a token, over a window
    perplexity: float
    ratio: float
    ratio_error: float  # standard error over the windows
    decode_1: float
    decode_16: float


def config_of(text: str) -> BuildConfig:
    match = RECIPE.fullmatch(text)
    if match is None:
        raise SystemExit(f"recipe '{text}' is not NAME[:BLOCK:sym|asym][@BITS][+CACHE[:AGE:AGE]]")
    name, block, sign, bits, cache, young, old = match.groups()
    return BuildConfig(
        quant=name,
        weight_block=int(block) if block else None,
        weight_symmetric=None if sign is None else sign == "sym",
        bits=float(bits) if bits else None,
        kv_cache=cache or "auto",
        **({"cache_ages": (int(young), int(old))} if young else {}),
    )


def losses(engine: OrtEngine, windows: tuple[tuple[int, ...], ...]) -> NDArray[np.float64]:
    """The mean loss of each window's next tokens."""
    packer, config = Packer(engine.limits), SchedulerConfig(max_step_tokens=STEP_TOKENS, prefix_caching=False)
    result = []
    for window in windows:
        scheduler = Scheduler(engine.limits, config)
        scheduler.add(Request("window", window, SamplingParams(max_tokens=1)))
        total = 0.0
        while scheduler.live:
            plan = scheduler.schedule()
            engine.move(plan.moves)
            (chunk,) = plan.chunks
            rows = replace(chunk, samples=len(chunk.tokens))
            logits = engine.run(packer.pack(StepPlan((rows,)))).astype(np.float64)
            scheduler.commit(plan, [[0] * chunk.samples])
            following = np.asarray(window[chunk.start + 1 : chunk.end + 1])
            logits = logits[: len(following)]
            top = logits.max(axis=1)
            log_sum = np.log(np.exp(logits - top[:, None]).sum(axis=1)) + top
            total += float((log_sum - logits[np.arange(len(following)), following]).sum())
        result.append(total / (len(window) - 1))
    return np.array(result)


def token_bytes(group: CacheGroupRecord, window: int) -> float:
    """Bytes of cache that a token takes, over the tokens of a window."""
    ages = [0, *(min(tier.age, window) for tier in group.tiers), window]
    spans = [end - start for start, end in pairwise(ages)]
    held = sum(span * size for span, size in zip(spans, group.pool_bytes, strict=True))
    return held / group.block_size / window


def decode_speed(engine: OrtEngine, batch: int) -> float:
    """Tokens a second of all rows together, greedy."""
    rng = np.random.default_rng(0)
    best = 0.0
    for _ in range(REPEATS):
        stepper = Stepper(engine)
        streams = [Stream(rng.integers(0, engine.limits.vocab_size, PROMPT).tolist()) for _ in range(batch)]
        for stream in streams:
            stepper.step([(stream, PROMPT)])
        for stream in streams:
            stream.tokens.append(0)
        started = time.perf_counter()
        for _ in range(STEPS):
            logits = stepper.step([(stream, 1) for stream in streams])
            for stream, row in zip(streams, logits, strict=True):
                stream.tokens.append(int(row[0].argmax()))
        best = max(best, batch * STEPS / (time.perf_counter() - started))
    return best


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("exported", type=Path)
    parser.add_argument("--engines", type=Path, required=True, help="where engines are built and kept")
    parser.add_argument("--recipes", default="fp32,fp16,int8,int4")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--window", type=int, default=256, help="tokens of a window of the text")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows: list[Row] = []
    first: NDArray[np.float64] | None = None
    for text in options.recipes.split(","):
        config, folder = config_of(text), options.engines / re.sub("[:@+]", "-", text)
        if not (folder / "manifest.json").exists():
            build_engine(options.exported, folder, config)
        manifest = EngineManifest.load(folder)
        engine = OrtEngine(folder, EngineOptions(num_blocks=1024))
        shape = CalibrationConfig(sequences=options.tokens // options.window, length=options.window)
        batch = text_batch(
            options.exported, engine.limits.vocab_size, default_text(1), shape, "held-out text"
        )
        loss = losses(engine, batch.sequences)
        first = loss if first is None else first
        more = loss - first
        ratio = float(np.exp(more.mean()))
        rows.append(
            Row(
                text,
                manifest.weight_bytes / 1e6,
                sum(token_bytes(group, options.window) for group in manifest.cache_groups),
                float(np.exp(loss.mean())),
                ratio,
                ratio * float(more.std()) / len(more) ** 0.5,
                decode_speed(engine, 1),
                decode_speed(engine, 16),
            )
        )
        if not options.json:
            row = rows[-1]
            print(
                f"{row.recipe:24} {row.megabytes:7.1f} MB, {row.cache_bytes:.0f} bytes a token, "
                f"perplexity {row.perplexity:.4f}, {row.ratio:.4f} ± {row.ratio_error:.4f}, "
                f"decode {row.decode_1:.1f} and {row.decode_16:.1f} tok/s",
                flush=True,
            )
    if options.json:
        print(json.dumps([vars(row) for row in rows], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
