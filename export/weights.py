"""From a checkpoint's tensors to one sidecar: what goes where, checked before anything is written, then
streamed.

No tensor is ever whole in memory: plain weights are file ranges that the kernel copies, the few others are
made in bounded chunks.
"""

from __future__ import annotations

import errno
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from enginebay.export.cache_scales import read_cache_scales
from enginebay.export.checkpoint import ITEM_BYTES, Checkpoint, TensorInfo
from enginebay.export.errors import CheckpointError
from enginebay.export.families.base import Family
from enginebay.export.layouts import LAYOUTS
from enginebay.export.pieces import FileRange, Piece, read_range
from enginebay.export.quantized import Scheme, scheme_notes, unused_scales
from enginebay.export.roles import Role, required
from enginebay.export.rope import rope_pieces, table_rows
from enginebay.export.spec import ModelSpec

ALIGNMENT = 4096
_COPY_BYTES = 64 << 20
_BUFFER_BYTES = 4 << 20

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Initializer:
    """One weight of the graph.

    Its bytes in the sidecar, [offset, offset + nbytes), come from `pieces` in order.
    """

    name: str
    dtype: str  # as safetensors says
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    offset: int = 0

    @property
    def nbytes(self) -> int:
        elements = math.prod(self.shape)
        return (elements + 1) // 2 if self.dtype == "U4" else elements * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class WeightPlan:
    """All initializers by role, with offsets.

    `spec` with `tied_embeddings` as the values decide; what to tell the user.
    """

    spec: ModelSpec
    initializers: dict[str, Initializer]
    ignored: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def total_bytes(self) -> int:
        return max(weight.offset + weight.nbytes for weight in self.initializers.values())


def plan_weights(
    spec: ModelSpec, family: Family, checkpoint: Checkpoint, scheme: Scheme | None = None
) -> WeightPlan:
    """Assigns every tensor of the checkpoint; layers that `scheme` finds quantised stay so.

    Raises CheckpointError naming missing, extra and mis-shaped ones.
    """
    consumed: set[str] = set()
    family = _with_its_prefix(family, checkpoint)
    spec, notes = _decide_tie(spec, family, checkpoint, consumed)
    missing: list[str] = []
    found: dict[str, Initializer] = {}
    for role in required(spec):
        names = _names(family, role)
        quantised = None if scheme is None else _quantised(role, names, checkpoint, scheme, consumed)
        if quantised is not None:
            found.update(quantised)
            continue
        absent = [name for name in names if name not in checkpoint.tensors]
        missing += absent
        if not absent:
            sources = [checkpoint.tensors[name] for name in names]
            found[role.name] = _initializer(role, family, sources)
            consumed.update(names)
    if missing:
        raise CheckpointError(
            f"the checkpoint lacks {len(missing)} tensors that its config requires: {_some(missing)}"
        )
    cache_scales, names = read_cache_scales(checkpoint, spec)
    spec = replace(spec, cache_scales=cache_scales)
    unused = () if scheme is None else unused_scales(checkpoint)
    consumed.update((*names, *unused))
    ignored = (*_account_for_extras(spec, family, checkpoint, consumed), *unused)
    if scheme is not None:
        notes = (*notes, *scheme_notes(scheme, checkpoint))
    for index, rope in enumerate(spec.ropes):
        rows, pairs = table_rows(rope, spec.max_positions), rope.rotary_dim // 2
        for part, piece in zip(("cos", "sin"), rope_pieces(rope, spec.max_positions), strict=True):
            found[f"rope.{index}.{part}"] = Initializer(
                f"rope.{index}.{part}", "F32", (rows, pairs), (piece,)
            )
    return WeightPlan(spec, _place(found), ignored, notes)


