"""Recipes: which weight format each layer gets. A registry of frozen configurations, extended by
overrides."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal

from enginebay.builder.quant.formats import QuantizationError, WeightFormat

F32 = WeightFormat("f32")
F16 = WeightFormat("f16")
BF16 = WeightFormat("bf16")
I8 = WeightFormat("i8")
I4 = WeightFormat("i4", block=32, symmetric=False)

HEAD = "lm_head"
Role = Literal["linear", "embedding"]


@dataclass(frozen=True)
class Override:
    """Layers whose name matches `pattern` (shell style: layers.0.*, *.mlp.down, lm_head) get `format`."""

    pattern: str
    format: WeightFormat


@dataclass(frozen=True)
class Recipe:
    """What a build does with the weights.

    name       what --quant says
    linear     format of every linear layer
    head       format of lm_head, and so of the embedding tied to it
    embedding  format of an embedding with weights of its own; rows are looked up, not multiplied
    cache      dtype of the key/value cache: float32, float16 or bfloat16
    overrides  exceptions, the first that matches decides
    """

    name: str
    summary: str
    linear: WeightFormat
    head: WeightFormat
    embedding: WeightFormat
    cache: str
    overrides: tuple[Override, ...] = ()

    def format_of(self, layer: str, shape: tuple[int, int], role: Role = "linear") -> WeightFormat:
        """Format of the layer called `layer` with weights `shape` [N, K]; refuses a block that does not
        divide K."""
        fmt = next((o.format for o in self.overrides if fnmatchcase(layer, o.pattern)), None)
        if fmt is None:
            fmt = self.embedding if role == "embedding" else self.head if layer == HEAD else self.linear
        if not fmt.is_float:
            try:
                fmt.scale_block(shape[1])
            except QuantizationError as error:
                raise QuantizationError(f"layer {layer}: {error}") from None
        return fmt

    def with_overrides(self, overrides: tuple[Override, ...]) -> Recipe:
        return replace(self, overrides=overrides + self.overrides)


RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("fp32", "float32 weights and cache", F32, F32, F32, "float32"),
        Recipe("fp16", "float16 weights and cache", F16, F16, F16, "float16"),
        Recipe("bf16", "bfloat16 weights and cache", BF16, BF16, BF16, "bfloat16"),
        Recipe("int8", "int8 weights, a scale for each row", I8, I8, I8, "float16"),
        # The head decides between near-equal logits: in int4 it costs SmolLM2 5 % of perplexity, in int8
        # 0.05 %.
        Recipe("int4", "int4 weights, blocks of 32 with a minimum; int8 head", I4, I8, I8, "float16"),
    )
}


def recipe(name: str) -> Recipe:
    """The recipe called `name`; QuantizationError listing what there is otherwise."""
    if name not in RECIPES:
        raise QuantizationError(f"quantisation '{name}' is unknown; there are {', '.join(RECIPES)}")
    return RECIPES[name]
