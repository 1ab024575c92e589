"""Counters of the runtime, as the metrics endpoint publishes them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stats:
    """One consistent snapshot. Counters only grow; gauges say so; seconds are wall-clock.

    Accepted requests = running + waiting + ok + cancelled + failed. Refused ones were never accepted.
    """

    ok: int = 0  # requests that ended with "stop" or "length"
    cancelled: int = 0
    failed: int = 0
    refused: int = 0
    running: int = 0  # gauge: requests holding cache blocks
    waiting: int = 0  # gauge: accepted, not (or no longer) holding blocks
    cache_blocks: int = 0  # gauge: usable blocks of the pool
    cache_blocks_used: int = 0  # gauge: of those, held by a running request
    prefix_lookup_tokens: int = 0  # prompt tokens looked up in the prefix cache
    prefix_hit_tokens: int = 0  # of those, found
    prompt_tokens: int = 0  # of requests that started
    generated_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    step_seconds: float = 0.0  # whole steps: schedule, pack, engine, sample, deliver
    engine_seconds: float = 0.0  # of those, inside the engine
    first_tokens: int = 0  # requests that received their first token, each counted once
    first_token_seconds: float = 0.0  # from submission, summed over `first_tokens`
    allocated_slots: int = 0  # token slots of held blocks, summed over steps
    used_slots: int = 0  # of those, slots that hold a token

    @property
    def cache_usage(self) -> float:
        """Part of the usable blocks held by running requests, 0 to 1."""
        return self.cache_blocks_used / self.cache_blocks if self.cache_blocks else 0.0

    @property
    def prefix_hit_rate(self) -> float:
        """Part of the looked-up prompt tokens that the prefix cache had, 0 to 1."""
        return self.prefix_hit_tokens / self.prefix_lookup_tokens if self.prefix_lookup_tokens else 0.0

    @property
    def block_waste(self) -> float:
        """Part of the held token slots that hold no token, averaged over steps, 0 to 1."""
        return 1.0 - self.used_slots / self.allocated_slots if self.allocated_slots else 0.0
