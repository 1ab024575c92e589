"""Overrides must name layers that there are."""

from __future__ import annotations

import pytest
from onnx_ir.passes.common import ShapeInferencePass

from enginebay.builder.build import BuildConfig, build_engine
from enginebay.builder.exported import read_exported
from enginebay.builder.quant.formats import QuantizationError
from enginebay.builder.quant.overrides import layer_names
from enginebay.builder.quant.recipes import Override

LAYERS = [
    f"layers.{layer}.{part}"
    for layer in range(2)
    for part in ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.down")
]


@pytest.mark.parametrize("tied", [True, False])
def test_names_are_those_the_engine_records(exported, tmp_path, tied):
    folder = exported(tied=tied)
    model = read_exported(folder).model
    ShapeInferencePass()(model)
    names = layer_names(model.graph)
    assert sorted(names) == sorted([*LAYERS, "lm_head", *([] if tied else ["embed"])])
    report = build_engine(folder, tmp_path / "engine", BuildConfig(quant="fp32"))
    assert sorted(report.manifest.quantization.layers) == sorted(names)


@pytest.mark.parametrize("pattern", ["layers.7.*", "mlp.down", "embed", "lm_heads", "LAYERS.0.*", "["])
def test_a_pattern_that_matches_nothing_is_refused_with_names(exported, tmp_path, pattern):
    overrides = (Override.parse("lm_head=f16"), Override.parse(f"{pattern}=i8"))
    with pytest.raises(QuantizationError) as caught:
        build_engine(exported(tied=True), tmp_path / "engine", BuildConfig(overrides=overrides))
    said = str(caught.value)
    assert said.startswith(f"override '{pattern}=i8' matches no layer")
    assert "layers.0.attention.qkv" in said
    assert said.endswith("lm_head")
    assert not (tmp_path / "engine").exists()


def test_the_first_that_matches_decides(exported, tmp_path):
    overrides = tuple(map(Override.parse, ("*.mlp.down=f16", "layers.0.*=i8.b32", "*.mlp.*=bf16")))
    report = build_engine(
        exported(), tmp_path / "engine", BuildConfig(quant="int4", overrides=overrides, evaluate=0)
    )
    formats = {name: layer.format for name, layer in report.manifest.quantization.layers.items()}
    assert formats["layers.0.mlp.down"] == "f16"
    assert formats["layers.0.mlp.gate_up"] == "i8.b32"
    assert formats["layers.1.mlp.gate_up"] == "bf16"
    assert formats["layers.1.attention.out"] == "i4.b32.asym"
