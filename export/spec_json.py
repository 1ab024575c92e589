"""Parsed JSON to frozen dataclasses by their annotations, refusing whatever does not fit exactly."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any, Literal


class SpecError(ValueError):
    """A ModelSpec that cannot be: the message names the field and the values that disagree."""


def decode(hint: Any, value: Any, where: str) -> Any:
    """`value`, parsed JSON, as the annotated type `hint`; SpecError names the place."""
    origin = typing.get_origin(hint)
    if origin is Literal:
        if value not in typing.get_args(hint):
            raise SpecError(f"{where} is {value!r}, must be one of {typing.get_args(hint)}")
        return value
    if origin in (typing.Union, types.UnionType):
        return _union(typing.get_args(hint), value, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise SpecError(f"{where} must be a list")
        item = typing.get_args(hint)[0]
        return tuple(decode(item, element, f"{where}[{index}]") for index, element in enumerate(value))
    if dataclasses.is_dataclass(hint):
        return _dataclass(hint, value, where)
    if hint is float and type(value) in (int, float):
        return float(value)
    if type(value) is not hint:
        raise SpecError(f"{where} is {value!r}, must be {hint.__name__}")
    return value


def _union(options: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and types.NoneType in options:
        return None
    candidates = [option for option in options if option is not types.NoneType]
    if len(candidates) == 1:
        return decode(candidates[0], value, where)
    tag = value.get("type") if isinstance(value, dict) else None
    for option in candidates:
        if tag in typing.get_args(typing.get_type_hints(option)["type"]):
            return decode(option, value, where)
    raise SpecError(
        f"{where} has type {tag!r}, which is none of {[option.__name__ for option in candidates]}"
    )


def _dataclass(hint: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise SpecError(f"{where} must be an object")
    hints = typing.get_type_hints(hint)
    unknown = sorted(set(value) - set(hints))
    missing = sorted(
        field.name
        for field in dataclasses.fields(hint)
        if field.name not in value
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    )
    if unknown or missing:
        raise SpecError(f"{where}: unknown keys {unknown}, missing keys {missing}")
    return hint(**{key: decode(hints[key], item, f"{where}.{key}") for key, item in value.items()})
