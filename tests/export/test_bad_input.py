"""Damaged, lying and mismatched checkpoints: a named error, and nothing left on disk."""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from export_support import make_model, save
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from transformers import LlamaConfig

from enginebay.export.checkpoint import open_checkpoint
from enginebay.export.errors import CheckpointError, ExportError
from enginebay.export.exporter import describe, export_model, is_current
from enginebay.export.generic import export_traced
from enginebay.export.spec import ModelSpec
from enginebay.export.spec_json import SpecError

TINY = LlamaConfig(
    vocab_size=50,
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
    tie_word_embeddings=False,
)
WEIGHTS = "model.safetensors"
Q0 = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(make_model(TINY), tmp_path / "model")


def edit_tensors(folder: Path, change: Callable[[dict[str, np.ndarray]], Any]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def edit_header(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header)
    encoded = json.dumps(header).encode()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(encoded)) + encoded + data[8 + length :])


def edit_config(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))


def refused(folder: Path, match: str, error: type[Exception] = CheckpointError) -> None:
    out = folder.parent / "out"
    with pytest.raises(error, match=match):
        export_model(folder, out)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name], "something was left behind"


@pytest.mark.parametrize("keep", [0, 5, 8, 200, -1, -4000])
def test_truncated_weights(folder: Path, keep: int) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[:keep])
    refused(folder, "truncated|not JSON")


HEADER_LIES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "offsets_beyond_the_file": (lambda h: h[Q0].update(data_offsets=[0, 10**12]), "needs 4096 bytes"),
    "shape_and_bytes_disagree": (lambda h: h[Q0].update(shape=[33, 32]), r"\[33, 32\] needs 4224 bytes"),
    "huge_shape": (lambda h: h[Q0].update(shape=[2**62, 2**62]), "needs"),
    "negative_shape": (lambda h: h[Q0].update(shape=[-32, -32]), "not counts"),
    "boolean_shape": (lambda h: h[Q0].update(shape=[True, 32]), "not counts"),
    "unknown_dtype": (lambda h: h[Q0].update(dtype="F7"), "dtype 'F7'"),
    "dtype_is_a_list": (lambda h: h[Q0].update(dtype=[]), r"dtype \[\]; known are F64"),
    "dtype_is_an_object": (lambda h: h[Q0].update(dtype={}), r"dtype \{\}; known are F64"),
    "dtype_is_nothing": (lambda h: h[Q0].update(dtype=None), "dtype None; known are F64"),
    "shape_is_an_object": (lambda h: h[Q0].update(shape={}), "4096"),
    "shape_is_a_number": (lambda h: h[Q0].update(shape=32), "malformed"),
    "no_offsets": (lambda h: h[Q0].pop("data_offsets"), "malformed"),
    "entry_is_no_object": (lambda h: h.update({Q0: 3}), "malformed"),
    "overlap": (
        lambda h: h["model.norm.weight"].update(
            data_offsets=h["model.layers.0.input_layernorm.weight"]["data_offsets"]
        ),
        "begins at byte",
    ),
}


@pytest.mark.parametrize("lie", HEADER_LIES)
def test_lying_headers(folder: Path, lie: str) -> None:
    change, words = HEADER_LIES[lie]
    edit_header(folder, change)
    refused(folder, words)


def test_a_header_longer_than_the_file(folder: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", 2**60) + data[8:])
    refused(folder, "its header claims 1152921504606846976")


def test_missing_weights_and_config(folder: Path, tmp_path: Path) -> None:
    (folder / WEIGHTS).rename(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").unlink()
    refused(folder, "has neither model.safetensors nor")
    (folder / "config.json").unlink()
    refused(folder, "config.json is missing", ExportError)


def test_missing_extra_and_misshaped_tensors(folder: Path) -> None:
    original = (folder / WEIGHTS).read_bytes()
    edit_tensors(folder, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    refused(folder, "lacks 1 tensors.*'model.layers.1.mlp.up_proj.weight'")
    (folder / WEIGHTS).write_bytes(original)
    edit_tensors(
        folder, lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": np.ones(32, np.float32)})
    )
    refused(folder, "1 tensors of the checkpoint are not part.*q_proj.bias")
    (folder / WEIGHTS).write_bytes(original)
    edit_tensors(folder, lambda t: t.update({Q0: np.ones((32, 31), np.float32)}))
    refused(folder, r"q_proj.weight' has shape \[32, 31\], the config calls for \[32, 32\]")
    (folder / WEIGHTS).write_bytes(original)
    edit_tensors(folder, lambda t: t.update({Q0: t[Q0].astype(np.float16)}))
    refused(folder, "become one weight but are F16 and F32")
    (folder / WEIGHTS).write_bytes(original)
    edit_tensors(folder, lambda t: t.update({"lm_head.weight": t["lm_head.weight"].astype(np.int8)}))
    refused(folder, "'lm_head.weight' is I8")


def test_biases_without_their_flag_are_not_dropped(folder: Path) -> None:
    edit_config(folder, attention_bias=True)
    refused(folder, "lacks 8 tensors.*q_proj.bias")


def test_rotary_buffers_are_reported_not_refused(folder: Path, tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(folder, lambda t: t.update({name: np.ones(4, np.float32)}))
    assert export_model(folder, tmp_path / "out").ignored == (name,)


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("equal", [True, False])
def test_heads_are_tied_by_config_and_values(folder: Path, tmp_path: Path, tie: bool, equal: bool) -> None:
    if equal:
        edit_tensors(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].copy()}))
    edit_config(folder, tie_word_embeddings=tie)
    report = export_model(folder, tmp_path / "out")
    assert report.spec.tied_embeddings is equal
    assert ("lm_head.weight" in {weight.name for weight in report.tensors}) is not equal
    assert len(report.notes) == int(equal or tie)


def test_an_untied_head_that_is_absent_is_missing(folder: Path) -> None:
    edit_tensors(folder, lambda t: t.pop("lm_head.weight"))
    refused(folder, "lacks 1 tensors.*'lm_head.weight'")


def shard(folder: Path) -> dict[str, Any]:
    (folder / WEIGHTS).unlink()
    save(make_model(TINY), folder, max_shard_size="20KB")
    index: dict[str, Any] = json.loads((folder / f"{WEIGHTS}.index.json").read_text())
    return index


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda m: m.update({Q0: "model-99999.safetensors"}),
            "model-99999.safetensors is missing: .* names it",
        ),
        (lambda m: m.update({Q0: "../secret.safetensors"}), "not a .safetensors file beside it"),
        (lambda m: m.update({Q0: "weights.bin"}), "not a .safetensors file beside it"),
        (lambda m: m.update({"ghost": m[Q0]}), "places 'ghost' in .*, which does not hold it"),
        (lambda m: m.update({Q0: m["lm_head.weight"], "lm_head.weight": m[Q0]}), "but it is in"),
    ],
)
def test_indexes_that_do_not_match_their_shards(
    folder: Path, change: Callable[[dict[str, str]], Any], words: str
) -> None:
    index = shard(folder)
    change(index["weight_map"])
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
    refused(folder, words)


