"""Every mixture-of-experts family, and latent attention, against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from export_support import ReferenceRunner, check_against_oracle, make_model, save
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from enginebay.builder.build import BuildConfig, build_engine
from enginebay.builder.quant.text import CalibrationConfig
from enginebay.export.errors import ExportError
from enginebay.export.exporter import export_model
from enginebay.export.stepping import Stepper, Stream
from enginebay.export.verify import verify
from enginebay.triton_repo.runtime.ort_engine import EngineOptions, OrtEngine

SMALL: dict[str, Any] = {
    "vocab_size": 103,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN = {"moe_intermediate_size": 20, "num_experts": 7, "num_experts_per_tok": 3}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 12,
    "moe_intermediate_size": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 1e4,
    "mscale": 0.707,
    "mscale_all_dim": 1.0,
}

MODELS: dict[str, tuple[type, dict[str, Any]]] = {
    "mixtral": (hf.MixtralConfig, {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral_window": (
        hf.MixtralConfig,
        {"num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": 9, "head_dim": 12},
    ),
    "qwen2_moe": (hf.Qwen2MoeConfig, {**QWEN, "shared_expert_intermediate_size": 28}),
    "qwen2_moe_renormalised": (
        hf.Qwen2MoeConfig,
        {
            **QWEN,
            "shared_expert_intermediate_size": 28,
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_moe": (hf.Qwen3MoeConfig, {**QWEN, "head_dim": 10, "mlp_only_layers": [1]}),
    "qwen3_moe_renormalised": (
        hf.Qwen3MoeConfig,
        {**QWEN, "head_dim": 8, "norm_topk_prob": True, "attention_bias": True},
    ),
    "olmoe": (hf.OlmoeConfig, {"num_experts": 6, "num_experts_per_tok": 2, "attention_bias": True}),
    "olmoe_renormalised": (
        hf.OlmoeConfig,
        {"num_experts": 5, "num_experts_per_tok": 3, "norm_topk_prob": True, "tie_word_embeddings": True},
    ),
    "gpt_oss": (
        hf.GptOssConfig,
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "head_dim": 10,
            "sliding_window": 8,
            "swiglu_limit": 1.5,
            "rope_parameters": {**YARN, "mscale": None, "mscale_all_dim": None, "truncate": False},
        },
    ),
    "deepseek_v2": (
        hf.DeepseekV2Config,
        {**LATENT, "q_lora_rank": None, "topk_method": "greedy", "routed_scaling_factor": 1.3},
    ),
    "deepseek_v2_groups": (
        hf.DeepseekV2Config,
        {
            **LATENT,
            "q_lora_rank": 14,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "attention_bias": True,
            "mlp_bias": True,
            "routed_scaling_factor": 3.0,
            "rope_parameters": YARN,
        },
    ),
    "deepseek_v3": (
        hf.DeepseekV3Config,
        {**LATENT, "q_lora_rank": 14, "n_group": 4, "topk_group": 2, "rope_parameters": YARN},
    ),
    "deepseek_v3_halves": (
        hf.DeepseekV3Config,
        {
            **LATENT,
            "q_lora_rank": 14,
            "n_group": 1,
            "topk_group": 1,
            "rope_interleave": False,
            "norm_topk_prob": False,
        },
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_ragged_steps_match_transformers(name: str, tmp_path: Path) -> None:
    kind, changes = MODELS[name]
    folder = save(make_model(kind(**{**SMALL, **changes})), tmp_path / "model")
    check_against_oracle(folder, (29, 41, 9, 17))


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3"])
def test_the_canonical_graph_alone_matches_transformers(name: str, tmp_path: Path) -> None:
    kind, changes = MODELS[name]
    folder = save(make_model(kind(**{**SMALL, **changes})), tmp_path / "model")
    check_against_oracle(folder, (29, 17), make_runner=ReferenceRunner)


def test_mxfp4_experts_become_the_bfloat16_they_stand_for(tmp_path: Path) -> None:
    changes = {"hidden_size": 64, "intermediate_size": 32, "num_local_experts": 3, "num_experts_per_tok": 2}
    model = make_model(
        hf.GptOssConfig(**{**SMALL, **changes, "head_dim": 8, "num_hidden_layers": 2, "layer_types": None})
    )
    packed: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, columns, rows = parameter.shape
            packed[f"{name}_blocks"] = torch.randint(
                0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8
            )
            packed[f"{name}_scales"] = torch.randint(
                122, 126, (experts, rows, columns // 32), dtype=torch.uint8
            )
            values = convert_moe_packed_tensors(
                packed[f"{name}_blocks"], packed[f"{name}_scales"], dtype=torch.float32
            )
            parameter.data.copy_(values)
    oracle = save(model, tmp_path / "oracle", torch.bfloat16)
    folder = tmp_path / "model"
    folder.mkdir()
    tensors = load_file(oracle / "model.safetensors")
    kept = {name: value for name, value in tensors.items() if f"{name}_blocks" not in packed}
    save_file({**kept, **packed}, folder / "model.safetensors")
    config = json.loads((oracle / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    report = check_against_oracle(folder, (29, 17), reference=oracle)
    assert {weight.dtype for weight in report.tensors if "blocks" in weight.name} == {"BF16"}


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes'"),
        ({"quant_method": "mxfp4"}, "lacks .*experts.0.w1.weight|not part of a Mixtral"),
    ],
)
def test_another_quantisation_is_refused_by_name(table: dict[str, str], words: str, tmp_path: Path) -> None:
    config = hf.MixtralConfig(**{**SMALL, "num_local_experts": 2, "num_hidden_layers": 1})
    folder = save(make_model(config), tmp_path / "m")
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "quantization_config": table}))
    if table["quant_method"] == "mxfp4":
        tensors = load_file(folder / "model.safetensors")
        name = "model.layers.0.block_sparse_moe.experts.0.w1.weight"
        tensors[f"{name}_blocks"] = tensors.pop(name).to(torch.uint8)
        save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ExportError, match=words):
        export_model(folder, tmp_path / "out")


def test_fp8_checkpoints_of_deepseek_v3(tmp_path: Path) -> None:
    """Blocks of E4M3 with a scale each, for every linear layer and expert.

    The oracle holds what they stand for.
    """
    kind, changes = MODELS["deepseek_v3"]
    oracle = save(make_model(kind(**{**SMALL, **changes})), tmp_path / "oracle", torch.bfloat16)
    tensors, stored = load_file(oracle / "model.safetensors"), {}
    for name, value in tensors.items():
        if value.ndim != 2 or (not name.endswith("_proj.weight") and "kv_a_proj" not in name):
            stored[name] = value
            continue
        blocks = [-(-size // 16) for size in value.shape]
        padded = torch.zeros(blocks[0] * 16, blocks[1] * 16)
        padded[: value.shape[0], : value.shape[1]] = value.float()
        tiles = padded.reshape(blocks[0], 16, blocks[1], 16)
        scales = (tiles.abs().amax(dim=(1, 3)) / 448).clamp(min=1e-12)
        codes = (tiles / scales[:, None, :, None]).to(torch.float8_e4m3fn)
        real = (codes.float() * scales[:, None, :, None]).reshape(padded.shape)
        rows, columns = value.shape
        stored[name] = codes.reshape(padded.shape)[:rows, :columns].contiguous()
        stored[f"{name}_scale_inv"] = scales.contiguous()
        tensors[name] = real[:rows, :columns].to(torch.bfloat16).contiguous()
    save_file(tensors, oracle / "model.safetensors", metadata={"format": "pt"})
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(stored, folder / "model.safetensors")
    config = json.loads((oracle / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    (folder / "config.json").write_text(json.dumps(config))
    report = check_against_oracle(folder, (29, 17), reference=oracle)
    assert any("experts" in weight.name for weight in report.tensors)


def test_prediction_heads_beyond_the_last_layer_are_reported(tmp_path: Path) -> None:
    kind, changes = MODELS["deepseek_v3"]
    folder = save(make_model(kind(**{**SMALL, **changes})), tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    extra = "model.layers.3.eh_proj.weight"
    save_file({**tensors, extra: torch.ones(4, 4)}, folder / "model.safetensors")
    assert export_model(folder, tmp_path / "out").ignored == (extra,)


@pytest.mark.parametrize(("quant", "kl"), [("int8", 1e-3), ("int4", 0.1), ("fp8-w8a8", 0.1), ("w4a8", 0.1)])
def test_quantised_experts_stay_near_the_model(quant: str, kl: float, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "intermediate_size": 64, "head_dim": 16}
    folder = save(make_model(hf.Qwen3MoeConfig(**{**SMALL, **QWEN, **sizes})), tmp_path / "model")
    export_model(folder, tmp_path / "exported")
    np.save(tmp_path / "t.npy", np.random.default_rng(2).integers(0, 103, (4, 48)))
    config = BuildConfig(quant=quant, calibration=CalibrationConfig(source=tmp_path / "t.npy"))
    built = build_engine(tmp_path / "exported", tmp_path / "engine", config)
    formats = {layer: record.format for layer, record in built.manifest.quantization.layers.items()}
    assert formats["layers.0.moe.router"] == "f32", "a rounded router sends tokens to other experts"
    kinds = {"int8": "i8", "int4": "i4", "fp8-w8a8": "f8", "w4a8": "i4"}
    assert formats["layers.0.moe.down"].startswith(kinds[quant])
    engine = OrtEngine(tmp_path / "engine", EngineOptions(num_blocks=32, threads=2))
    result = verify(engine, folder, tokens=192, window=48)
    assert 1e-9 < result.mean_kl < kl


@pytest.mark.parametrize("quant", ["fp32", "int8"])
@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_moe"])
def test_a_token_gets_the_same_bits_alone_and_in_company(name: str, quant: str, tmp_path: Path) -> None:
    kind, changes = MODELS[name]
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "intermediate_size": 64}
    latent = (
        {"q_lora_rank": 32, "kv_lora_rank": 32, "v_head_dim": 8}
        if name == "deepseek_v3"
        else {"head_dim": 16}
    )
    folder = save(make_model(kind(**{**SMALL, **changes, **sizes, **latent})), tmp_path / "model")
    export_model(folder, tmp_path / "exported")
    build_engine(tmp_path / "exported", tmp_path / "engine", BuildConfig(quant=quant, block_size=4))
    rng = np.random.default_rng(7)
    sequences = [rng.integers(0, 103, length).tolist() for length in (23, 9, 31)]

    def engine() -> OrtEngine:
        return OrtEngine(tmp_path / "engine", EngineOptions(num_blocks=64, threads=2))

    together = Stepper(engine()).step([(Stream(tokens), len(tokens)) for tokens in sequences])
    for tokens, expected in zip(sequences, together, strict=True):
        stepper, stream = Stepper(engine()), Stream(tokens)
        counts = [1, 2, 5, *[1] * (len(tokens) - 8)]
        parts = [stepper.step([(stream, count)])[0].copy() for count in counts]
        np.testing.assert_array_equal(np.concatenate(parts), expected)
