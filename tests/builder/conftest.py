"""A tiny exported Llama, random, made without transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builder_support import MODEL, VOCAB
from numpy.typing import NDArray
from tiny_llama import TinyLlama, random_weight

from enginebay.export.exporter import export_model

Tensors = dict[str, NDArray[np.float32]]


def llama_tensors(rng: np.random.Generator, model: TinyLlama, *, tied: bool, bias: bool) -> Tensors:
    tensors = {
        "model.embed_tokens.weight": random_weight(rng, VOCAB, model.hidden),
        "model.norm.weight": 1 + random_weight(rng, model.hidden),
    }
    if not tied:
        tensors["lm_head.weight"] = random_weight(rng, VOCAB, model.hidden)
    for layer in range(model.layers):
        at = f"model.layers.{layer}"
        for name, rows, columns in model.projections():
            tensors[f"{at}.{name}.weight"] = random_weight(rng, rows, columns)
            if bias:
                tensors[f"{at}.{name}.bias"] = random_weight(rng, rows)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}.{norm}.weight"] = 1 + random_weight(rng, model.hidden)
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
        model: TinyLlama = MODEL,
        edit: Callable[[Tensors], None] | None = None,
    ) -> Path:
        name = f"{seed}-{tied}-{bias}-{np.dtype(dtype)}-{model.head_dim}"
        tensors = llama_tensors(np.random.default_rng(seed), model, tied=tied, bias=bias)
        if edit is not None:
            edit(tensors)
        source = model.save(
            tmp_path / f"hf-{name}",
            {key: value.astype(dtype) for key, value in tensors.items()},
            eos=[2, 11],
            tie_word_embeddings=tied,
            attention_bias=bias,
            mlp_bias=bias,
        )
        out = tmp_path / f"exported-{name}"
        export_model(source, out)
        return out

    return make
