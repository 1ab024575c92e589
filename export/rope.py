"""Rotary position embeddings: reading them from a config, and their tables.

Sources: RoFormer (arXiv 2104.09864), YaRN (2309.00071), LongRoPE (2402.13753); llama3 and dynamic scaling
as defined by the HF configs that name them. Tables are computed in float64 and stored in float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, cast, get_args

import numpy as np
from numpy.typing import NDArray

from enginebay.export.config import Config
from enginebay.export.pieces import Computed
from enginebay.export.spec import Rope, RopeKind

_CHUNK_ROWS = 4096


def read_rope(
    config: Config,
    head_dim: int,
    *,
    theta: float = 10000.0,
    partial: float = 1.0,
    aliases: Mapping[str, str] | None = None,
) -> Rope:
    """The one RoPE of a config: `rope_parameters`, or the older `rope_theta` with `rope_scaling`.

    `theta` and `partial` are the family's defaults; `aliases` its older names of kinds. Raises
    UnsupportedModelError for an unknown kind or parameter.
    """
    theta = config.number("rope_theta", theta)
    partial = config.number("partial_rotary_factor", partial)
    original = config.nullable("original_max_position_embeddings", None)
    new_style = config.has("rope_parameters")
    table = config.table("rope_parameters" if new_style else "rope_scaling")
    if new_style and config.has("rope_scaling"):
        config.expect("rope_scaling", config.raw("rope_parameters"))
    return rope_from_table(
        table,
        head_dim,
        config.count("max_position_embeddings"),
        theta=theta,
        partial=partial,
        original=original,
        aliases=aliases,
    )


def rope_from_table(
    table: Config,
    head_dim: int,
    positions: int,
    *,
    theta: float,
    partial: float = 1.0,
    original: int | None = None,
    aliases: Mapping[str, str] | None = None,
) -> Rope:
    """One set of RoPE parameters.

    Raises UnsupportedModelError, naming key and value, for what is not known.
    """
    kind = table.text("rope_type", table.raw("type", "default"))
    table.ignore("type")
    kind = (aliases or {}).get(kind, kind)
    if kind not in get_args(RopeKind):
        raise table.refusal("rope_type", kind, f"known kinds are {', '.join(get_args(RopeKind))}")
    theta = table.number("rope_theta", theta)
    rotary = int(head_dim * table.number("partial_rotary_factor", partial))
    if original is None:
        original = table.count("original_max_position_embeddings", positions)
    else:
        table.ignore("original_max_position_embeddings")
    fields: dict[str, Any] = {}
    if kind in ("linear", "dynamic", "llama3", "yarn"):
        fields["factor"] = table.number("factor")
        if fields["factor"] < 1.0:
            raise table.refusal("factor", fields["factor"], "must be at least 1")
    if kind == "dynamic":
        # This kind is defined against max_position_embeddings itself.
        original = positions
    if kind == "llama3":
        fields["low_freq_factor"] = table.number("low_freq_factor")
        fields["high_freq_factor"] = table.number("high_freq_factor")
    if kind == "yarn":
        fields["beta_fast"] = table.number("beta_fast", 32.0)
        fields["beta_slow"] = table.number("beta_slow", 1.0)
        fields["truncate"] = table.flag("truncate", True)
        fields["attention_factor"] = _yarn_attention_factor(table, fields["factor"])
    if kind == "longrope" and original < 2:
        raise table.refusal("original_max_position_embeddings", original, "longrope needs at least 2")
    if kind == "longrope":
        fields["short_factors"] = table.numbers("short_factor")
        fields["long_factors"] = table.numbers("long_factor")
        fields["factor"] = table.number("factor", positions / original)
        fields["attention_factor"] = _longrope_attention_factor(table, fields["factor"], original)
    table.finish()
    return Rope(
        kind=cast("RopeKind", kind), theta=theta, rotary_dim=rotary, original_positions=original, **fields
    )


def _yarn_attention_factor(table: Config, factor: float) -> float:
    mscale, mscale_all_dim = table.number("mscale", 0.0), table.number("mscale_all_dim", 0.0)
    if table.has("attention_factor"):
        return table.number("attention_factor")
    table.ignore("attention_factor")

    if mscale and mscale_all_dim:
        return magnitude(factor, mscale) / magnitude(factor, mscale_all_dim)
    return magnitude(factor, 1.0)


def magnitude(factor: float, weight: float) -> float:
    """YaRN's correction of attention for sequences stretched by `factor`."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _longrope_attention_factor(table: Config, factor: float, original: int) -> float:
    if table.has("attention_factor"):
        return table.number("attention_factor")
    table.ignore("attention_factor")
    return math.sqrt(1.0 + math.log(factor) / math.log(original)) if factor > 1.0 else 1.0


