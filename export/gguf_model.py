"""A GGUF file of a Llama as a Hugging Face folder: config, tensors under their names, tokenizer. No torch.

Blocks that the kernels have (Q4_0, Q4_1, Q8_0) stay integers in linear layers, under endings that
export/quantized.py reads; float tensors stay as they are; everything else, and the embedding, becomes
float32, which holds every GGUF format's values.

Sources: the GGUF specification (github.com/ggml-org/ggml/blob/master/docs/gguf.md) for names and metadata;
Llama's rotary pairing: GGUF stores q and k rows with the pairs interleaved, Hugging Face with halves.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginebay.export.checkpoint import SINGLE
from enginebay.export.errors import CheckpointError, ExportError
from enginebay.export.gguf_blocks import ROW_BYTES

# GGUF tensor name of a block → Hugging Face name of the layer's tensor.
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_EMBEDDING = "token_embd.weight"
_MODEL_NAMES = {
    _EMBEDDING: "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
# Tensors that become one weight of the graph: their blocks stay only where all are of one kind.
_JOINED = (("attn_q", "attn_k", "attn_v"), ("ffn_gate", "ffn_up"))
_ROTARY_HEADS = {"attn_q": "llama.attention.head_count", "attn_k": "llama.attention.head_count_kv"}
_FLOATS = {"F32": "F32", "F16": "F16"}
_SPECIAL = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
_READ = {
    *("attention.head_count", "attention.head_count_kv", "attention.layer_norm_rms_epsilon"),
    *("block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size"),
    *("rope.dimension_count", "rope.freq_base", "attention.key_length", "attention.value_length"),
}


@dataclass(frozen=True)
class GgufTensor:
    """`kind` as the file says ("Q4_1"); `data`: raw blocks uint8 [N, bytes of a row], or floats."""

    name: str
    kind: str
    data: NDArray[Any]
    quantization: Any

    def numbers(self) -> NDArray[np.float32]:
        from gguf import dequantize

        values: NDArray[np.float32] = dequantize(self.data, self.quantization).astype(np.float32)
        return values


@dataclass(frozen=True)
class GgufModel:
    """The file's metadata by key, and its tensors over a mapping of the file."""

    path: Path
    meta: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @property
    def architecture(self) -> str:
        return str(self.meta.get("general.architecture"))

    def hf_name(self, name: str) -> str:
        """CheckpointError for a tensor that a Llama does not have."""
        if name in _MODEL_NAMES:
            return _MODEL_NAMES[name]
        prefix, _, rest = name.partition(".")
        layer, _, part = rest.partition(".")
        part, _, suffix = part.partition(".")
        if prefix != "blk" or part not in _LAYER_NAMES or suffix not in ("weight", "bias"):
            raise CheckpointError(
                f"{self.path}: tensor '{name}' is not part of the Llama that this converter knows; "
                "export the Hugging Face checkpoint instead"
            )
        return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{suffix}"

    def with_halves(self, name: str, rows: NDArray[Any]) -> NDArray[Any]:
        """Rows [N, …] of tensor `name`, rotary pairs as Hugging Face has them."""
        part = name.split(".")[2] if name.startswith("blk.") else ""
        if part not in _ROTARY_HEADS:
            return rows
        pairs = rows.reshape(
            int(self.meta[_ROTARY_HEADS[part]]), -1, 2, *rows.shape[1:]
        )  # [heads, D/2, 2, …]
        return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows.shape))

    def config(self) -> dict[str, Any]:
        """config.json. CheckpointError naming metadata that is missing or that no plain Llama has."""
        unknown = sorted(
            key for key in self.meta if key.startswith("llama.") and key.removeprefix("llama.") not in _READ
        )
        if unknown:
            raise CheckpointError(
                f"{self.path}: {', '.join(unknown)}: this converter knows no such Llama; export the Hugging "
                "Face checkpoint instead"
            )
        heads, hidden = self._count("attention.head_count"), self._count("embedding_length")
        vocab = self.tensors[_EMBEDDING].data.shape[0] if _EMBEDDING in self.tensors else 0
        biased = {
            part for part in ("attn_q", "attn_output", "ffn_up") if f"blk.0.{part}.bias" in self.tensors
        }
        ids = {key: self.meta.get(f"tokenizer.ggml.{name}_token_id") for key, name in _SPECIAL.items()}
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": hidden,
            "intermediate_size": self._count("feed_forward_length"),
            "max_position_embeddings": self._count("context_length"),
            "num_attention_heads": heads,
            "num_hidden_layers": self._count("block_count"),
            "num_key_value_heads": int(self.meta.get("llama.attention.head_count_kv", heads)),
            "head_dim": int(self.meta.get("llama.attention.key_length", hidden // heads)),
            "rms_norm_eps": self._number("attention.layer_norm_rms_epsilon"),
            "rope_theta": float(self.meta.get("llama.rope.freq_base", 10000.0)),
            "vocab_size": int(self.meta.get("llama.vocab_size", vocab)),
            "attention_bias": "attn_q" in biased,
            "mlp_bias": "ffn_up" in biased,
            "tie_word_embeddings": "output.weight" not in self.tensors,
            **{key: int(value) for key, value in ids.items() if value is not None},
        }

    def _count(self, key: str) -> int:
        return int(self._number(key))

    def _number(self, key: str) -> float:
        value = self.meta.get(f"llama.{key}")
        if not isinstance(value, int | float):
            raise CheckpointError(f"{self.path}: llama.{key} is {value!r:.60}, not a number")
        return float(value)


def read_gguf(path: Path) -> GgufModel:
    """Maps the file. CheckpointError for one that is none, ExportError where the gguf package is absent."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ExportError(
            f"reading a GGUF file needs the gguf package ({error}): pip install 'enginebay[build]'"
        ) from error
    try:
        reader = GGUFReader(path)
        meta = {name: field.contents() for name, field in reader.fields.items()}
        tensors = {
            t.name: GgufTensor(t.name, t.tensor_type.name, t.data, t.tensor_type) for t in reader.tensors
        }
    except (OSError, ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError) as error:
        raise CheckpointError(f"{path} cannot be read as GGUF: {error}") from error
    return GgufModel(path, meta, tensors)


def write_folder(model: GgufModel, folder: Path) -> tuple[str, ...]:
    """config.json and model.safetensors of a Llama below `folder`, a tensor at a time; notes for the user.

    CheckpointError for tensors and metadata that a plain Llama does not have."""
    config = model.config()
    kept = {name for name, tensor in model.tensors.items() if _stays(model, tensor)}
    write_json(folder / "config.json", config | {"quantization_config": {"quant_method": "gguf"}})
    entries = [_entry(model, tensor, stays=name in kept) for name, tensor in model.tensors.items()]
    write_safetensors(folder / SINGLE, entries)
    counts = Counter(
        tensor.kind
        for name, tensor in model.tensors.items()
        if name not in kept and tensor.kind not in _FLOATS
    )
    held = Counter(model.tensors[name].kind for name in kept)
    notes = [f"{count} tensors of {kind} keep their blocks" for kind, count in sorted(held.items())]
    notes += [
        f"{count} tensors of {kind} are read as float32 numbers" for kind, count in sorted(counts.items())
    ]
    return tuple(notes)


def _stays(model: GgufModel, tensor: GgufTensor) -> bool:
    """Whether a linear layer keeps its blocks: of a kind the kernels have."""
    blocks = tensor.kind.lower() in ROW_BYTES and len(tensor.data.shape) == 2
    return blocks and tensor.name != _EMBEDDING and not _mixed(model, tensor)


def _mixed(model: GgufModel, tensor: GgufTensor) -> bool:
    """Whether tensors of other kinds become one weight with `tensor`."""
    prefix, _, part = tensor.name.removesuffix(".weight").rpartition(".")
    joined = next((group for group in _JOINED if part in group), (part,))
    others = (model.tensors.get(f"{prefix}.{other}.weight") for other in joined)
    return any(other is not None and other.kind != tensor.kind for other in others)


def _entry(model: GgufModel, tensor: GgufTensor, *, stays: bool) -> Entry:
    name, shape = model.hf_name(tensor.name), tuple(int(size) for size in tensor.data.shape)
    if stays:
        return Entry(f"{name.removesuffix('weight')}{tensor.kind.lower()}", "U8", shape, tensor, model)
    if tensor.kind in _FLOATS:
        dtype = "F32" if _mixed(model, tensor) else _FLOATS[tensor.kind]
        return Entry(name, dtype, shape, tensor, model)
    from gguf import GGML_QUANT_SIZES

    values, size = GGML_QUANT_SIZES[tensor.quantization]
    return Entry(name, "F32", (*shape[:-1], shape[-1] // size * values), tensor, model)


@dataclass(frozen=True)
class Entry:
    """One tensor of a safetensors file, read when it is written."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    tensor: GgufTensor
    model: GgufModel

    def data(self) -> NDArray[Any]:
        raw = self.dtype == "U8" or self.dtype == _FLOATS.get(self.tensor.kind)
        return self.model.with_halves(self.tensor.name, self.tensor.data if raw else self.tensor.numbers())


_ITEM_BYTES = {"U8": 1, "F16": 2, "F32": 4}


def write_safetensors(path: Path, entries: Iterable[Entry]) -> None:
    """One tensor in memory at a time."""
    header: dict[str, Any] = {}
    end, ordered = 0, list(entries)
    for entry in ordered:
        size = int(np.prod(entry.shape, dtype=np.int64)) * _ITEM_BYTES[entry.dtype]
        header[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [end, end + size],
        }
        end += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry in ordered:
            file.write(np.ascontiguousarray(entry.data()).tobytes())


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
