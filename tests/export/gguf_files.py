"""Random GGUF files of a tiny Llama, for tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from enginebay.export.gguf_blocks import BLOCK

Edit = Callable[[str, NDArray[Any]], NDArray[Any]]


def write_gguf(
    path: Path,
    kind: str = "Q8_0",
    kinds: Mapping[str, str] | None = None,
    *,
    tied: bool = False,
    tokenizer: str = "llama",
    meta: Mapping[str, Any] | None = None,
    edit: Edit | None = None,
    extra: Mapping[str, NDArray[Any]] | None = None,
    drop: str | None = None,
) -> None:
    """Hidden 32, 4 heads, 2 of keys; matrices of `kind`, or as `kinds` says by the ending of their names.

    `edit` changes the raw blocks of a matrix; `meta` adds or changes metadata and takes it away where it says
    None, `extra` adds tensors, `drop` leaves one out.
    """
    rng = np.random.default_rng(3)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(64)
    tokens = ["<unk>", "<s>", "</s>", "t", "1", "t1", *(f"x{index}" for index in range(58))]
    writer.add_tokenizer_model(tokenizer)
    if tokenizer == "gpt2":
        writer.add_tokenizer_pre("smollm")
        writer.add_token_merges(["t 1"])
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * 64)
    writer.add_token_types([3, 3, 3] + [1] * 61)
    for key, token in (("bos", 1), ("eos", 2), ("unk", 0)):
        getattr(writer, f"add_{key}_token_id")(token)

    for key, value in (meta or {}).items():
        writer.kv_data[0].pop(key, None)
        if isinstance(value, list | str | bool | float):
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
        elif value is not None:
            writer.add_key_value(key, value, gguf.GGUFValueType.INT64)

    def add(name: str, *shape: int) -> None:
        if name == drop:
            return
        values = (rng.normal(size=shape) / shape[-1] ** 0.5).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(name, values * 0.2 + 1)
            return
        chosen = next((k for end, k in (kinds or {}).items() if name.endswith(f"{end}.weight")), kind)
        if chosen == "F16":
            writer.add_tensor(name, values.astype(np.float16))
            return
        assert shape[-1] % BLOCK == 0
        quantization = gguf.GGMLQuantizationType[chosen]
        raw = gguf.quants.quantize(values, quantization)
        writer.add_tensor(name, raw if edit is None else edit(name, raw), raw_dtype=quantization)

    add("token_embd.weight", 64, 32)
    add("output_norm.weight", 32)
    if not tied:
        add("output.weight", 64, 32)
    for layer in range(2):
        at = f"blk.{layer}."
        add(at + "attn_norm.weight", 32)
        add(at + "ffn_norm.weight", 32)
        add(at + "attn_q.weight", 32, 32)
        add(at + "attn_k.weight", 16, 32)
        add(at + "attn_v.weight", 16, 32)
        add(at + "attn_output.weight", 32, 32)
        add(at + "ffn_gate.weight", 64, 32)
        add(at + "ffn_up.weight", 64, 32)
        add(at + "ffn_down.weight", 32, 64)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
