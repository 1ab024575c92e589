"""Generation parameters as JSON, with the keys of vLLM's backend, to the runtime's own types."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from enginebay.triton_repo.runtime.admission import check_text
from enginebay.triton_repo.runtime.request import RequestError, SamplingParams

MAX_JSON_BYTES = 1 << 16

# What the clients of this surface expect where they say nothing.
DEFAULT_TEMPERATURE = 1.0
DEFAULT_MAX_TOKENS = 16


@dataclass(frozen=True)
class Parameters:
    """How to answer one request. `chat`: the text is a user's message for the chat template."""

    sampling: SamplingParams
    priority: int = 0
    salt: str | None = None
    chat: bool = False


def parse_parameters(tensor: bytes | None, request_parameters: str) -> Parameters:
    """From the `sampling_parameters` tensor and the request's own parameters, both JSON objects.

    Where both have a key the tensor's counts. RequestError names the key.
    """
    values = {
        key: value
        for key, value in _read_object("request parameters", request_parameters).items()
        if not key.startswith("triton_")  # Triton's own
    }
    if tensor is not None:
        if len(tensor) > MAX_JSON_BYTES:
            raise RequestError(f"sampling_parameters: {len(tensor)} bytes; at most {MAX_JSON_BYTES} are read")
        values |= _read_object("sampling_parameters", tensor)
    return _build({key: value for key, value in values.items() if value is not None})


def _build(values: Mapping[str, Any]) -> Parameters:
    sampling: dict[str, Any] = {"temperature": DEFAULT_TEMPERATURE, "max_tokens": DEFAULT_MAX_TOKENS}
    rest: dict[str, Any] = {}
    for key, value in values.items():
        if key in _SAMPLING:
            field, convert = _SAMPLING[key]
            sampling[field] = convert(key, value)
        elif key in _REQUEST:
            field, convert = _REQUEST[key]
            rest[field] = convert(key, value)
        elif key in _NEUTRAL:
            if value not in _NEUTRAL[key]:
                raise RequestError(
                    f"{key}: {value!r} is not supported; leave it out or send {_NEUTRAL[key][0]!r}"
                )
        else:
            raise RequestError(
                f"{key}: unknown parameter; known are {', '.join(sorted({*_SAMPLING, *_REQUEST}))}"
            )
    return Parameters(SamplingParams(**sampling), **rest)


def _read_object(name: str, text: str | bytes) -> dict[str, Any]:
    if not text:
        return {}
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{name}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise RequestError(f"{name}: holds {type(value).__name__}, not an object")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number")


# Clients whose protocol has no other types send numbers as text, so text that spells a number is one.


def _whole(key: str, value: Any) -> int:
    try:
        if isinstance(value, bool):
            raise ValueError
        number = float(value) if isinstance(value, float) else int(value)
        if number != int(number):
            raise ValueError
        return int(number)
    except (TypeError, ValueError, OverflowError):
        raise RequestError(f"{key}: {value!r} is not a whole number") from None


def _number(key: str, value: Any) -> float:
    try:
        if isinstance(value, bool):
            raise ValueError
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise RequestError(f"{key}: {value!r} is not a number") from None


def _flag(key: str, value: Any) -> bool:
    known = {True: True, False: False, "true": True, "false": False}
    try:
        return known[value.lower() if isinstance(value, str) else value]
    except (KeyError, TypeError):
        raise RequestError(f"{key}: {value!r} is neither true nor false") from None


def _text(key: str, value: Any) -> str:
    check_text(key, value)
    return str(value)


def _texts(key: str, value: Any) -> tuple[str, ...]:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list):
        raise RequestError(f"{key}: {value!r} is neither text nor a list of texts")
    return tuple(_text(f"{key}[{index}]", item) for index, item in enumerate(items))


def _wholes(key: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise RequestError(f"{key}: {value!r} is not a list of whole numbers")
    return tuple(_whole(f"{key}[{index}]", item) for index, item in enumerate(value))


_Convert = Callable[[str, Any], Any]

_SAMPLING: dict[str, tuple[str, _Convert]] = {
    **{key: (key, _whole) for key in ("max_tokens", "min_tokens", "top_k", "seed", "logprobs")},
    **{key: (key, _number) for key in ("temperature", "top_p", "min_p")},
    **{key: (key, _number) for key in ("repetition_penalty", "presence_penalty", "frequency_penalty")},
    "stop": ("stop", _texts),
    "stop_token_ids": ("stop_token_ids", _wholes),
    "ignore_eos": ("ignore_eos", _flag),
    "include_stop_str_in_output": ("include_stop", _flag),
}

_REQUEST: dict[str, tuple[str, _Convert]] = {
    "priority": ("priority", _whole),
    "cache_salt": ("salt", _text),
    "apply_chat_template": ("chat", _flag),
}

# Keys that such clients send with values that ask for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1, "1"),
    "best_of": (1, "1"),
    "use_beam_search": (False, "false"),
    "length_penalty": (1.0, "1.0", "1"),
    "early_stopping": (False, "false"),
    "skip_special_tokens": (True, "true"),
    "spaces_between_special_tokens": (True, "true"),
    "detokenize": (True, "true"),
    "bad_words": ([],),
    "logit_bias": ({},),
    "beam_width": (1, "1"),
}