def write_sidecar(plan: WeightPlan, path: Path, progress: Progress | None = None) -> None:
    """Streams every initializer to its offset of `path`. Raises CheckpointError where a source ends early."""
    total = sum(weight.nbytes for weight in plan.initializers.values())
    done = 0
    with path.open("wb") as file:
        file.truncate(plan.total_bytes)
        for weight in plan.initializers.values():
            position = weight.offset
            for piece in weight.pieces:
                for count in _write_piece(piece, file.fileno(), position):
                    position += count
                    done += count
                    if progress is not None:
                        progress(done, total)
            if position != weight.offset + weight.nbytes:
                raise CheckpointError(
                    f"'{weight.name}' gave {position - weight.offset} bytes, its shape needs {weight.nbytes}"
                )


def _with_its_prefix(family: Family, checkpoint: Checkpoint) -> Family:
    """The family with names as this checkpoint has them: some lack the prefix."""
    if any(name.startswith(family.prefix) for name in checkpoint.tensors):
        return family
    names = {
        key: entry.removeprefix(family.prefix)
        if isinstance(entry, str)
        else tuple(name.removeprefix(family.prefix) for name in entry)
        for key, entry in family.names.items()
    }
    return replace(family, names=names)


def _decide_tie(
    spec: ModelSpec, family: Family, checkpoint: Checkpoint, consumed: set[str]
) -> tuple[ModelSpec, tuple[str, ...]]:
    """The head is tied where the values say so.

    A head that differs from the embeddings is kept whatever the config says.
    """
    (embed_name,), (head_name,) = (
        family.tensor_names(key, None) for key in ("embed.weight", "lm_head.weight")
    )
    embed, head = checkpoint.tensors.get(embed_name), checkpoint.tensors.get(head_name)
    if embed is None or head is None:
        return spec, ()
    if _same_values(embed, head):
        consumed.add(head_name)
        note = f"'{head_name}' equals '{embed_name}': stored once"
        return replace(spec, tied_embeddings=True), (note,)
    if spec.tied_embeddings:
        note = (
            f"config.json says tie_word_embeddings, but the checkpoint's '{head_name}' differs from "
            f"'{embed_name}': "
            "both are kept, as transformers does"
        )
        return replace(spec, tied_embeddings=False), (note,)
    return spec, ()


def _same_values(left: TensorInfo, right: TensorInfo) -> bool:
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return False
    pairs = zip(read_range(left, 0, left.nbytes), read_range(right, 0, right.nbytes), strict=True)
    return all(one == other for one, other in pairs)


def _names(family: Family, role: Role) -> tuple[str, ...]:
    try:
        if not role.experts:
            return family.tensor_names(role.key, role.layer)
        per_expert = [family.tensor_names(role.key, role.layer, expert) for expert in range(role.experts)]
    except KeyError as error:
        raise AssertionError(f"family {family.architecture} names no tensor for {role.key}") from error
    stacked = per_expert[0] == per_expert[-1]
    return per_expert[0] if stacked else tuple(name for names in per_expert for name in names)


def _initializer(role: Role, family: Family, sources: Sequence[TensorInfo]) -> Initializer:
    layout = LAYOUTS[family.layout(role.key)]
    for index, (source, shape) in enumerate(zip(sources, layout.shapes(role, len(sources)), strict=True)):
        allowed = layout.dtypes[min(index, len(layout.dtypes) - 1)]
        if source.dtype not in allowed:
            raise CheckpointError(
                f"'{source.name}' is {source.dtype}; it must be one of {', '.join(allowed)}"
            )
        if source.shape != shape:
            raise CheckpointError(
                f"'{source.name}' has shape {list(source.shape)}, the config calls for {list(shape)}"
            )
    dtypes = {source.dtype for source in sources}
    if len(dtypes) > 1:
        raise CheckpointError(
            f"'{sources[0].name}' and '{sources[-1].name}' become one weight but are "
            f"{' and '.join(sorted(dtypes))}"
        )
    laid = layout.lay(role, sources)
    return Initializer(sources[0].name, laid.dtype, role.shape, laid.pieces)


