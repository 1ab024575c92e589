"""Experts that came quantised to integers: read, kept and multiplied as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from export_support import ReferenceRunner, check_against_oracle, make_model, save
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from enginebay.builder.build import BuildConfig, build_engine
from enginebay.builder.quant.text import CalibrationConfig
from enginebay.export.errors import CheckpointError
from enginebay.export.exporter import export_model
from enginebay.export.verify import verify
from enginebay.triton_repo.runtime.ort_engine import EngineOptions, OrtEngine

CONFIG = {
    "vocab_size": 103,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "norm_topk_prob": True,
}
GROUP = 32
CONFIGS: dict[str, dict[str, Any]] = {
    "gptq-sym": {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2", "sym": True},
    "gptq-asym": {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2", "sym": False},
    "int8": {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"a": {"weights": {"type": "int", "num_bits": 8, "symmetric": True}}},
    },
}
CONFIGS["gptq-rows"] = CONFIGS["gptq-sym"]
CONFIGS["fp8-rows"] = {"quant_method": "fp8"}
CONFIGS["fp8-blocks"] = {"quant_method": "fp8", "weight_block_size": [16, 32]}
FORMATS = {
    "gptq-sym": "i4.b32.sym",
    "gptq-rows": "i4.b32.sym",  # of 64 and of 32 inputs
    "gptq-asym": "i4.b32.asym",
    "int8": "i8",
    "fp8-rows": "f8",
    "fp8-blocks": "f8.b32",
}


def words(values: NDArray[np.uint8], axis: int) -> torch.Tensor:
    """4-bit values packed along `axis`, the first lowest."""
    moved = np.moveaxis(values, axis, -1).astype(np.uint32)
    packed = (moved.reshape(*moved.shape[:-1], -1, 8) << np.arange(0, 32, 4, dtype=np.uint32)).sum(-1)
    back = np.moveaxis(packed.astype(np.uint32).view(np.int32), -1, axis)
    return torch.from_numpy(np.ascontiguousarray(back))


def checkpoint(tmp_path: Path, kind: str, *, order: bool = False) -> tuple[Path, Path]:
    """A folder with quantised experts, and one with the numbers they stand for. Of gptq-asym, the down
    projections alone have zeros away from the middle."""
    rng = np.random.default_rng(6)
    plain = save(make_model(hf.Qwen3MoeConfig(**CONFIG)), tmp_path / "plain")
    tensors = load_file(plain / "model.safetensors")
    stored = {name: value for name, value in tensors.items() if ".experts." not in name}
    for name in tensors.keys() - stored.keys():
        (rows, columns), base = tensors[name].shape, name.removesuffix("weight")
        if kind == "int8":
            codes = rng.integers(-127, 128, (rows, columns)).astype(np.int8)
            scales = rng.uniform(0.5, 1.5, (rows, 1)).astype(np.float32) / (74 * columns**0.5)
            stored[name] = torch.from_numpy(codes)
            stored[f"{base}weight_scale"] = torch.from_numpy(scales)
            tensors[name] = torch.from_numpy(codes.astype(np.float32) * scales)
            continue
        if kind.startswith("fp8"):
            block = (1, columns) if kind == "fp8-rows" else (16, 32)
            codes8 = torch.randn(rows, columns).to(torch.float8_e4m3fn)
            tile = torch.rand(rows // block[0], columns // block[1]) / columns**0.5 + 0.01
            stored[name] = codes8
            stored[f"{name}_scale" if kind == "fp8-rows" else f"{name}_scale_inv"] = tile
            spread = tile.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
            tensors[name] = codes8.float() * spread
            continue
        group = columns if kind == "gptq-rows" else GROUP
        groups = columns // group
        codes4 = rng.integers(0, 16, (rows, columns)).astype(np.uint8)
        zeros = np.full((rows, groups), 8, np.uint8)
        if kind == "gptq-asym" and "down" in name:
            zeros = rng.integers(6, 10, (rows, groups)).astype(np.uint8)
        scales = (rng.uniform(0.5, 1.5, (rows, groups)) / (4.6 * columns**0.5)).astype(np.float16)
        wide = np.repeat(scales.astype(np.float32), group, 1)
        values = wide * (codes4.astype(np.float32) - np.repeat(zeros, group, 1).astype(np.float32))
        stored[f"{base}qweight"], stored[f"{base}qzeros"] = words(codes4.T, 0), words(zeros.T, 1)
        stored[f"{base}scales"] = torch.from_numpy(np.ascontiguousarray(scales.T))
        if order:
            stored[f"{base}g_idx"] = torch.from_numpy(np.arange(columns, dtype=np.int32)[::-1] // GROUP)
        tensors[name] = torch.from_numpy(values)
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(stored, folder / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": CONFIGS[kind]}))
    return folder, plain


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_export_is_the_numbers_they_stand_for(tmp_path: Path, kind: str) -> None:
    folder, plain = checkpoint(tmp_path, kind)
    check_against_oracle(folder, (29, 17), reference=plain, make_runner=ReferenceRunner)


@pytest.mark.parametrize("quant", ["int8", "int4-gptq"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_an_engine_keeps_them_whatever_the_recipe(tmp_path: Path, kind: str, quant: str) -> None:
    folder, plain = checkpoint(tmp_path, kind)
    export_model(folder, tmp_path / "exported")
    np.save(tmp_path / "t.npy", np.arange(128).reshape(4, 32) % 103)
    calibration = CalibrationConfig(source=tmp_path / "t.npy")
    report = build_engine(
        tmp_path / "exported", tmp_path / "engine", BuildConfig(quant=quant, calibration=calibration)
    )
    layers = {layer.layer: layer for layer in report.layers}
    for name in ("layers.0.moe.gate_up", "layers.1.moe.down"):
        kept = (layers[name].format.key, layers[name].method, layers[name].max_error)
        assert kept == (FORMATS[kind], "as stored", 0)
    result = verify(OrtEngine(tmp_path / "engine", EngineOptions(num_blocks=32)), plain, tokens=96, window=48)
    assert result.mean_kl < (0.01 if quant == "int8" else 0.2)


def test_an_activation_order_is_refused_with_a_way_out(tmp_path: Path) -> None:
    folder, _ = checkpoint(tmp_path, "gptq-sym", order=True)
    with pytest.raises(CheckpointError, match=r"experts\.0.*activation order .*are not read.*int4-gptq"):
        export_model(folder, tmp_path / "out")
