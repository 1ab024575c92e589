from __future__ import annotations

import pytest

from enginebay.builder.quant.formats import QuantizationError, WeightFormat
from enginebay.builder.quant.recipes import RECIPES, Override, recipe


def test_an_unknown_recipe_lists_the_known():
    with pytest.raises(QuantizationError) as caught:
        recipe("int3")
    assert str(caught.value) == f"quantisation 'int3' is unknown; there are {', '.join(RECIPES)}"


def test_roles_choose_the_format():
    chosen = recipe("int4")
    assert chosen.format_of("layers.0.mlp.down", (64, 128)) == chosen.linear
    assert chosen.format_of("lm_head", (64, 128)) == chosen.head
    assert chosen.format_of("embed", (64, 128), "embedding") == chosen.embedding


@pytest.mark.parametrize(("columns", "block"), [(1024, 128), (576, 64), (96, 32)])
def test_int8_takes_the_largest_block_that_divides(columns, block):
    assert recipe("int8").format_of("layers.0.mlp.down", (64, columns)) == WeightFormat("i8", block)


def test_int8_without_a_block_that_divides_is_refused():
    with pytest.raises(
        QuantizationError, match="layer lm_head: block size 128 does not divide the layer's 48"
    ):
        recipe("int8").format_of("lm_head", (128, 48))


def test_the_first_override_that_matches_decides():
    f16, i8 = WeightFormat("f16"), WeightFormat("i8")
    chosen = recipe("int4").with_overrides((Override("layers.0.*", f16), Override("*.mlp.down", i8)))
    assert chosen.format_of("layers.0.mlp.down", (64, 128)) == f16
    assert chosen.format_of("layers.1.mlp.down", (64, 128)) == i8
    assert chosen.format_of("layers.1.mlp.gate_up", (64, 128)) == recipe("int4").linear


def test_a_block_that_does_not_divide_names_the_layer():
    chosen = recipe("fp16").with_overrides((Override("lm_head", WeightFormat("i4", 96)),))
    with pytest.raises(
        QuantizationError, match="layer lm_head: block size 96 does not divide the layer's 64"
    ):
        chosen.format_of("lm_head", (128, 64))


def test_fp8_by_row_and_by_block():
    assert WeightFormat.from_key("f8") == WeightFormat("f8") == recipe("fp8-w8a8").with_blocks(0, None).linear
    assert WeightFormat("f8").key == "f8"
    assert WeightFormat("f8").layout_key(96) == "f8.k96"
    assert recipe("fp8-w8a8").with_blocks(64, None).linear == WeightFormat("f8", 64)
    with pytest.raises(QuantizationError, match="recipe fp8-w8a8 has no int4 layers: symmetry"):
        recipe("fp8-w8a8").with_blocks(None, True)
    with pytest.raises(QuantizationError, match="f8 has no minimum"):
        WeightFormat("f8", 32, symmetric=False)


def test_inputs_are_rounded_where_weights_are_f8_or_i4():
    for name in ("fp8-w8a8", "fp8-w8a8-static", "w4a8"):
        chosen = recipe(name)
        kinds = [kind for kind in ("f32", "f16", "bf16", "f8", "i8", "i4") if chosen.inputs_of(kind)]
        assert kinds == ["f8", "i4"]
    assert all(recipe(name).inputs_of("f8") is None for name in ("fp8", "int4", "int8", "w8a8"))
    assert all(recipe(name).calibrated for name in ("fp8-w8a8", "fp8-w8a8-static", "w4a8"))
