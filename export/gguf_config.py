"""A GGUF Llama's metadata as config.json. Every value is checked before anything is computed with it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginebay.export.errors import CheckpointError
from enginebay.export.gguf_header import shown

# What a plain Llama has. Any other llama.* key may change the mathematics, so it is refused.
_READ = {
    *("attention.head_count", "attention.head_count_kv", "attention.layer_norm_rms_epsilon"),
    *("block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size"),
    *("rope.dimension_count", "rope.freq_base", "attention.key_length", "attention.value_length"),
}
_SPECIAL = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
_MOST_SIZE = 1 << 24  # of a width, a context, a vocabulary
_MOST_LAYERS = 1 << 12


@dataclass(frozen=True)
class LlamaConfig:
    """`heads` and `kv_heads` of `head_dim`; `special`: ids by the name that config.json has for them."""

    layers: int
    context: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    eps: float
    theta: float
    special: dict[str, int]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """[N, K], or [N] of a norm, of each tensor of a layer."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "attn_norm": (self.hidden,),
            "attn_q": (q, self.hidden),
            "attn_k": (kv, self.hidden),
            "attn_v": (kv, self.hidden),
            "attn_output": (self.hidden, q),
            "ffn_norm": (self.hidden,),
            "ffn_gate": (self.ffn, self.hidden),
            "ffn_up": (self.ffn, self.hidden),
            "ffn_down": (self.hidden, self.ffn),
        }

    def as_json(self) -> dict[str, Any]:
        """Without what depends on the tensors: biases, a tied head, scaled RoPE."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "max_position_embeddings": self.context,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "rms_norm_eps": self.eps,
            "rope_theta": self.theta,
            "vocab_size": self.vocab,
            **self.special,
        }


class _Meta:
    """Numbers out of the metadata, each within its bounds."""

    def __init__(self, path: Path, meta: Mapping[str, Any]) -> None:
        self._path, self._meta = path, meta

    def count(self, key: str, most: int, default: int | None = None, least: int = 1) -> int:
        value = self._meta.get(key, default)
        # bool is an int to Python; a float such as 1.5 would lose its fraction.
        if type(value) is not int or not least <= value <= most:
            raise self.wrong(key, value, f"an integer from {least} to {most} is wanted")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        value = self._meta.get(key, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise self.wrong(key, value, "a finite number above 0 is wanted")
        return float(value)

    def same(self, key: str, expected: int, what: str) -> None:
        if key in self._meta and self._meta[key] != expected:
            raise self.wrong(
                key, self._meta[key], f"{what} is {expected}; this converter knows no such Llama"
            )

    def wrong(self, key: str, value: Any, why: str) -> CheckpointError:
        says = f"{key} is {shown(value)}" if key in self._meta else f"{key} is missing"
        return CheckpointError(f"{self._path}: {says}; {why}")


def read_config(path: Path, meta: Mapping[str, Any], embedding_rows: int) -> LlamaConfig:
    """CheckpointError naming metadata that is missing, out of bounds, or that no plain Llama has."""
    unknown = sorted(
        key for key in meta if key.startswith("llama.") and key.removeprefix("llama.") not in _READ
    )
    if unknown:
        raise CheckpointError(
            f"{path}: {', '.join(shown(key)[1:-1] for key in unknown[:8])}: this converter knows no such "
            "Llama; export the Hugging Face checkpoint instead"
        )
    read = _Meta(path, meta)
    if meta.get("split.count", 1) not in (0, 1):
        raise read.wrong("split.count", meta["split.count"], "join the parts first: llama-gguf-split --merge")
    if meta.get("general.type", "model") != "model":
        raise read.wrong("general.type", meta["general.type"], "a model is wanted, no adapter or projector")
    heads = read.count("llama.attention.head_count", _MOST_SIZE)
    hidden = read.count("llama.embedding_length", _MOST_SIZE)
    kv_heads = read.count("llama.attention.head_count_kv", heads, heads)
    if heads % kv_heads:
        raise read.wrong("llama.attention.head_count_kv", kv_heads, f"it does not divide {heads} heads")
    if "llama.attention.key_length" not in meta and hidden % heads:
        raise read.wrong("llama.embedding_length", hidden, f"it is no multiple of {heads} heads")
    head_dim = read.count("llama.attention.key_length", _MOST_SIZE, hidden // heads)
    if head_dim % 2:
        raise read.wrong("llama.attention.key_length", head_dim, "RoPE turns pairs: an even number is wanted")
    read.same("llama.attention.value_length", head_dim, "the length of keys")
    read.same("llama.rope.dimension_count", head_dim, "the length of heads")
    vocab = read.count("llama.vocab_size", _MOST_SIZE, embedding_rows or None)
    if embedding_rows and vocab != embedding_rows:
        raise read.wrong("llama.vocab_size", vocab, f"token_embd.weight has {embedding_rows} rows")
    special = {
        key: read.count(f"tokenizer.ggml.{name}_token_id", vocab - 1, least=0)
        for key, name in _SPECIAL.items()
        if f"tokenizer.ggml.{name}_token_id" in meta
    }
    return LlamaConfig(
        layers=read.count("llama.block_count", _MOST_LAYERS),
        context=read.count("llama.context_length", _MOST_SIZE),
        hidden=hidden,
        ffn=read.count("llama.feed_forward_length", _MOST_SIZE),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=vocab,
        eps=read.positive("llama.attention.layer_norm_rms_epsilon"),
        theta=read.positive("llama.rope.freq_base", 10000.0),
        special=special,
    )


def llama3_rope(path: Path, factors: NDArray[np.floating[Any]], theta: float) -> dict[str, Any]:
    """`rope_scaling` for the tensor rope_freqs.weight [head_dim/2]: what each frequency is divided by.

    GGUF keeps the outcome of Llama 3's scaling, not its parameters. All Llama 3 models have the bounds 1
    and 4 and 8192 original positions, so the factor is the largest number; the tensor must be what follows
    from it. CheckpointError otherwise.
    """
    low, high, original = 1.0, 4.0, 8192
    numbers = np.asarray(factors, np.float64)
    factor = float(numbers.max(initial=0.0)) if np.isfinite(numbers).all() else math.nan
    frequency = theta ** -(np.arange(len(numbers)) / len(numbers))
    # How far between the bounds a frequency lies, by the turns it makes in the original positions.
    smooth = np.clip((original * frequency / (2 * math.pi) - low) / (high - low), 0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth) if factor >= 1 else numbers * math.nan
    if not np.allclose(numbers, expected, rtol=1e-5):
        raise CheckpointError(
            f"{path}: tensor 'rope_freqs.weight' is not what Llama 3's scaling with factor {factor:g} "
            "gives; export the Hugging Face checkpoint instead"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
