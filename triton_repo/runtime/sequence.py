"""One accepted request as the scheduler sees it: its tokens, how many are computed, its blocks."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum

import numpy as np

from enginebay.triton_repo.runtime.engine import EngineLimits, Int32
from enginebay.triton_repo.runtime.kv_manager import BlockTable, Namespace
from enginebay.triton_repo.runtime.request import Request


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """Tokens that are known (prompt and output) and the count of those that are computed (in the cache).

    There are no phases: a step computes some of the tokens between `computed` and `known`, and a sequence
    that has computed all of them gets a new one.
    """

    def __init__(
        self,
        request: Request,
        *,
        max_new_tokens: int,
        arrival: int,
        rank: int,
        stop_ids: frozenset[int],
        namespace: Namespace,
        limits: EngineLimits,
    ) -> None:
        self.request = request
        self.max_new_tokens = max_new_tokens
        self.arrival = arrival
        self.order = (rank, arrival)  # the lowest runs first, the highest is preempted first
        self.stop_ids = stop_ids  # tokens that end the sequence
        self.status = Status.WAITING
        self.prompt_length = len(request.prompt_ids)
        self.known = self.prompt_length
        self.computed = 0
        self.cached_tokens: int | None = None  # prompt tokens found in the prefix cache at the first start
        self._limits = limits
        self._tokens: Int32 = np.empty(self.prompt_length + max_new_tokens, np.int32)
        self._tokens[: self.known] = request.prompt_ids
        self.table = self._new_table(namespace)

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def tokens(self) -> Int32:
        """[known]: a view of prompt and output; tokens are only ever appended."""
        return self._tokens[: self.known]

    @property
    def pending(self) -> int:
        """Known tokens that are not computed."""
        return self.known - self.computed

    @property
    def generated(self) -> int:
        return self.known - self.prompt_length

    @property
    def cache_limit(self) -> int:
        """The most tokens that the cache ever holds for it: the last output token is never computed."""
        return self.prompt_length + self.max_new_tokens - 1

    def append(self, token: int) -> None:
        self._tokens[self.known] = token
        self.known += 1

    @property
    def long_rope(self) -> bool:
        """Whether it is longer than the model's first RoPE table."""
        return 0 < self._limits.rope_switch < self.known

    def renew_table(self) -> None:
        """Replaces the table, which is empty, by one for the sequence's present length."""
        assert self.table.length == 0
        self.table = self._new_table(self.table.namespace)

    def _new_table(self, namespace: Namespace) -> BlockTable:
        capacity = -(-self.cache_limit // self._limits.block_size)
        return BlockTable(capacity, replace(namespace, long_rope=self.long_rope))
