"""A tiny random Llama, exported and built for ort-cpu."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from enginebay.builder.build import BuildConfig, build_engine
from enginebay.export.exporter import export_model

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB, LAYERS, POSITIONS = 64, 128, 4, 2, 16, 160, 2, 256


def export_tiny(folder: Path, seed: int = 0) -> Path:
    """The exported folder of a model whose logits are well apart."""
    rng = np.random.default_rng(seed)

    def weight(rows: int, columns: int) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": rng.standard_normal((VOCAB, HIDDEN)).astype(np.float32),
        "lm_head.weight": 4 * weight(VOCAB, HIDDEN),
        "model.norm.weight": 1 + 0.1 * rng.standard_normal(HIDDEN).astype(np.float32),
    }
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        for name, rows, columns in (
            ("self_attn.q_proj", HEADS * HEAD_DIM, HIDDEN),
            ("self_attn.k_proj", KV_HEADS * HEAD_DIM, HIDDEN),
            ("self_attn.v_proj", KV_HEADS * HEAD_DIM, HIDDEN),
            ("self_attn.o_proj", HIDDEN, HEADS * HEAD_DIM),
            ("mlp.gate_proj", INNER, HIDDEN),
            ("mlp.up_proj", INNER, HIDDEN),
            ("mlp.down_proj", HIDDEN, INNER),
        ):
            tensors[f"{at}.{name}.weight"] = weight(rows, columns)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}.{norm}.weight"] = 1 + 0.1 * rng.standard_normal(HIDDEN).astype(np.float32)
    source = folder / "hf"
    source.mkdir(parents=True)
    save_file(tensors, source / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": LAYERS,
        "vocab_size": VOCAB,
        "max_position_embeddings": POSITIONS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    (source / "config.json").write_text(json.dumps(config))
    (source / "generation_config.json").write_text('{"eos_token_id": [2, 11]}')
    export_model(source, folder / "exported")
    return folder / "exported"


def build_tiny(exported: Path, out: Path, quant: str, cache: str | None = None) -> Path:
    """An engine folder with small limits."""
    config = BuildConfig(quant=quant, max_batch=8, max_step_tokens=96, cache_dtype=cache)
    build_engine(exported, out, config)
    return out
