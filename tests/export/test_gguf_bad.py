"""GGUF files that are damaged, hostile, or no Llama that the converter knows: refused by name, in no time."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from export_support import ReferenceRunner, check_against_oracle
from gguf_files import write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st

from enginebay.export.errors import CheckpointError, ExportError
from enginebay.export.exporter import export_model
from enginebay.export.gguf_header import read_header
from enginebay.export.gguf_model import read_gguf, write_folder

HEADS, HEAD_DIM = 4, 8


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        export_model(path, path.parent / "out")
    assert not (path.parent / "out").exists()
    assert str(path) in str(caught.value)
    assert str(caught.value).isprintable()
    return str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("llama.block_count", None, "llama.block_count is missing; an integer from 1 to 4096"),
        ("llama.block_count", 1.5, "is 1.5; an integer"),
        ("llama.block_count", 10**9, "is 1000000000; an integer from 1 to 4096"),
        ("llama.block_count", 3, "9 tensors are missing: blk.2.attn_norm.weight"),
        ("llama.block_count", 1, "blk.1.attn_norm.weight' is not part of the Llama .* of 1 layers"),
        ("llama.attention.head_count", [4, 4], r"is \[4, 4\]; an integer"),
        ("llama.attention.head_count", 0, "is 0; an integer from 1"),
        ("llama.attention.head_count", -4, "is -4; an integer from 1"),
        ("llama.attention.head_count", True, "is True; an integer"),
        ("llama.attention.head_count", "4", "is '4'; an integer"),
        ("llama.attention.head_count", float("nan"), "is nan; an integer"),
        ("llama.attention.head_count", 5, "head_count_kv is 2; it does not divide 5 heads"),
        ("llama.attention.head_count_kv", 3, "does not divide 4 heads"),
        ("llama.attention.head_count_kv", 8, "integer from 1 to 4"),
        ("llama.attention.head_count_kv", None, r"attn_k.weight' has shape \[16, 32\], .* for \[32, 32\]"),
        ("llama.embedding_length", 30, "is 30; it is no multiple of 4 heads"),
        ("llama.embedding_length", 64, r"token_embd.weight' has shape \[64, 32\], .* for \[64, 64\]"),
        ("llama.attention.key_length", 16, r"attn_q.weight' has shape \[32, 32\], .* for \[64, 32\]"),
        ("llama.attention.key_length", 7, "an even number"),
        ("llama.attention.value_length", 4, "is 4; the length of keys is 8"),
        ("llama.rope.dimension_count", 4, "is 4; the length of heads is 8"),
        ("llama.rope.freq_base", 0.0, "is 0.0; a finite number above 0"),
        ("llama.rope.freq_base", float("inf"), "is inf; a finite number above 0"),
        ("llama.attention.layer_norm_rms_epsilon", -1e-5, "a finite number above 0"),
        ("llama.attention.layer_norm_rms_epsilon", None, "is missing; a finite number above 0"),
        ("llama.vocab_size", 63, "is 63; token_embd.weight has 64 rows"),
        ("llama.expert_count", 4, "llama.expert_count: this converter knows no such Llama"),
        ("llama.rope.scaling.type", "yarn", "llama.rope.scaling.type: this converter"),
        ("llama.\x1b[31m", 1, r"llama.\\x1b\[31m: this converter"),
        ("general.architecture", None, "general.architecture is missing"),
        ("general.type", "adapter", "is 'adapter'; a model is wanted"),
        ("general.alignment", 33, "general.alignment is 33, not a power of two"),
        ("split.count", 2, "split.count is 2; join the parts"),
        ("tokenizer.ggml.eos_token_id", 64, "is 64; an integer from 0 to 63"),
        ("tokenizer.ggml.bos_token_id", -1, "is -1; an integer from 0 to 63"),
        ("tokenizer.ggml.tokens", ["a", "a"], "2 tokens and 64 token types for a vocabulary of 64"),
        ("tokenizer.ggml.tokens", ["a"] * 64, "token 'a' has two ids"),
        ("tokenizer.ggml.tokens", None, "tokenizer.ggml.tokens is missing; a list of str"),
        ("tokenizer.ggml.token_type", [1.5] * 64, "tokenizer.ggml.token_type is .*; a list of int"),
        ("tokenizer.ggml.merges", ["t 1 2"], "merge 't 1 2' is not two tokens"),
        ("tokenizer.ggml.merges", ["\x1b[0m x"], r"Token `.x1b\[0m` out of vocabulary"),
    ],
)
def test_metadata_is_checked_by_name(tmp_path: Path, key: str, value: Any, why: str) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tokenizer="gpt2", meta={key: value})
    with _matching(why):
        raise CheckpointError(refusal(path))


def _matching(why: str) -> Any:
    return pytest.raises(CheckpointError, match=why)


def test_as_many_key_heads_as_heads_is_the_default(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", meta={"llama.attention.head_count_kv": None})
    assert read_gguf(tmp_path / "tiny.gguf").llama.kv_heads == HEADS


def test_tensors_are_checked_by_name(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, drop="blk.1.ffn_up.weight")
    assert "1 tensors are missing: blk.1.ffn_up.weight" in refusal(path)
    write_gguf(path, extra={"blk.0.\x1b[2Jgate": np.ones(32, np.float32)})
    assert r"tensor 'blk.0.\x1b[2Jgate' is not part of the Llama" in refusal(path)
    write_gguf(path, extra={"blk.00.attn_q.bias": np.ones(32, np.float32)})
    assert "blk.00.attn_q.bias' is not part" in refusal(path)
    write_gguf(path, drop="output_norm.weight", extra={"output_norm.weight": np.full(32, np.nan, np.float32)})
    assert "tensor 'output_norm.weight' has NaN or infinity in row 0" in refusal(path)
    write_gguf(path, drop="output_norm.weight", extra={"output_norm.weight": np.ones(32, np.int32)})
    assert "is of kind I32, which the gguf package cannot turn into numbers" in refusal(path)


def llama3_factors(factor: float, theta: float = 10000.0) -> np.ndarray[Any, np.dtype[np.float32]]:
    """As llama.cpp's converter computes them, a frequency at a time."""
    out = []
    for index in range(HEAD_DIM // 2):
        wavelength = 2 * np.pi * theta ** (2 * index / HEAD_DIM)
        smooth = (8192 / wavelength - 1.0) / 3.0
        if wavelength < 8192 / 4:
            out.append(1.0)
        elif wavelength > 8192:
            out.append(factor)
        else:
            out.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(out, np.float32)


def test_llama3_scaled_rope_is_recognised(tmp_path: Path) -> None:
    """The export, with the scaling, is what transformers computes from the config with the scaling."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    path = tmp_path / "tiny.gguf"
    meta = {"llama.rope.freq_base": 500000.0}
    write_gguf(path, "F16", meta=meta, extra={"rope_freqs.weight": llama3_factors(32.0, 500000.0)})
    (tmp_path / "hf").mkdir()
    write_folder(read_gguf(path), tmp_path / "hf")
    config = LlamaConfig.from_json_file(str(tmp_path / "hf" / "config.json"))
    del config.quantization_config
    assert config.rope_parameters["rope_type"] == "llama3"
    assert config.rope_parameters["factor"] == 32.0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", config=config, dtype=torch.float32)
    model.save_pretrained(tmp_path / "oracle")
    check_against_oracle(path, (29, 17), reference=tmp_path / "oracle", make_runner=ReferenceRunner)


@pytest.mark.parametrize(
    ("factors", "why"),
    [
        (np.ones(4, np.float16), r"is F16 of shape \[4\]; F32 \[4\]"),
        (np.ones(3, np.float32), r"is F32 of shape \[3\]"),
        (np.array([1, 1, 2, 3], np.float32), "is not what Llama 3's scaling with factor 3 gives"),
        (np.array([1, 1, 1, np.nan], np.float32), "scaling with factor nan"),
        (np.zeros(4, np.float32), "scaling with factor 0"),
    ],
)
def test_other_scaled_rope_is_refused(tmp_path: Path, factors: Any, why: str) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, extra={"rope_freqs.weight": factors})
    with _matching(why):
        raise CheckpointError(refusal(path))


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def header(keys: list[bytes], tensors: list[bytes] | None = None, version: int = 3) -> bytes:
    tensors = tensors or []
    counts = struct.pack("<IQQ", version, len(tensors), len(keys))
    return b"GGUF" + counts + b"".join(keys) + b"".join(tensors)


def array_key(item: int, count: int, items: bytes = b"") -> bytes:
    return string(b"k") + struct.pack("<IIQ", 9, item, count) + items


def tensor(
    name: bytes, sizes: tuple[int, ...], kind: int = 0, offset: int = 0, axes: int | None = None
) -> bytes:
    axes = len(sizes) if axes is None else axes
    return string(name) + struct.pack(f"<I{len(sizes)}QIQ", axes, *sizes, kind, offset)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "has 0 bytes"),
        (b"GGML" + bytes(40), "it begins with b'GGML'"),
        (header([], version=1), "its version is 1"),
        (header([], version=3 << 24), "it is big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0) + bytes(64), "claims 1152921504606846976 tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60) + bytes(64), "claims 1152921504606846976 keys"),
        (header([array_key(0, 1 << 40)]), "key 'k' claims 1099511627776 items, 0 bytes are left"),
        (header([array_key(8, 1 << 62, bytes(64))]), "claims 4611686018427387904 items, 64 bytes"),
        (header([array_key(9, 1, struct.pack("<IQ", 9, 1) * 5000)]), "nests arrays deeper than 4"),
        (header([array_key(77, 1, bytes(64))]), "item 0 of key 'k' has type 77"),
        (header([string(b"k") + struct.pack("<I", 13)]), "has type 13"),
        (header([struct.pack("<Q", 1 << 63)]), "claims 9223372036854775808 bytes"),
        (header([string(b"\xff") + bytes(8)]), "the name of key 0 is not UTF-8"),
        (header([(string(b"k") + struct.pack("<Ib", 1, 0))] * 2), "key 'k' stands there twice"),
        (header([], [tensor(b"t", (1,) * 5)]), "has 5 axes"),
        (header([], [tensor(b"t", (), axes=0)]), "has 0 axes"),
        (header([], [tensor(b"t", (0, 4))]) + bytes(64), r"has shape \[4, 0\]"),
        (header([], [tensor(b"t", (31,), kind=2)]) + bytes(64), "a row of Q4_0 a multiple of 32"),
        (header([], [tensor(b"t", (1 << 63, 1 << 63))]), "it is cut short"),
        (header([], [tensor(b"t", (1,), kind=999)]) + bytes(64), "of kind 999, which the gguf package"),
        (header([], [tensor(b"t", (1,), offset=4)]) + bytes(64), "no multiple of the alignment 32"),
        (header([], [tensor(b"t", (1,), offset=1 << 63)]) + bytes(64), "it is cut short"),
        (header([], [tensor(b"t", (1,))] * 2) + bytes(64), "tensor 't' stands there twice"),
        (header([], [tensor(b"t", (1,)), tensor(b"u", (1,))]) + bytes(64), "'t' and 'u' overlap"),
    ],
)
def test_headers_that_contradict_themselves(tmp_path: Path, data: bytes, why: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with _matching(why):
        raise CheckpointError(refusal(path))


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = tmp_path / "tiny.gguf"
    write_gguf(whole, tokenizer="gpt2")
    data = whole.read_bytes()
    data = data[: max(tensor.offset + tensor.nbytes for tensor in read_header(whole).tensors)]  # no padding
    path = tmp_path / "cut.gguf"
    for end in range(len(data) - 1, -1, -173):
        path.write_bytes(data[:end])
        with pytest.raises(CheckpointError, match=r"cut short|bytes, a GGUF header|bytes hold fewer"):
            read_header(path)


@settings(deadline=None, max_examples=150)
@given(places=st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 255)), min_size=1, max_size=6))
def test_changed_bytes_end_in_an_export_or_a_refusal(
    tmp_path_factory: pytest.TempPathFactory, places: list[tuple[int, int]]
) -> None:
    folder = tmp_path_factory.mktemp("gguf")
    path = folder / "tiny.gguf"
    write_gguf(path, tokenizer="gpt2")
    data = bytearray(path.read_bytes())
    for at, value in places:
        data[at % len(data)] = value
    path.write_bytes(data)
    said = "an export"
    try:
        write_folder(read_gguf(path), folder)
    except CheckpointError as error:
        said = str(error)
    assert said.isprintable()


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    os.mkfifo(tmp_path / "model" / "pipe.gguf")
    with pytest.raises(CheckpointError, match="is no regular file"):
        export_model(tmp_path / "model", tmp_path / "out")
    with pytest.raises(ExportError, match=r"neither a folder nor a \.gguf file"):
        export_model(tmp_path / "none.gguf", tmp_path / "out")


def test_a_hopeless_file_imports_no_torch(tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(header([array_key(0, 1 << 40)]))
    code = (
        "import sys\nfrom pathlib import Path; from enginebay.export.exporter import export_model\n"
        f"try: export_model(Path({str(path)!r}), Path({str(tmp_path / 'out')!r}))\n"
        "except Exception as error: print(error)\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "claims 1099511627776 items" in done.stdout
