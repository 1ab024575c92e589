"""What a family is: how its config becomes a ModelSpec, and what its checkpoints call each weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from enginebay.export.config import Config
from enginebay.export.spec import ModelSpec

# How a weight lies in the checkpoint (enginebay.export.layouts) when it is not simply rows [out, in]:
#   plus_one                the norm multiplies by 1 + weight; stored as fp32 1 + weight
#   transposed              [in, out], as GPT-2's Conv1D; for experts [expert, in, out]
#   head_qkv                rows are [head, (q, k, v), head_dim]
#   alternating             rows of gate and up alternate; with `transposed_`, columns do
#   mxfp4                   two tensors: FP4 values in blocks of 32, and the blocks' exponents
LayoutName = Literal[
    "rows",
    "plus_one",
    "transposed",
    "head_qkv",
    "alternating",
    "transposed_alternating",
    "mxfp4",
    "mxfp4_alternating",
]

Names = Mapping[str, str | tuple[str, ...]]


@dataclass(frozen=True)
class Family:
    """One architecture, as data.

    `names` maps a role's key (enginebay.export.roles) to checkpoint names: one, or one per part of a fused
    weight. A key without `.weight` or `.bias` stands for both, and the suffix is appended. `{layer}` and
    `{expert}` are filled in. `layouts` says which weights are not plain rows; `ignorable` are regular
    expressions of tensors that hold nothing a forward pass needs.
    """

    model_type: str
    architecture: str
    spec: Callable[[Config], ModelSpec]
    names: Names
    layouts: Mapping[str, LayoutName] = field(default_factory=dict)
    ignorable: tuple[str, ...] = (r"\.rotary_emb\.inv_freq$",)
    prefix: str = ""
    quantization: str = ""

    def tensor_names(self, key: str, layer: int | None, expert: int | None = None) -> tuple[str, ...]:
        """Checkpoint tensors of a role, in the order of its parts.

        KeyError where the family has no such weight.
        """
        stem, _, suffix = key.rpartition(".")
        entry, suffix = (self.names[key], "") if key in self.names else (self.names[stem], f".{suffix}")
        templates = (entry,) if isinstance(entry, str) else entry
        return tuple(template.format(layer=layer, expert=expert) + suffix for template in templates)

    def layout(self, key: str) -> LayoutName:
        return self.layouts.get(key, self.layouts.get(key.rpartition(".")[0], "rows"))
