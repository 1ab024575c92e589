"""Checks a request before it is queued: what is refused here never reaches a step."""

from __future__ import annotations

import math

import numpy as np

from enginebay.triton_repo.runtime.engine import EngineLimits
from enginebay.triton_repo.runtime.request import Request, RequestError, SamplingParams

MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024  # characters of one stop string
MAX_LOGPROBS = 128
MAX_REPETITION = 1e10  # and its inverse: logits are multiplied and divided by it in float32


def check_request(request: Request, limits: EngineLimits, capacity: int) -> int:
    """The output tokens to allow: `max_tokens`, clamped to the room that the prompt leaves.

    `capacity` is the number of tokens that one sequence may hold in the cache. RequestError names the field,
    its value and the limit.
    """
    check_text("id", request.id)
    if not request.id:
        raise RequestError("id: must not be empty")
    if request.salt is not None:
        check_text("cache_salt", request.salt)
    _whole("priority", request.priority, -(2**63), 2**63 - 1)
    check_sampling(request.sampling)
    _check_tokens("prompt_ids", request.prompt_ids, limits.vocab_size)
    _check_tokens("stop_token_ids", request.sampling.stop_token_ids, limits.vocab_size)
    length = len(request.prompt_ids)
    if length == 0:
        raise RequestError("prompt_ids: the prompt has no tokens; at least 1 is needed")
    if length >= limits.max_sequence:
        raise RequestError(
            f"prompt_ids: the prompt has {length} tokens; this engine holds {limits.max_sequence} tokens of "
            "prompt and output together, at least 1 of them output"
        )
    if length > capacity:
        raise RequestError(
            f"prompt_ids: the prompt has {length} tokens; the usable cache holds {capacity} in all"
        )
    # The last output token is never computed, so it needs no room in the cache.
    return min(request.sampling.max_tokens, limits.max_sequence - length, capacity + 1 - length)


def check_sampling(sampling: SamplingParams) -> None:
    """RequestError naming the first field that is out of its range."""
    _whole("max_tokens", sampling.max_tokens, 1)
    _whole("min_tokens", sampling.min_tokens, 0)
    _number("temperature", sampling.temperature, 0.0, math.inf)
    _whole("top_k", sampling.top_k, -1)
    _number("top_p", sampling.top_p, 0.0, 1.0)
    _number("min_p", sampling.min_p, 0.0, 1.0)
    _number("repetition_penalty", sampling.repetition_penalty, 1 / MAX_REPETITION, MAX_REPETITION)
    _number("presence_penalty", sampling.presence_penalty, -2.0, 2.0)
    _number("frequency_penalty", sampling.frequency_penalty, -2.0, 2.0)
    if sampling.min_tokens > sampling.max_tokens:
        raise RequestError(f"min_tokens: {sampling.min_tokens} is above max_tokens {sampling.max_tokens}")
    if sampling.seed is not None:
        _whole("seed", sampling.seed, -(2**63), 2**64 - 1)
    if sampling.logprobs is not None:
        _whole("logprobs", sampling.logprobs, 0, MAX_LOGPROBS)
    if len(sampling.stop) > MAX_STOP_STRINGS:
        raise RequestError(f"stop: {len(sampling.stop)} strings; at most {MAX_STOP_STRINGS} are allowed")
    for stop in sampling.stop:
        if not isinstance(stop, str) or not 1 <= len(stop) <= MAX_STOP_LENGTH:
            raise RequestError(f"stop: {stop!r} is not a string of 1 to {MAX_STOP_LENGTH} characters")
        check_text("stop", stop)


def check_text(field: str, value: object) -> None:
    """RequestError where `value` is no text that UTF-8 can hold: JSON may spell lone surrogates."""
    if not isinstance(value, str):
        raise RequestError(f"{field}: {value!r} is not text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{field}: character {error.start} is a lone surrogate, which UTF-8 cannot hold"
        ) from error


def _whole(field: str, value: object, low: int, high: int | None = None) -> None:
    if not isinstance(value, int | np.integer) or isinstance(value, bool):
        raise RequestError(f"{field}: {value!r} is not a whole number")
    if value < low or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"between {low} and {high}"
        raise RequestError(f"{field}: {value} is out of range; it must be {limit}")


def _number(field: str, value: object, low: float, high: float) -> None:
    if not isinstance(value, int | float | np.number) or isinstance(value, bool):
        raise RequestError(f"{field}: {value!r} is not a number")
    if not low <= value <= high or value == math.inf:  # NaN compares as neither; ints may be of any size
        limit = (
            f"a finite number of at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
        )
        raise RequestError(f"{field}: {value} is out of range; it must be {limit}")


def _check_tokens(field: str, ids: tuple[int, ...], vocab_size: int) -> None:
    try:
        array = np.asarray(ids)
    except (OverflowError, ValueError) as error:
        raise RequestError(f"{field}: not a flat list of token ids ({error})") from error
    if array.size == 0:
        return
    if array.ndim != 1 or array.dtype.kind not in "iu":
        # Python ints beyond 64 bits arrive here as objects or floats.
        raise RequestError(f"{field}: not a flat list of whole numbers between 0 and {vocab_size - 1}")
    bad = np.flatnonzero((array < 0) | (array >= vocab_size))
    if bad.size:
        raise RequestError(
            f"{field}: token id {int(array[bad[0]])} at index {int(bad[0])} is outside this model's "
            f"vocabulary of {vocab_size} tokens"
        )
