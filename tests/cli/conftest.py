"""A tiny random Llama without a tokenizer, as the stages leave it on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from enginebay.builder.build import BuildConfig, build_engine
from enginebay.export.exporter import export_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(11)
    config = LlamaConfig(
        vocab_size=160,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    out = tmp_path_factory.mktemp("model") / "tiny"
    LlamaForCausalLM(config).save_pretrained(out)
    return out


@pytest.fixture(scope="session")
def exported(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "tiny"
    export_model(model, out)
    return out


@pytest.fixture(scope="session")
def engine(exported: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("engine") / "tiny"
    build_engine(exported, out, BuildConfig(quant="fp32", max_batch=4))
    return out
