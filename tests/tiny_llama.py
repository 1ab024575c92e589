"""What the tests share of their tiny random Llamas: shapes of projections and the checkpoint as written."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file


@dataclass(frozen=True)
class TinyLlama:
    """The sizes of a model; its checkpoint is an ordinary Hugging Face folder."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    vocab: int
    positions: int = 256

    def projections(self) -> Iterator[tuple[str, int, int]]:
        """Name, rows and columns of every linear layer of one decoder layer."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield "self_attn.q_proj", query, self.hidden
        yield "self_attn.k_proj", key, self.hidden
        yield "self_attn.v_proj", key, self.hidden
        yield "self_attn.o_proj", self.hidden, query
        yield "mlp.gate_proj", self.inner, self.hidden
        yield "mlp.up_proj", self.inner, self.hidden
        yield "mlp.down_proj", self.hidden, self.inner

    def save(
        self, folder: Path, tensors: Mapping[str, NDArray[Any]], eos: int | list[int], **config: Any
    ) -> Path:
        """Writes the checkpoint; the dtype it names is the tensors', `config` adds keys or changes them."""
        folder.mkdir(parents=True)
        save_file(dict(tensors), folder / "model.safetensors")
        keys = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "num_hidden_layers": self.layers,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.positions,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "torch_dtype": str(next(iter(tensors.values())).dtype),
        }
        (folder / "config.json").write_text(json.dumps(keys | config))
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
        return folder


def random_weight(rng: np.random.Generator, *shape: int) -> NDArray[np.float32]:
    """Normal, of deviation 1/sqrt(columns): rows keep the size of what they multiply."""
    return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)
