"""JSON parameters to the runtime's types: every key, and what is wrong with a value."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginebay.triton_repo.backend.parameters import Parameters, parse_parameters
from enginebay.triton_repo.runtime.request import RequestError, SamplingParams

DEFAULTS = SamplingParams(max_tokens=16, temperature=1.0)  # the defaults of vLLM's backend


def parse(tensor: dict[str, Any] | None = None, **request: Any) -> Parameters:
    raw = None if tensor is None else json.dumps(tensor).encode()
    return parse_parameters(raw, json.dumps(request) if request else "")


def test_defaults() -> None:
    assert parse() == parse({}) == Parameters(DEFAULTS)


def test_every_key() -> None:
    everything = {
        "max_tokens": 5, "min_tokens": 2, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1,
        "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3, "seed": 11,
        "stop": ["a", "b"], "stop_token_ids": [7, 8], "ignore_eos": True, "include_stop_str_in_output": True,
        "logprobs": 4, "priority": -2, "cache_salt": "tenant", "apply_chat_template": True,
    }  # fmt: skip
    sampling = SamplingParams(5, 2, 0.5, 3, 0.9, 0.1, 1.1, 0.2, 0.3, 11, ("a", "b"), (7, 8), True, True, 4)
    assert parse(everything) == Parameters(sampling, priority=-2, salt="tenant", chat=True)
    assert parse(None, **everything) == parse(everything)


def test_numbers_and_flags_as_text() -> None:
    as_text = {"max_tokens": "5", "temperature": "0.5", "ignore_eos": "False", "seed": "12345678901234567890"}
    sampling = parse(None, **as_text).sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.ignore_eos) == (5, 0.5, False)
    assert sampling.seed == 12345678901234567890


def test_the_tensor_counts_over_the_request() -> None:
    sampling = parse({"max_tokens": 5}, max_tokens=9, top_k=4).sampling
    assert (sampling.max_tokens, sampling.top_k) == (5, 4)


def test_what_asks_for_nothing_is_accepted() -> None:
    neutral = {"n": 1, "best_of": 1, "use_beam_search": False, "skip_special_tokens": True, "seed": None}
    assert parse({**neutral, "stop": None}, triton_enable_empty_final_response=True).sampling == DEFAULTS


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("n", 2), ("best_of", 3), ("use_beam_search", True), ("beam_width", 4), ("logit_bias", {"1": 2}),
        ("max_tokens", True), ("max_tokens", 1.5), ("max_tokens", "five"), ("max_tokens", [1]),
        ("max_tokens", 1e400), ("temperature", "hot"), ("temperature", False), ("top_p", {}), ("stop", 1),
        ("stop", ["a", 1]),
        ("stop_token_ids", 5), ("stop_token_ids", ["x"]), ("ignore_eos", 2), ("ignore_eos", "no"),
        ("cache_salt", 1), ("priority", "high"), ("apply_chat_template", "yes"), ("unheard_of", 1),
        ("cache_salt", "\ud800"), ("stop", "a\udfff"), ("stop", ["a", "\ud800"]),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(key: str, value: Any) -> None:
    raw = json.dumps({key: value}).replace("Infinity", "1e400").encode()
    with pytest.raises(RequestError, match=rf"^{key}"):
        parse_parameters(raw, "")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)
keys = st.sampled_from(
    ["max_tokens", "temperature", "stop", "stop_token_ids", "seed", "priority", "n", "ignore_eos"]
)


@given(st.dictionaries(keys | st.text(), json_values), st.binary())
def test_nothing_else_than_a_request_error_comes_out(values: dict[str, Any], junk: bytes) -> None:
    for raw in (json.dumps(values).encode(), junk):
        try:
            parsed = parse_parameters(raw, "")
        except RequestError:
            continue
        assert isinstance(parsed.sampling.max_tokens, int)
        assert isinstance(parsed.sampling.temperature, float)
