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
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginebay.export.checkpoint import SINGLE
from enginebay.export.errors import CheckpointError
from enginebay.export.gguf_blocks import ROW_BYTES
from enginebay.export.gguf_config import LlamaConfig, llama3_rope, read_config
from enginebay.export.gguf_header import TensorRecord, read_header, shown

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
_ROPE_FACTORS = "rope_freqs.weight"
_FLOATS = {"F32": "F32", "F16": "F16"}
_SHOWN = 4  # of many wrong tensors


@dataclass(frozen=True)
class GgufTensor:
    """A tensor over a mapping of the file."""

    path: Path
    record: TensorRecord

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def kind(self) -> str:
        """As the file says ("Q4_1")."""
        return self.record.kind

    @property
    def shape(self) -> tuple[int, ...]:
        return self.record.shape

    def data(self) -> NDArray[Any]:
        """Floats [N, K], or raw blocks uint8 [N, bytes of a row]."""
        dtype = {"F32": np.float32, "F16": np.float16}.get(self.kind, np.uint8)
        columns = self.record.row_bytes // np.dtype(dtype).itemsize
        return np.memmap(self.path, dtype, "r", self.record.offset, (*self.shape[:-1], columns))

    def numbers(self) -> NDArray[np.float32]:
        """CheckpointError for a kind that holds no weights, and for NaN and infinity."""
        from gguf import dequantize

        try:
            values: NDArray[np.float32] = dequantize(self.data(), self.record.quantization).astype(np.float32)
        except NotImplementedError as error:
            raise CheckpointError(
                f"{self.path}: tensor {shown(self.name)} is of kind {self.kind}, which the gguf package "
                "cannot turn into numbers; export the Hugging Face checkpoint instead"
            ) from error
        self.check_finite(values)
        return values

    def check_finite(self, values: NDArray[Any]) -> None:
        """`values` [N, K] or [N] of this tensor."""
        if np.isfinite(values).all():
            return
        row = int(np.argwhere(~np.isfinite(values))[0][0])
        raise CheckpointError(f"{self.path}: tensor {shown(self.name)} has NaN or infinity in row {row}")


