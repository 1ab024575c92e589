"""What a caller hands to the runtime and what it gets back: plain frozen data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "cancelled", "error"]


class RequestError(ValueError):
    """A request that can never be served as asked. The message names the field, its value and the limit."""


class OverloadedError(RuntimeError):
    """The waiting queue is full: the same request may be served later. The message gives both numbers."""


class UnavailableError(RuntimeError):
    """The runtime is draining, closed or has failed: it takes no more requests. The message says which."""


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens.

    temperature 0 is greedy. top_k 0 and -1 mean all. Repetition penalty covers prompt and output; presence
    and frequency penalties the output only. `logprobs` None: none; n: the chosen token's and the n best. With
    a seed the same request gets the same choices whatever it is batched with.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False
    logprobs: int | None = None


@dataclass(frozen=True)
class Request:
    """One prompt. Lower `priority` values run first. `salt` separates prefix caches of different tenants."""

    id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    salt: str | None = None


@dataclass(frozen=True)
class TokenLogprob:
    """A token's log probability under the model (before penalties, temperature, filters) and the best."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Usage:
    """Token counts of a finished request. `cached_tokens` came from the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True)
class Output:
    """What one step produced for one request. Its last Output alone has `finish_reason` set."""

    request_id: str
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    error: str | None = None

    @property
    def final(self) -> bool:
        return self.finish_reason is not None