def _quantised(
    role: Role, names: Sequence[str], checkpoint: Checkpoint, scheme: Scheme, consumed: set[str]
) -> dict[str, Initializer] | None:
    """The initializers of a role whose tensors are quantised, by role name and suffix; None where they are
    not.

    CheckpointError where only some of the role's tensors are.
    """
    shapes = list(role.parts) * (role.experts or 1)
    if len(shapes[0]) != 2 or (role.experts and len(names) != len(shapes)):
        return None
    parts = [scheme.tensors(checkpoint, name) for name in names]
    if not any(parts):
        return None
    whole_parts = [part for part in parts if part is not None]
    if len(whole_parts) < len(parts):
        plain = [name for name, part in zip(names, parts, strict=True) if part is None]
        raise CheckpointError(
            f"{_some(plain)} are not quantised, but what shares their input is: they become one weight"
        )
    consumed.update(tensor.name for part in whole_parts for tensor in part.values())
    stored = scheme.lay(whole_parts, shapes)
    if role.experts and ".order" in stored:
        raise CheckpointError(
            f"'{names[0]}': experts with an activation order (g_idx) are not read; export the checkpoint "
            "as it was before, and build that with --quant int4-gptq"
        )
    experts = (role.experts,) if role.experts else ()
    return {
        f"{role.name}{suffix}": Initializer(
            f"{names[0]}{suffix}",
            item.dtype,
            (*experts, item.shape[0] // (role.experts or 1), *item.shape[1:]) if suffix else role.shape,
            item.pieces,
        )
        for suffix, item in stored.items()
    }


def _account_for_extras(
    spec: ModelSpec, family: Family, checkpoint: Checkpoint, consumed: set[str]
) -> tuple[str, ...]:
    extras = sorted(set(checkpoint.tensors) - consumed)
    patterns = [pattern.replace("{layers}", str(spec.num_layers)) for pattern in family.ignorable]
    ignored = tuple(name for name in extras if any(re.search(pattern, name) for pattern in patterns))
    unknown = [name for name in extras if name not in ignored]
    if unknown:
        raise CheckpointError(
            f"{len(unknown)} tensors of the checkpoint are not part of a {family.architecture} with "
            "this config: "
            f"{_some(unknown)}. Leaving them out would give a different model"
        )
    return ignored


def _place(weights: dict[str, Initializer]) -> dict[str, Initializer]:
    placed: dict[str, Initializer] = {}
    offset = 0
    for role, weight in weights.items():
        placed[role] = replace(weight, offset=offset)
        offset += -(-weight.nbytes // ALIGNMENT) * ALIGNMENT
    return placed


def _write_piece(piece: Piece, target: int, position: int) -> Iterator[int]:
    """Writes at `position`, yielding the bytes of each step."""
    if not isinstance(piece, FileRange):
        for chunk in piece.chunks():
            os.pwrite(target, chunk, position)
            position += len(chunk)
            yield len(chunk)
        return
    with piece.path.open("rb") as source:
        offset, end = piece.offset, piece.offset + piece.nbytes
        while offset < end:
            count = _copy(source.fileno(), target, offset, position, end - offset)
            if count == 0:
                raise CheckpointError(f"{piece.path} ends at byte {offset}, a tensor needs it up to {end}")
            offset, position = offset + count, position + count
            yield count


_NO_COPY_RANGE = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM}


def _copy(source: int, target: int, offset: int, position: int, limit: int) -> int:
    """Copies some bytes inside the kernel, or through a small buffer where file systems cannot."""
    try:
        return os.copy_file_range(source, target, min(limit, _COPY_BYTES), offset, position)
    except OSError as error:
        if error.errno not in _NO_COPY_RANGE:
            raise
    return os.pwrite(target, os.pread(source, min(limit, _BUFFER_BYTES), offset), position)


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
