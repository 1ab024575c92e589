"""Reading a JSON document into frozen dataclasses, strictly: no missing, unknown or mistyped keys.

Only keys of fields that have a default may be missing.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

_T = TypeVar("_T")


class DocumentError(Exception):
    """A key that is missing, unknown or of the wrong type."""


def from_json(kind: type[_T], value: object, key: str = "") -> _T:
    """`value`, parsed JSON, as dataclass `kind`; DocumentError naming the key otherwise."""
    here = key or "the document"
    if not isinstance(value, dict):
        raise DocumentError(f"{here}: {type(value).__name__} instead of an object")
    hints = typing.get_type_hints(kind)
    fields = {field.name: field.default for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    needed = [name for name, default in fields.items() if default is dataclasses.MISSING]
    if missing := [name for name in needed if name not in value]:
        raise DocumentError(f"{here}: without {', '.join(missing)}")
    if unknown := [name for name in value if name not in fields]:
        raise DocumentError(f"{here}: unknown key {', '.join(map(repr, unknown))}")
    prefix = f"{key}." if key else ""
    return kind(**{name: _convert(hints[name], value[name], prefix + name) for name in value})


def _convert(hint: Any, value: object, key: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return from_json(typing.cast(type, hint), value, key)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple and isinstance(value, list):
        return tuple(_convert(args[0], item, f"{key}[{index}]") for index, item in enumerate(value))
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        if isinstance(value, dict):
            return {name: _convert(args[1], item, f"{key}.{name}") for name, item in value.items()}
        raise DocumentError(f"{key}: {type(value).__name__} instead of an object")
    if hint is Any:
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(hint, type) and isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    raise DocumentError(f"{key}: {value!r} instead of a value of type {getattr(hint, '__name__', hint)}")
