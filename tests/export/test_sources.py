"""Checkpoints that are not safetensors: pickles without their code, GGUF through transformers."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from export_support import ReferenceRunner, check_against_oracle, engine_runner, make_model, save
from gguf_files import write_gguf
from safetensors.torch import load_file
from transformers import LlamaConfig

from enginebay.export.errors import CheckpointError, ExportError
from enginebay.export.exporter import export_model, is_current
from enginebay.export.verify import verify

TINY = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    tie_word_embeddings=False,
)


def as_pickles(folder: Path, parts: int) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    if parts == 1:
        torch.save(tensors, folder / "pytorch_model.bin")
        return
    weight_map = {}
    for part in range(parts):
        name = f"pytorch_model-{part}.bin"
        chosen = {key: value for index, (key, value) in enumerate(tensors.items()) if index % parts == part}
        torch.save(chosen, folder / name)
        weight_map |= dict.fromkeys(chosen, name)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("parts", [1, 3])
def test_pickles_export_like_safetensors(tmp_path: Path, parts: int) -> None:
    oracle = save(make_model(TINY), tmp_path / "oracle")
    folder = save(make_model(TINY), tmp_path / "model")
    as_pickles(folder, parts)
    check_against_oracle(folder, (29, 17), reference=oracle)
    assert is_current(folder, tmp_path / "model.exported")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")], "scratch was left behind"
    (folder / sorted(path.name for path in folder.glob("*.bin"))[0]).touch()
    assert not is_current(folder, tmp_path / "model.exported")


class Malicious:
    def __reduce__(self) -> Any:
        return Path.write_text, (Path(self.target), "you have been had")  # type: ignore[attr-defined]


def test_a_pickle_that_would_run_code_is_refused_and_does_not(tmp_path: Path) -> None:
    folder = save(make_model(TINY), tmp_path / "model")
    (folder / "model.safetensors").unlink()
    bomb = Malicious()
    bomb.target = str(tmp_path / "had")  # type: ignore[attr-defined]
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"model.norm.weight": bomb}))
    with pytest.raises(CheckpointError, match="cannot be loaded safely"):
        export_model(folder, tmp_path / "out")
    assert not (tmp_path / "had").exists()
    assert not (tmp_path / "out").exists()


def test_a_truncated_pickle_is_refused(tmp_path: Path) -> None:
    folder = save(make_model(TINY), tmp_path / "model")
    as_pickles(folder, 1)
    data = (folder / "pytorch_model.bin").read_bytes()
    (folder / "pytorch_model.bin").write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match="cannot be loaded safely"):
        export_model(folder, tmp_path / "out")


def test_a_gguf_folder_exports_as_transformers_reads_it(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "model"
    folder.mkdir()
    write_gguf(folder / "tiny.gguf")
    oracle = tmp_path / "oracle"
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file="tiny.gguf", dtype=torch.float32)
    del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(oracle)
    check_against_oracle(folder, (29, 17), reference=oracle, make_runner=ReferenceRunner)
    assert (tmp_path / "model.exported" / "tokenizer.json").is_file()
    assert is_current(folder, tmp_path / "model.exported")
    result = verify(engine_runner(tmp_path / "model.exported"), folder, tokens=64, window=32)
    assert result.text
    assert result.max_abs_logit_error < 0.2  # blocks stay integers, whose inputs the kernels round to int8


def test_two_gguf_files_are_ambiguous(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ExportError, match="2 GGUF files"):
        export_model(tmp_path, tmp_path / "out")


def test_a_gguf_file_that_is_none(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "broken.gguf").write_bytes(b"GGUF" + b"\0" * 64)
    with pytest.raises(CheckpointError, match="cannot be read as GGUF"):
        export_model(folder, tmp_path / "out")