def table_rows(rope: Rope, positions: int) -> int:
    """Rows of the table of a model with `positions`.

    The short rows, where there are any, then one per position.
    """
    return positions + (rope.original_positions if rope.switches else 0)


def rope_tables(rope: Rope, positions: int) -> Iterator[tuple[NDArray[np.float32], NDArray[np.float32]]]:
    """cos and sin, float32 [rows, rotary_dim/2], in chunks of rows.

    First the short table where the kind switches.
    """
    spans = [(positions, frequencies(rope, positions))]
    if rope.switches:
        spans.insert(0, (rope.original_positions, frequencies(rope, rope.original_positions)))
    for rows, inverse in spans:
        for start in range(0, rows, _CHUNK_ROWS):
            position = np.arange(start, min(start + _CHUNK_ROWS, rows), dtype=np.float64)
            angle = position[:, None] * inverse[None, :]
            yield (
                (np.cos(angle) * rope.attention_factor).astype(np.float32),
                (np.sin(angle) * rope.attention_factor).astype(np.float32),
            )


def rope_pieces(rope: Rope, positions: int) -> tuple[Computed, Computed]:
    """The bytes of the cos and of the sin table."""
    return (
        Computed(lambda: (cos.tobytes() for cos, _ in rope_tables(rope, positions))),
        Computed(lambda: (sin.tobytes() for _, sin in rope_tables(rope, positions))),
    )


def frequencies(rope: Rope, length: int) -> NDArray[np.float64]:
    """Radians per position of each pair, [rotary_dim/2], for sequences of up to `length` tokens."""
    exponent = np.arange(0, rope.rotary_dim, 2, dtype=np.float64) / rope.rotary_dim
    if rope.kind == "dynamic" and length > rope.original_positions:
        stretch = rope.factor * length / rope.original_positions - (rope.factor - 1.0)
        theta = rope.theta * stretch ** (rope.rotary_dim / (rope.rotary_dim - 2))
        return cast("NDArray[np.float64]", theta**-exponent)
    base: NDArray[np.float64] = rope.theta**-exponent
    if rope.kind == "linear":
        return base / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, base)
    if rope.kind == "yarn":
        return _yarn(rope, base)
    if rope.kind == "longrope":
        factors = rope.long_factors if length > rope.original_positions else rope.short_factors
        return base / np.asarray(factors, dtype=np.float64)
    return base


def _llama3(rope: Rope, base: NDArray[np.float64]) -> NDArray[np.float64]:
    """Long wavelengths are divided by the factor, short ones kept, those between blended."""
    wavelength = 2.0 * math.pi / base
    blend = (rope.original_positions / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    kept = np.clip(blend, 0.0, 1.0)
    return cast("NDArray[np.float64]", base * (kept + (1.0 - kept) / rope.factor))


def _yarn(rope: Rope, base: NDArray[np.float64]) -> NDArray[np.float64]:
    """Pairs that turn more than beta_fast times over the original length are kept, fewer than beta_slow
    divided."""

    def pair_turning(turns: float) -> float:
        return (
            rope.rotary_dim
            * math.log(rope.original_positions / (turns * 2.0 * math.pi))
            / (2.0 * math.log(rope.theta))
        )

    low, high = pair_turning(rope.beta_fast), pair_turning(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    span = (high - low) or 0.001
    ramp = np.clip((np.arange(rope.rotary_dim // 2, dtype=np.float64) - low) / span, 0.0, 1.0)
    return cast("NDArray[np.float64]", base / rope.factor * ramp + base * (1.0 - ramp))