@dataclass(frozen=True)
class GgufModel:
    """The file's metadata by key, and its tensors by name."""

    path: Path
    meta: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @property
    def architecture(self) -> str:
        return str(self.meta.get("general.architecture"))

    @cached_property
    def llama(self) -> LlamaConfig:
        """CheckpointError naming what is wrong with the metadata."""
        embedding = self.tensors.get(_EMBEDDING)
        return read_config(self.path, self.meta, embedding.shape[0] if embedding is not None else 0)

    def weights(self) -> dict[str, GgufTensor]:
        """The tensors that are weights, by Hugging Face's names.

        CheckpointError for one that is missing, of another shape than the metadata says, or that a Llama does
        not have."""
        expected = self._expected_shapes()
        missing = [
            name
            for name in expected
            if name.endswith("weight") and name not in {*self.tensors, "output.weight"}
        ]
        if missing:
            raise CheckpointError(
                f"{self.path}: {len(missing)} tensors are missing: {', '.join(missing[:_SHOWN])}; "
                f"llama.block_count is {self.llama.layers}"
            )
        weights = {}
        for name, tensor in self.tensors.items():
            if name == _ROPE_FACTORS:
                continue
            if name not in expected:
                raise CheckpointError(
                    f"{self.path}: tensor {shown(name)} is not part of the Llama that this converter "
                    f"knows, of {self.llama.layers} layers; export the Hugging Face checkpoint instead"
                )
            hf_name, shape = expected[name]
            if tensor.shape != shape:
                raise CheckpointError(
                    f"{self.path}: tensor {shown(name)} has shape {list(tensor.shape)}, the metadata calls "
                    f"for {list(shape)}"
                )
            weights[hf_name] = tensor
        return weights

    def _expected_shapes(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Hugging Face's name and the shape of each weight, and of each bias there might be."""
        llama = self.llama
        expected: dict[str, tuple[str, tuple[int, ...]]] = {
            name: (hf_name, (llama.hidden,) if "norm" in name else (llama.vocab, llama.hidden))
            for name, hf_name in _MODEL_NAMES.items()
        }
        for layer in range(llama.layers):
            for part, shape in llama.shapes().items():
                at, hf_at = f"blk.{layer}.{part}", f"model.layers.{layer}.{_LAYER_NAMES[part]}"
                expected[f"{at}.weight"] = (f"{hf_at}.weight", shape)
                if len(shape) == 2:
                    expected[f"{at}.bias"] = (f"{hf_at}.bias", shape[:1])
        return expected

    def with_halves(self, tensor: GgufTensor, rows: NDArray[Any]) -> NDArray[Any]:
        """Rows [N, …] of `tensor`, rotary pairs as Hugging Face has them."""
        heads = {"attn_q": self.llama.heads, "attn_k": self.llama.kv_heads}
        part = tensor.name.split(".")[2] if tensor.name.startswith("blk.") else ""
        if part not in heads:
            return rows
        pairs = rows.reshape(heads[part], -1, 2, *rows.shape[1:])  # [heads, D/2, 2, …]
        return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows.shape))

    def config(self) -> dict[str, Any]:
        """config.json. CheckpointError as of `llama`, and for scaled RoPE that is not Llama 3's."""
        config = {
            **self.llama.as_json(),
            "attention_bias": "blk.0.attn_q.bias" in self.tensors,
            "mlp_bias": "blk.0.ffn_up.bias" in self.tensors,
            "tie_word_embeddings": "output.weight" not in self.tensors,
        }
        factors = self.tensors.get(_ROPE_FACTORS)
        if factors is None:
            return config
        if factors.shape != (self.llama.head_dim // 2,) or factors.kind != "F32":
            raise CheckpointError(
                f"{self.path}: tensor '{_ROPE_FACTORS}' is {factors.kind} of shape {list(factors.shape)}; "
                f"F32 [{self.llama.head_dim // 2}] is wanted"
            )
        return config | {"rope_scaling": llama3_rope(self.path, factors.data(), self.llama.theta)}


def read_gguf(path: Path) -> GgufModel:
    """CheckpointError for a file that is none or contradicts itself; see `read_header`."""
    header = read_header(path)
    return GgufModel(path, header.meta, {record.name: GgufTensor(path, record) for record in header.tensors})


def write_folder(model: GgufModel, folder: Path) -> tuple[str, ...]:
    """config.json and model.safetensors of a Llama below `folder`, a tensor at a time; notes for the user.

    CheckpointError for tensors and metadata that a plain Llama does not have."""
    config, weights = model.config(), model.weights()
    kept = {name for name, tensor in weights.items() if _stays(model, tensor)}
    write_json(folder / "config.json", config | {"quantization_config": {"quant_method": "gguf"}})
    entries = [_entry(model, name, tensor, stays=name in kept) for name, tensor in weights.items()]
    write_safetensors(folder / SINGLE, entries)
    counts = Counter(
        tensor.kind for name, tensor in weights.items() if name not in kept and tensor.kind not in _FLOATS
    )
    held = Counter(weights[name].kind for name in kept)
    notes = [f"{count} tensors of {kind} keep their blocks" for kind, count in sorted(held.items())]
    notes += [
        f"{count} tensors of {kind} are read as float32 numbers" for kind, count in sorted(counts.items())
    ]
    return tuple(notes)


def _stays(model: GgufModel, tensor: GgufTensor) -> bool:
    """Whether a linear layer keeps its blocks: of a kind the kernels have."""
    blocks = tensor.kind.lower() in ROW_BYTES and len(tensor.shape) == 2
    return blocks and tensor.name != _EMBEDDING and not _mixed(model, tensor)


def _mixed(model: GgufModel, tensor: GgufTensor) -> bool:
    """Whether tensors of other kinds become one weight with `tensor`."""
    prefix, _, part = tensor.name.removesuffix(".weight").rpartition(".")
    joined = next((group for group in _JOINED if part in group), (part,))
    others = (model.tensors.get(f"{prefix}.{other}.weight") for other in joined)
    return any(other is not None and other.kind != tensor.kind for other in others)


def _entry(model: GgufModel, name: str, tensor: GgufTensor, *, stays: bool) -> Entry:
    """Of the tensor that Hugging Face calls `name`."""
    if stays:
        shape = (tensor.shape[0], tensor.record.row_bytes)
        return Entry(f"{name.removesuffix('weight')}{tensor.kind.lower()}", "U8", shape, tensor, model)
    plain = tensor.kind in _FLOATS and not _mixed(model, tensor)
    return Entry(name, _FLOATS[tensor.kind] if plain else "F32", tensor.shape, tensor, model)


@dataclass(frozen=True)
class Entry:
    """One tensor of a safetensors file, read when it is written."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    tensor: GgufTensor
    model: GgufModel

    def data(self) -> NDArray[Any]:
        if self.dtype == "U8":  # export/gguf_blocks.py checks scales and minimums
            values = self.tensor.data()
        elif self.dtype == _FLOATS.get(self.tensor.kind):
            values = self.tensor.data()
            self.tensor.check_finite(values)
        else:
            values = self.tensor.numbers()
        return self.model.with_halves(self.tensor, values)


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
