"""A tiny random Llama, exported and built for ort-cpu."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from tiny_llama import TinyLlama, random_weight

from enginebay.builder.build import BuildConfig, build_engine
from enginebay.builder.quant.text import CalibrationConfig
from enginebay.export.exporter import export_model

VOCAB = 160
MODEL = TinyLlama(hidden=64, inner=128, heads=4, kv_heads=2, head_dim=16, layers=2, vocab=VOCAB)
WIDE = replace(MODEL, heads=2, kv_heads=1, head_dim=32)  # INT4 caches take 32 values at a time
AGES = (20, 48)  # of kv_cache tiers


def export_tiny(folder: Path, seed: int = 0, model: TinyLlama = MODEL) -> Path:
    """The exported folder of a model whose logits are well apart; tokens.npy beside it to calibrate on."""
    rng = np.random.default_rng(seed)

    def norm() -> np.ndarray:
        return 1 + 0.1 * rng.standard_normal(model.hidden).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": rng.standard_normal((model.vocab, model.hidden)).astype(np.float32),
        "lm_head.weight": 4 * random_weight(rng, model.vocab, model.hidden),
        "model.norm.weight": norm(),
    }
    for layer in range(model.layers):
        at = f"model.layers.{layer}"
        for name, rows, columns in model.projections():
            tensors[f"{at}.{name}.weight"] = random_weight(rng, rows, columns)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}.{name}.weight"] = norm()
    export_model(model.save(folder / "hf", tensors, eos=[2, 11]), folder / "exported")
    np.save(folder / "tokens.npy", rng.integers(0, model.vocab, (4, 128)))
    return folder / "exported"


def build_tiny(exported: Path, out: Path, quant: str, cache: str = "auto") -> Path:
    """An engine folder with small limits."""
    tokens = CalibrationConfig(exported.parent / "tokens.npy")
    config = BuildConfig(
        quant=quant, calibration=tokens, max_batch=8, max_step_tokens=96, kv_cache=cache, cache_ages=AGES
    )
    build_engine(exported, out, config)
    return out
