"""Any value for any key of a config.json gives a spec or an error that names what is wrong: nothing else."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from test_hub_configs import CONFIGS

from enginebay.export.config import Config
from enginebay.export.errors import ExportError, UnsupportedModelError
from enginebay.export.families import read_spec
from enginebay.export.quantized import read_scheme
from enginebay.export.spec_json import SpecError

BAD: list[Any] = [
    10**400, 10**18, 1e308, 1e17, float("inf"), float("nan"), 2**31, 0, -1, 0.5, 1, True, "x", [], {}, [[]],
    [{}], [10**400], ["x", "x"], {"x": []},
]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every key, and of the first element of every list."""
    if path:
        yield path
    if isinstance(value, dict):
        for key, item in value.items():
            yield from places(item, (*path, key))
    elif isinstance(value, list) and value:
        yield from places(value[0], (*path, 0))


def changed(config: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    result = copy.deepcopy(config)
    place: Any = result
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return result


ALL = {
    **CONFIGS,
    "compressed": {
        **CONFIGS["Qwen3-32B"],
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"weights": {"type": "int", "num_bits": 4, "symmetric": True}}},
        },
    },
    "gptq": {**CONFIGS["Qwen3-32B"], "quantization_config": {"quant_method": "gptq", "bits": 4, "sym": True}},
    "awq": {**CONFIGS["Qwen3-32B"], "quantization_config": {"quant_method": "awq", "bits": 4}},
}


@pytest.mark.parametrize("name", ALL)
def test_any_value_of_any_key_is_read_or_named(name: str) -> None:
    messages: list[str] = []
    for path in places(ALL[name]):
        for value in BAD:
            config = changed(ALL[name], path, value)
            try:
                read_scheme(config)
                _, spec = read_spec(config)
            except (ExportError, SpecError) as error:
                messages.append(str(error))
                continue
            except Exception as error:
                raise AssertionError(f"{path} = {value!r:.60}: {error!r}") from error
            assert max(spec.vocab_size, spec.hidden_size, spec.max_positions) < 2**31
            assert spec.num_layers <= 10_000
    assert all(len(message) < 2000 for message in messages)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("num_hidden_layers", 10_001, "'num_hidden_layers' is 10001: must not be beyond 10000"),
        ("vocab_size", 2**31, "'vocab_size' is 2147483648: must not be beyond 2147483647"),
        ("hidden_size", 1e308, "'hidden_size' is 1000.*: must not be beyond 2147483647"),
        ("rms_norm_eps", 10**400, "'rms_norm_eps' is 1000.*: must not be beyond 1e"),
        ("rms_norm_eps", float("nan"), "'rms_norm_eps' is nan: must not be beyond 1e"),
    ],
)
def test_the_bound_is_named(key: str, value: Any, words: str) -> None:
    config = Config({key: value})
    with pytest.raises(UnsupportedModelError, match=words):
        (config.number if key == "rms_norm_eps" else config.count)(key)


def test_what_published_models_have_is_within_bounds() -> None:
    config = Config({"rope_theta": 1e11, "max_position_embeddings": 10_485_760, "sliding_window": 131072.0})
    assert config.number("rope_theta") == 1e11
    assert config.count("max_position_embeddings") == 10_485_760
    assert config.count("sliding_window") == 131072