def test_an_index_that_is_no_index(folder: Path) -> None:
    (folder / f"{WEIGHTS}.index.json").write_text('{"weight_map": 3}')
    refused(folder, "not an index")


def test_a_failed_export_keeps_the_earlier_one(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    report = export_model(folder, out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert is_current(folder, out)
    edit_tensors(folder, lambda t: t.pop("model.norm.weight"))
    assert not is_current(folder, out)
    with pytest.raises(CheckpointError):
        export_model(folder, out)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    edit_tensors(folder, lambda t: t.update({"model.norm.weight": np.full(32, 2.0, np.float32)}))
    again = export_model(folder, out)
    assert is_current(folder, out)
    assert again.parameters == report.parameters
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]


def test_a_short_sidecar_is_not_current(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export_model(folder, out)
    with (out / "weights.bin").open("r+b") as file:
        file.truncate(1000)
    assert not is_current(folder, out)


@pytest.mark.parametrize("text", ["[" * 200_000, '{"schema": 1, "files": 3}', "[]"])
def test_a_damaged_record_is_not_current(folder: Path, tmp_path: Path, text: str) -> None:
    out = tmp_path / "out"
    export_model(folder, out)
    (out / "source.json").write_text(text)
    assert not is_current(folder, out)
    with pytest.raises(SpecError, match="not JSON"):
        ModelSpec.from_json("[" * 200_000)


def test_a_folder_of_the_user_is_not_overwritten(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("mine")
    with pytest.raises(ExportError, match="not an earlier export"):
        export_model(folder, out)
    assert (out / "thesis.txt").read_text() == "mine"
    export_model(folder, out, force=True)
    assert is_current(folder, out)


@pytest.mark.parametrize("out", ["model", "."])
def test_not_even_force_replaces_the_checkpoint(folder: Path, out: str) -> None:
    before = (folder / WEIGHTS).read_bytes()
    for run in (
        lambda place: export_model(folder, place, force=True),
        lambda place: export_traced(folder, place, plugin_library=Path("unused"), force=True),
    ):
        with pytest.raises(ExportError, match="which is read to make it: choose another folder"):
            run(folder.parent / out)
    assert (folder / WEIGHTS).read_bytes() == before
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_dry_run_reads_no_weights_and_writes_nothing(folder: Path, tmp_path: Path) -> None:
    edit_config(folder, tie_word_embeddings=True)
    edit_tensors(folder, lambda t: t.pop("lm_head.weight"))
    size = (folder / WEIGHTS).stat().st_size
    header = open_checkpoint(folder)
    start = min(tensor.offset for tensor in header.tensors.values())
    with (folder / WEIGHTS).open("r+b") as file:
        file.truncate(start)
        file.truncate(size)  # zeros that no one may look at
    report = export_model(folder, tmp_path / "out", dry_run=True)
    assert not (tmp_path / "out").exists()
    described = json.loads(json.dumps(describe(report)))
    assert described["cache_bytes_per_token"] == 2 * 2 * 32 * 4
    assert described["parameters"] == sum(np.prod(t.shape) for t in header.tensors.values())
    assert described["spec"]["vocab_size"] == 50


def test_identity_follows_config_and_headers(folder: Path, tmp_path: Path) -> None:
    first = export_model(folder, tmp_path / "out", dry_run=True).identity
    edit_config(folder, rms_norm_eps=1e-3)
    assert export_model(folder, tmp_path / "out", dry_run=True).identity != first


@pytest.mark.parametrize("name", ["config.json", WEIGHTS])
def test_nesting_without_end_is_refused(folder: Path, name: str) -> None:
    deep = b"[" * 200_000
    (folder / name).write_bytes(deep if name == "config.json" else struct.pack("<Q", len(deep)) + deep)
    refused(folder, "not JSON", ExportError)


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_any_damage_to_a_header_is_named_or_harmless(data: st.DataObject) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}).encode()
    whole = bytearray(struct.pack("<Q", len(header)) + header + bytes(24))
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / WEIGHTS).write_bytes(whole[: data.draw(st.integers(0, len(whole)))])
        try:
            checkpoint = open_checkpoint(Path(place))
        except CheckpointError:
            return
        for tensor in checkpoint.tensors.values():
            assert tensor.offset + tensor.nbytes <= len(whole)
