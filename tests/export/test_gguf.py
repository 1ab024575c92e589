"""GGUF Llamas: blocks kept as they are, read without torch, and damaged files refused by name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from export_support import ReferenceRunner, check_against_oracle
from gguf_files import write_gguf
from numpy.typing import NDArray

from enginebay.builder.build import BuildConfig, build_engine
from enginebay.builder.exported import read_exported
from enginebay.builder.quant.stored import stored_weights
from enginebay.builder.quant.text import CalibrationConfig
from enginebay.export.errors import CheckpointError
from enginebay.export.exporter import export_model, is_current
from enginebay.export.gguf_blocks import ROW_BYTES, unpack_blocks
from enginebay.export.verify import verify
from enginebay.triton_repo.runtime.ort_engine import EngineOptions, OrtEngine

KINDS = {"Q4_0": "i4.b32.sym", "Q4_1": "i4.b32.asym", "Q8_0": "i8.b32"}


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_stand_for_what_the_gguf_package_says(kind: str) -> None:
    rng = np.random.default_rng()
    quantization = gguf.GGMLQuantizationType[kind]
    raw = gguf.quants.quantize(rng.normal(size=(9, 96)).astype(np.float32), quantization)
    assert raw.shape[1] == 3 * ROW_BYTES[kind.lower()]
    blocks = unpack_blocks(kind.lower(), raw)
    zero = 8 if kind == "Q4_0" else 0
    values = (blocks.values.astype(np.float32).reshape(9, 3, 32) - zero) * blocks.scales[:, :, None]
    if blocks.minimums is not None:
        values += blocks.minimums[:, :, None]
    np.testing.assert_array_equal(values.reshape(9, 96), gguf.quants.dequantize(raw, quantization))


def oracle_of(path: Path, folder: Path) -> Path:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(folder)
    return folder


def check_against_transformers(path: Path, folder: Path) -> None:
    """By ONNX's own evaluator: the engine's kernels would round the inputs of stored integers."""
    oracle = oracle_of(path, folder / "oracle")
    check_against_oracle(path, (29, 17), reference=oracle, make_runner=ReferenceRunner)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_the_export_is_what_transformers_reads(tmp_path: Path, kind: str, tied: bool) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, kind, tied=tied)
    check_against_transformers(path, tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_keeps_the_blocks(tmp_path: Path, kind: str) -> None:
    """Whatever the recipe; gate and up, and q, k and v, become one weight each."""
    path, exported = tmp_path / "tiny.gguf", tmp_path / "exported"
    write_gguf(path, kind)
    report = export_model(path, exported)
    assert f"15 tensors of {kind} keep their blocks" in report.notes
    np.save(tmp_path / "t.npy", np.arange(64).reshape(2, 32))
    config = BuildConfig(quant="int4-gptq", calibration=CalibrationConfig(source=tmp_path / "t.npy"))
    layers = {layer.layer: layer for layer in build_engine(exported, tmp_path / "engine", config).layers}
    for name in ("layers.0.attention.qkv", "layers.1.mlp.gate_up", "layers.1.mlp.down", "lm_head"):
        assert (layers[name].method, layers[name].max_error) == ("as stored", 0)
    assert layers["layers.1.mlp.down"].format.key == KINDS[kind]


def test_blocks_that_share_an_input_but_not_a_kind_become_numbers(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "Q4_1", {"attn_v": "Q8_0", "ffn_up": "F16", "ffn_down": "Q5_0"})
    check_against_transformers(path, tmp_path)
    source = read_exported(tmp_path / "tiny.gguf.exported")
    kept = {
        node.name for node in source.model.graph if node.op_type == "Gemm" and stored_weights(node.inputs[1])
    }
    assert kept == {"layers.0.attention.out", "layers.1.attention.out", "lm_head"}


def test_exporting_needs_no_torch(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "Q4_1", tokenizer="gpt2")
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from pathlib import Path; from enginebay.export.exporter import export_model\n"
        f"export_model(Path({str(path)!r}), Path({str(tmp_path / 'out')!r}))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert is_current(path, tmp_path / "out")
    path.touch()
    assert not is_current(path, tmp_path / "out")
    code = code.replace("/out'", "/other'").replace("tiny.gguf", "llama.gguf")
    write_gguf(tmp_path / "llama.gguf", "Q4_1")
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert "tokenizer 'llama' needs torch and transformers" in done.stderr


def spoilt(at: str, number: float, byte: int) -> Any:
    """The float16 at `byte` of a row's first block, in row 5 of the tensors whose names end in `at`."""

    def edit(name: str, raw: NDArray[Any]) -> NDArray[Any]:
        if name.endswith(at):
            raw = raw.copy()
            raw[5, byte : byte + 2] = np.array([number], np.float16).view(np.uint8)
        return raw

    return edit


@pytest.mark.parametrize("number", [np.nan, np.inf])
@pytest.mark.parametrize(("byte", "what"), [(0, "scale"), (2, "minimum")])
def test_numbers_that_are_not_finite_are_named(tmp_path: Path, number: float, byte: int, what: str) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "Q4_1", edit=spoilt("1.ffn_down.weight", number, byte))
    with pytest.raises(
        CheckpointError, match=rf"layers\.1\.mlp\.down.*the {what} of row 5, block 0 is {number}"
    ):
        export_model(path, tmp_path / "out")


@pytest.mark.parametrize("number", [0.0, -0.25])
def test_scales_that_ggml_writes_are_taken(tmp_path: Path, number: float) -> None:
    """0 of a block without extent; Q4_0's are negative where the largest weight is positive."""
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "Q4_0", edit=spoilt("1.ffn_down.weight", number, 0))
    check_against_transformers(path, tmp_path)


def test_an_engine_is_verified_against_the_file(tmp_path: Path) -> None:
    path, engine = tmp_path / "tiny.gguf", tmp_path / "engine"
    write_gguf(path, "Q8_0")
    export_model(path, tmp_path / "exported")
    build_engine(tmp_path / "exported", engine, BuildConfig(quant="fp32"))
    result = verify(OrtEngine(engine, EngineOptions(num_blocks=32)), path, tokens=64, window=32)
    assert result.text
    assert result.mean_kl < 0.01
