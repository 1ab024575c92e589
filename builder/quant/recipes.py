"""Recipes: which weight format each layer gets. A registry of frozen configurations, extended by
overrides."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

from enginebay.builder.quant.formats import QuantizationError, WeightFormat
from enginebay.builder.quant.gptq import GptqConfig
from enginebay.builder.quant.input_rounding import Float8Inputs
from enginebay.builder.quant.scaling import AwqScaling, SmoothScaling

F32 = WeightFormat("f32")
F16 = WeightFormat("f16")
BF16 = WeightFormat("bf16")
I8 = WeightFormat("i8", 128)  # or the half or quarter of it that divides: see Recipe.format_of
F8 = WeightFormat("f8", 32)
HEAD_I8 = WeightFormat("i8", 32)
I4 = WeightFormat("i4", block=32, symmetric=False)

HEAD = "lm_head"
Role = Literal["linear", "embedding"]


@dataclass(frozen=True)
class Override:
    """Layers whose name matches `pattern` (shell style: layers.0.*, *.mlp.down, lm_head) get `format`."""

    pattern: str
    format: WeightFormat

    @staticmethod
    def parse(text: str) -> Override:
        """`PATTERN=FORMAT`, such as layers.0.*=i8 or *.mlp.down=i4.b32.asym."""
        pattern, equals, key = text.partition("=")
        if not pattern or not equals:
            raise QuantizationError(f"override '{text}' is not PATTERN=FORMAT, such as 'layers.0.*=i8'")
        return Override(pattern, WeightFormat.from_key(key))


@dataclass(frozen=True)
class Rounding:
    """To the nearest point of each block's grid; `shrinks` are factors on the block's range to choose
    from."""

    shrinks: tuple[float, ...] = (1.0,)


# A router is small, and rounding it sends tokens to other experts.
ROUTERS = (Override("*.moe.router", F32), Override("*.moe.shared_gate", F32))


@dataclass(frozen=True)
class Recipe:
    """What a build does with the weights.

    name       what --quant says
    linear     format of every linear layer
    head       format of lm_head, and so of the embedding tied to it
    embedding  format of an embedding with weights of its own; rows are looked up, not multiplied
    cache      format of the key/value cache where --kv-cache is auto, see builder/quant/cache.py
    method     how the weights reach an integer format, as the manifest says it
    scaling    of input channels, folded into what produces them; None: none
    rounding   to the nearest grid point, or GPTQ
    inputs     of linear layers as E4M3; None: as the target's kernels take them
    overrides  exceptions, the first that matches decides
    """

    name: str
    summary: str
    linear: WeightFormat
    head: WeightFormat
    embedding: WeightFormat
    cache: str
    method: str = "rtn"
    scaling: AwqScaling | SmoothScaling | None = None
    rounding: Rounding | GptqConfig = Rounding()
    inputs: Float8Inputs | None = None
    overrides: tuple[Override, ...] = ()

    @property
    def calibrated(self) -> bool:
        """Whether the recipe needs to see the model's activations."""
        return self.fits_weights or self.inputs is not None

    @property
    def fits_weights(self) -> bool:
        """Whether weights are more than rounded to nearest, each block in the grid that reaches it."""
        return self.scaling is not None or self.rounding != Rounding()

    def inputs_of(self, kind: str) -> Float8Inputs | None:
        """How the inputs of a linear layer with weights of `kind` are rounded; None: as the target does."""
        return self.inputs if kind in ("f8", "i4") else None

    def format_of(self, layer: str, shape: tuple[int, int], role: Role = "linear") -> WeightFormat:
        """Format of the layer called `layer` with weights `shape` [N, K]; QuantizationError for a block
        that does not divide K."""
        fmt = self._override(layer)
        if fmt is None:
            fmt = self.embedding if role == "embedding" else self.head if layer == HEAD else self.linear
            if fmt == I8:
                # Kernels work in blocks of up to 128: scales as fine as those cost nothing.
                halves = (replace(fmt, block=block) for block in (128, 64, 32) if shape[1] % block == 0)
                fmt = next(halves, fmt)
        if not fmt.is_float:
            try:
                fmt.scale_block(shape[1])
            except QuantizationError as error:
                raise QuantizationError(f"layer {layer}: {error}") from None
        return fmt

    def head_is_rounded(self, layer: str) -> bool:
        """Whether `layer` is the head in a format of its own: 8 bits need no calibration."""
        return layer == HEAD and self._override(layer) is None and self.head.kind == "i8"

    def with_overrides(self, overrides: tuple[Override, ...]) -> Recipe:
        return replace(self, overrides=overrides + self.overrides)

    def with_blocks(self, block: int | None, symmetric: bool | None) -> Recipe:
        """The recipe with another block size (int4, fp8) or symmetry (int4) of its linear layers."""
        if block is None and symmetric is None:
            return self
        if self.linear.kind not in ("i4", "f8"):
            raise QuantizationError(
                f"recipe {self.name} has no int4 or fp8 layers: block size and symmetry do not apply"
            )
        if self.linear.kind == "f8" and symmetric is not None:
            raise QuantizationError(f"recipe {self.name} has no int4 layers: symmetry does not apply")
        linear = WeightFormat(
            self.linear.kind,
            self.linear.block if block is None else block,
            self.linear.symmetric if symmetric is None else symmetric,
        )
        return replace(self, linear=linear)

    def _override(self, layer: str) -> WeightFormat | None:
        exceptions = (*self.overrides, *ROUTERS)
        return next((o.format for o in exceptions if fnmatchcase(layer, o.pattern)), None)


_CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6)


def _fp8(name: str, summary: str, **options: Any) -> Recipe:
    return Recipe(name, summary, F8, HEAD_I8, HEAD_I8, "fp16", **options)


# The weights' own error leaves the inputs half of 0.5 % of perplexity; a quarter, as w4a8 has, takes more.
_TWICE_OF_FP8 = 0.5
_FP8_GPTQ: dict[str, Any] = {"method": "gptq", "rounding": GptqConfig()}


def _int4(name: str, summary: str, **options: Any) -> Recipe:
    """The head decides between near-equal logits: in int4 it costs SmolLM2 5 % of perplexity, in int8 0.05
    %. Its inputs are rounded in the weights' blocks, so small ones halve the divergence of the whole."""
    return Recipe(name, summary, I4, HEAD_I8, HEAD_I8, "fp16", **options)


RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("fp32", "float32 weights and cache", F32, F32, F32, "fp32"),
        Recipe("fp16", "float16 weights and cache", F16, F16, F16, "fp16"),
        Recipe("bf16", "bfloat16 weights and cache", BF16, BF16, BF16, "bf16"),
        Recipe("int8", "int8 weights, blocks of 128 or the largest that divides", I8, I8, I8, "fp16"),
        _fp8("fp8", "E4M3 weights, blocks of 32, and float inputs; int8 head"),
        _fp8(
            "fp8-w8a8",
            "E4M3 weights by GPTQ, and E4M3 inputs, a scale a token, the largest twice",
            inputs=Float8Inputs(repeated=_TWICE_OF_FP8),
            **_FP8_GPTQ,
        ),
        _fp8(
            "fp8-w8a8-static",
            "as fp8-w8a8, with one input scale a layer from calibration",
            inputs=Float8Inputs(static=True, repeated=_TWICE_OF_FP8),
            **_FP8_GPTQ,
        ),
        Recipe(
            "w8a8",
            "int8 weights and inputs, outliers of the inputs moved into the weights (SmoothQuant)",
            *(I8, I8, I8, "fp16"),
            method="smoothquant",
            scaling=SmoothScaling(),
        ),
        _int4("int4", "int4 weights, blocks of 32 with a minimum; int8 head"),
        _int4("int4-rtn", "int4, rounded to nearest"),
        _int4("int4-gptq", "int4, errors made up for by later columns", method="gptq", rounding=GptqConfig()),
        _int4(
            "int4-awq",
            "int4, channels with large inputs kept finer",
            method="awq",
            scaling=AwqScaling(),
            rounding=Rounding(_CLIPS),
        ),
        _int4("w4a8", "int4 weights as int4, E4M3 inputs as fp8-w8a8", inputs=Float8Inputs()),
    )
}


def recipe(name: str) -> Recipe:
    """The recipe called `name`; QuantizationError listing what there is otherwise."""
    if name not in RECIPES:
        raise QuantizationError(f"quantisation '{name}' is unknown; there are {', '.join(RECIPES)}")
    return RECIPES[name]
