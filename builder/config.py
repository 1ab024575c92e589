"""What to build, as plain frozen data."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

from enginebay.builder.manifest import COUNT_MAX
from enginebay.builder.quant.recipes import Override
from enginebay.builder.quant.text import CalibrationConfig


class BuildError(ValueError):
    """An engine that cannot be built as asked. The message names the option or the folder."""


@dataclass(frozen=True)
class BuildConfig:
    """What to build.

    target           see builder/targets
    quant            name of a recipe, see builder/quant/recipes.py
    weight_block     weights that share a scale, in int4 layers; None: the recipe's
    weight_symmetric int4 without a minimum beside each scale; None: the recipe's
    overrides        exceptions by layer name, the first that matches decides
    bits             average bits a weight of the linear layers: formats are searched for; None: as the
                     recipe says
    evaluate         tokens of the text not calibrated on to measure perplexity with; 0: not measured
    calibration      what a recipe that looks at activations looks at
    max_batch        sequences of a step
    max_step_tokens  tokens of a step, all sequences together
    max_sequence     tokens of prompt and output; None: the model's, at most 8192
    block_size       tokens of a cache block
    kv_cache         format of the key/value cache, see builder/quant/cache.py; auto: the recipe's
    cache_ages       of kv_cache tiers: how many newer tokens those of a block have when it becomes int8, and
                     when it becomes int4
    """

    target: str = "ort-cpu"
    quant: str = "int4"
    weight_block: int | None = None
    weight_symmetric: bool | None = None
    overrides: tuple[Override, ...] = ()
    bits: float | None = None
    evaluate: int = 0
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)
    max_batch: int = 64
    max_step_tokens: int = 2048
    max_sequence: int | None = None
    block_size: int = 16
    kv_cache: str = "auto"
    cache_ages: tuple[int, int] = (256, 1024)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as the manifest records it."""
        return dict(json.loads(json.dumps(dataclasses.asdict(self), default=str)))

    def __post_init__(self) -> None:
        for name in ("max_batch", "max_step_tokens", "max_sequence", "block_size"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= COUNT_MAX:
                raise BuildError(f"{name} is {value}; it must be between 1 and {COUNT_MAX}")
        if not 0 < self.cache_ages[0] < self.cache_ages[1] <= COUNT_MAX:
            raise BuildError(f"cache_ages are {self.cache_ages}; they are tokens, at least 1, and ascend")
        if self.bits is not None and not 1 <= self.bits <= 32:
            raise BuildError(f"bits is {self.bits:g}; weights take 1 to 32")
        if self.evaluate < 0:
            raise BuildError(f"evaluate is {self.evaluate}; it is a number of tokens")
        if self.max_step_tokens < self.max_batch:
            raise BuildError(
                f"max_step_tokens {self.max_step_tokens} is less than max_batch {self.max_batch}: "
                "a step gives every running sequence a token"
            )
