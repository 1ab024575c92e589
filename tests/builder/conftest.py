"""A tiny exported Llama and a kernel library without kernels, for tests of everything before packing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from enginebay.builder.quant.formats import WeightFormat
from enginebay.builder.quant.rtn import QuantizedRows
from enginebay.export.exporter import export_model

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB, LAYERS = 64, 128, 4, 2, 16, 128, 2

Checkpoint = Callable[..., Path]


def llama_tensors(rng: np.random.Generator, *, tied: bool, bias: bool) -> dict[str, NDArray[np.float32]]:
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
def llama(tmp_path: Path) -> Checkpoint:
    """Makes a random HF folder: llama(tied=True, bias=False, dtype=np.float16, seed=0, edit=function on tensors)."""

    def make(
        *,
        tied: bool = True,
        bias: bool = False,
        dtype: type[np.floating] = np.float16,
        seed: int = 0,
        edit: Callable[[dict[str, NDArray[np.float32]]], None] | None = None,
    ) -> Path:
        folder = tmp_path / f"hf-{seed}-{tied}-{bias}-{dtype.__name__}"
        folder.mkdir()
        tensors = llama_tensors(np.random.default_rng(seed), tied=tied, bias=bias)
        if edit is not None:
            edit(tensors)
        save_file(
            {name: value.astype(dtype) for name, value in tensors.items()}, folder / "model.safetensors"
        )
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
            "torch_dtype": {"float16": "float16", "float32": "float32"}[dtype.__name__],
        }
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "generation_config.json").write_text('{"eos_token_id": [2, 11]}')
        return folder

    return make


@pytest.fixture
def exported(llama: Checkpoint, tmp_path: Path) -> Callable[..., Path]:
    """Exports a checkpoint of `llama(...)`."""

    def make(**options: object) -> Path:
        source = llama(**options)
        out = tmp_path / f"exported-{source.name}"
        export_model(source, out)
        return out

    return make


class PlainLibrary:
    """Packs by laying values, scales and minimums of each row side by side; what it does with them is nothing."""

    op_table = "PagedAttention=1;QuantLinear=1;Embedding=1;AddRMSNorm=1;GatedActivation=1"
    sha256 = "0" * 64

    def packed_bytes(self, fmt: WeightFormat, shape: tuple[int, int]) -> int:
        rows, columns = shape
        width = {"f32": 4, "f16": 2, "bf16": 2, "i8": 1, "i4": 1}[fmt.kind]
        blocks = 0 if fmt.is_float else columns // fmt.scale_block(columns)
        return rows * (columns * width + 4 * blocks * (1 if fmt.symmetric else 2))

    def layout(self, fmt: WeightFormat, shape: tuple[int, int]) -> str:
        return f"plain-{fmt.kind}@1"

    def pack(self, weights: QuantizedRows) -> NDArray[np.uint8]:
        parts = [weights.values, weights.scales, weights.minimums]
        flat = [np.ascontiguousarray(p).view(np.uint8).reshape(len(p), -1) for p in parts if p is not None]
        return np.concatenate(flat, axis=1).reshape(-1)


@pytest.fixture
def plain_library() -> PlainLibrary:
    return PlainLibrary()
