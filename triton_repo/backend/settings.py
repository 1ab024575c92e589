"""How a repository's model is served: the `parameters` of its config.pbtxt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from enginebay.triton_repo.runtime.loop import LoopConfig
from enginebay.triton_repo.runtime.ort_engine import EngineOptions
from enginebay.triton_repo.runtime.scheduler import SchedulerConfig

AUTO = "auto"


class SettingsError(ValueError):
    """A parameter of config.pbtxt is unknown or malformed; the message names it."""


@dataclass(frozen=True)
class ServingSettings:
    """None is "auto" in config.pbtxt.

    threads               of the engine; auto: every core this process may use
    spinning              engine threads wait busily between operators (takes cores from the server)
    cache_bytes           of the KV cache; auto: a quarter of the memory available, 4 GiB at most
    num_blocks            of the KV cache, instead of cache_bytes
    max_batch             sequences that run together; auto: the engine's limit
    max_step_tokens       tokens of a step; auto: 256, so that a long prompt delays other streams only briefly
    max_waiting           requests that may wait; more are refused
    prefix_caching        reuse blocks of equal prefixes
    responses_per_step    of all streams together; what a stream makes between two of its own goes out as one
    polls_per_second      how often in all the server is asked whether a stream's client has gone
    unary_timeout_seconds  of requests without streaming: Triton does not see an HTTP client leave those
    """

    threads: int | None = None
    spinning: bool = False
    cache_bytes: int | None = None
    num_blocks: int | None = None
    max_batch: int | None = None
    max_step_tokens: int | None = None
    max_waiting: int = 1024
    prefix_caching: bool = True
    responses_per_step: int = 4
    polls_per_second: int = 64
    unary_timeout_seconds: int = 600

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, bool) and value is not None and value < 1:
                raise SettingsError(f"{field.name}: {value} is out of range; it must be at least 1")

    @property
    def engine(self) -> EngineOptions:
        return EngineOptions(self.threads, self.spinning, self.cache_bytes, self.num_blocks)

    @property
    def loop(self) -> LoopConfig:
        scheduler = SchedulerConfig(self.max_batch, self.max_step_tokens, self.prefix_caching)
        return LoopConfig(scheduler, self.max_waiting)

    def parameters(self) -> dict[str, str]:
        """Name to text, as config.pbtxt has them."""
        return {field.name: _write(getattr(self, field.name)) for field in fields(self)}

    @staticmethod
    def from_parameters(parameters: Mapping[str, Any]) -> ServingSettings:
        """From Triton's {name: {"string_value": text}}. SettingsError names the parameter."""
        values: dict[str, Any] = {}
        defaults = ServingSettings()
        names = {field.name for field in fields(ServingSettings)}
        for name, entry in parameters.items():
            if name not in names:
                raise SettingsError(f"parameter '{name}' is unknown; known are {', '.join(sorted(names))}")
            values[name] = _read(name, str(entry["string_value"]), getattr(defaults, name))
        return ServingSettings(**values)


def _write(value: int | bool | None) -> str:
    return AUTO if value is None else str(value).lower()


def _read(name: str, text: str, default: object) -> int | bool | None:
    if isinstance(default, bool):
        if text not in ("true", "false"):
            raise SettingsError(f"parameter '{name}': '{text}' is neither true nor false")
        return text == "true"
    if default is None and text == AUTO:
        return None
    try:
        return int(text)
    except ValueError:
        kinds = "a whole number or auto" if default is None else "a whole number"
        raise SettingsError(f"parameter '{name}': '{text}' is not {kinds}") from None
