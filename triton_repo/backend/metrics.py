"""The runtime's counters as Triton metrics, beside Triton's own on /metrics."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from enginebay.triton_repo.runtime.stats import Stats


@dataclass(frozen=True)
class _Metric:
    name: str
    help: str
    read: Callable[[Stats], float]
    counter: bool = True
    labels: tuple[tuple[str, str], ...] = ()


_REQUESTS = "enginebay_requests_total"
_REQUESTS_HELP = "Requests that ended, by outcome; refused ones never ran"

METRICS = (
    _Metric(_REQUESTS, _REQUESTS_HELP, lambda s: s.ok, labels=(("outcome", "ok"),)),
    _Metric(_REQUESTS, _REQUESTS_HELP, lambda s: s.cancelled, labels=(("outcome", "cancelled"),)),
    _Metric(_REQUESTS, _REQUESTS_HELP, lambda s: s.failed, labels=(("outcome", "failed"),)),
    _Metric(_REQUESTS, _REQUESTS_HELP, lambda s: s.refused, labels=(("outcome", "refused"),)),
    _Metric(
        "enginebay_requests_running", "Requests holding cache blocks", lambda s: s.running, counter=False
    ),
    _Metric(
        "enginebay_requests_waiting", "Requests accepted that hold none", lambda s: s.waiting, counter=False
    ),
    _Metric(
        "enginebay_cache_blocks", "Usable blocks of the KV cache", lambda s: s.cache_blocks, counter=False
    ),
    _Metric("enginebay_cache_blocks_used", "Of those, held", lambda s: s.cache_blocks_used, counter=False),
    _Metric("enginebay_cache_usage_ratio", "Held part of the cache", lambda s: s.cache_usage, counter=False),
    _Metric(
        "enginebay_prefix_lookup_tokens_total",
        "Prompt tokens looked up in the prefix cache",
        lambda s: s.prefix_lookup_tokens,
    ),
    _Metric("enginebay_prefix_hit_tokens_total", "Of those, found", lambda s: s.prefix_hit_tokens),
    _Metric("enginebay_prompt_tokens_total", "Prompt tokens of started requests", lambda s: s.prompt_tokens),
    _Metric("enginebay_generated_tokens_total", "Tokens generated", lambda s: s.generated_tokens),
    _Metric("enginebay_preemptions_total", "Requests set back for lack of blocks", lambda s: s.preemptions),
    _Metric("enginebay_steps_total", "Steps of the batch", lambda s: s.steps),
    _Metric("enginebay_step_seconds_total", "Wall time of the steps", lambda s: s.step_seconds),
    _Metric("enginebay_engine_seconds_total", "Of it, in the engine", lambda s: s.engine_seconds),
    _Metric("enginebay_first_tokens_total", "Requests that got their first token", lambda s: s.first_tokens),
    _Metric(
        "enginebay_first_token_seconds_total",
        "From submission to first token, summed over requests",
        lambda s: s.first_token_seconds,
    ),
)


class Metrics:
    """Publishes snapshots. Each changed value costs a round trip to the server, so publish now and then.

    `baseline` is what the counters read when serving began: warm-up does not count.
    """

    def __init__(self, pb_utils: Any, model: str, version: str, baseline: Stats) -> None:
        self._baseline = baseline
        families: dict[str, Any] = {}
        self._metrics = []
        for metric in METRICS:
            if metric.name not in families:
                kind = pb_utils.MetricFamily.COUNTER if metric.counter else pb_utils.MetricFamily.GAUGE
                families[metric.name] = pb_utils.MetricFamily(metric.name, metric.help, kind)
            labels = {"model": model, "version": version, **dict(metric.labels)}
            self._metrics.append(families[metric.name].Metric(labels=labels))
        self._families = families
        self._values = [0.0] * len(METRICS)

    def publish(self, stats: Stats, refused: int) -> None:
        """`refused` counts what the surface refused before the runtime saw it."""
        stats = dataclasses.replace(stats, refused=stats.refused + refused)
        for index, metric in enumerate(METRICS):
            value = float(metric.read(stats))
            if metric.counter:
                value -= metric.read(self._baseline)
            if value != self._values[index]:
                if metric.counter:
                    self._metrics[index].increment(value - self._values[index])
                else:
                    self._metrics[index].set(value)
                self._values[index] = value
