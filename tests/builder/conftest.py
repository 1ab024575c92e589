"""A tiny exported Llama, random, made without transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builder_support import HEAD_DIM, HEADS, HIDDEN, INNER, KV_HEADS, LAYERS, VOCAB
from numpy.typing import NDArray
from safetensors.numpy import save_file

from enginebay.export.exporter import export_model

Tensors = dict[str, NDArray[np.float32]]


def llama_tensors(rng: np.random.Generator, *, tied: bool, bias: bool) -> Tensors:
    def weight(*shape: int) -> NDArray[np.float32]:
        return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

    tensors = {"model.embed_tokens.weight": weight(VOCAB, HIDDEN), "model.norm.weight": 1 + weight(HIDDEN)}
    if not tied:
        tensors["lm_head.weight"] = weight(VOCAB, HIDDEN)
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
            if bias:
                tensors[f"{at}.{name}.bias"] = weight(rows)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}.{norm}.weight"] = 1 + weight(HIDDEN)
    return tensors


@pytest.fixture
def exported(tmp_path: Path) -> Callable[..., Path]:
    """exported(tied=True, bias=False, dtype=np.float16, seed=0, edit=function on the tensors): the folder."""

    def make(
        *,
        tied: bool = True,
        bias: bool = False,
        dtype: Any = np.float16,
        seed: int = 0,
        edit: Callable[[Tensors], None] | None = None,
    ) -> Path:
        name = f"{seed}-{tied}-{bias}-{np.dtype(dtype)}"
        source = tmp_path / f"hf-{name}"
        source.mkdir()
        tensors = llama_tensors(np.random.default_rng(seed), tied=tied, bias=bias)
        if edit is not None:
            edit(tensors)
        save_file({key: value.astype(dtype) for key, value in tensors.items()}, source / "model.safetensors")
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
            "max_position_embeddings": 256,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": tied,
            "attention_bias": bias,
            "mlp_bias": bias,
            "torch_dtype": str(np.dtype(dtype)),
        }
        (source / "config.json").write_text(json.dumps(config))
        (source / "generation_config.json").write_text('{"eos_token_id": [2, 11]}')
        out = tmp_path / f"exported-{name}"
        export_model(source, out)
        return out

    return make
