"""Whole requests through the batcher: greedy tokens equal to transformers', one token at a time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import test_families
import test_moe_families
import torch
import transformers as hf
from export_support import make_model, oracle_logits, save

from enginebay.builder.build import BuildConfig, build_engine
from enginebay.export.exporter import export_model
from enginebay.triton_repo.runtime.llm import LLM
from enginebay.triton_repo.runtime.loop import LoopConfig
from enginebay.triton_repo.runtime.ort_engine import EngineOptions
from enginebay.triton_repo.runtime.request import SamplingParams
from enginebay.triton_repo.runtime.scheduler import SchedulerConfig

# Prompts end before the windows and the RoPE switch at 24, and generation passes them; two share a beginning.
LENGTHS, NEW = (21, 5, 13, 30), 9
NAMES = {
    "phi3_longrope": test_families,
    "gemma3": test_families,
    "gpt2": test_families,
    "mixtral_window": test_moe_families,
    "deepseek_v3": test_moe_families,
}


def greedy(model: torch.nn.Module, prompt: list[int]) -> list[int]:
    """Each token from a whole forward pass over what came before it: no cache to be stale."""
    tokens = list(prompt)
    for _ in range(NEW):
        tokens.append(int(oracle_logits(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_equal(name: str, tmp_path: Path) -> None:
    module = NAMES[name]
    kind, changes = module.MODELS[name]
    base = {"vocab_size": 103} if kind is hf.GPT2Config else module.SMALL
    config = kind(**{**base, **changes})
    folder = save(make_model(config), tmp_path / "model")
    model = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    export_model(folder, tmp_path / "exported")
    build_engine(tmp_path / "exported", tmp_path / "engine", BuildConfig(quant="fp32", block_size=4))
    rng = np.random.default_rng(5)
    prompts = [rng.integers(3, 103, length).tolist() for length in LENGTHS]
    prompts.append(prompts[0][:12] + rng.integers(3, 103, 6).tolist())
    sampling = SamplingParams(max_tokens=NEW, ignore_eos=True)
    loop = LoopConfig(scheduler=SchedulerConfig(max_step_tokens=16))
    with LLM.load(tmp_path / "engine", options=EngineOptions(num_blocks=96, threads=1), config=loop) as llm:
        running = [llm.generate(prompt, sampling) for prompt in prompts]
        answers = [[token for output in outputs for token in output.token_ids] for outputs in running]
    assert answers == [greedy(model, prompt) for prompt in prompts]
