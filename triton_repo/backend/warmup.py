"""First steps before readiness, so that no client pays for page faults, thread starts and packing."""

from __future__ import annotations

import threading

from enginebay.triton_repo.runtime.engine import EngineLimits
from enginebay.triton_repo.runtime.loop import EngineLoop
from enginebay.triton_repo.runtime.request import Request, RequestError, SamplingParams

_TIMEOUT = 600.0
_NEW_TOKENS = 3
_LONG = 256


def warm_up(loop: EngineLoop, limits: EngineLimits, max_batch: int, done: dict[str, threading.Event]) -> None:
    """Runs prefills and decodes of several shapes: one sequence, a long prompt, a full batch.

    `max_batch` sequences run together. `done` gets an event for each request before it is submitted; the
    sink sets it with the final output.
    RuntimeError if a step fails or hangs: an engine that cannot serve must not become ready.
    """
    most = max(1, limits.max_sequence - _NEW_TOKENS)
    for name, lengths in (
        ("one", [min(8, most)]),
        ("long", [min(limits.max_step_tokens, _LONG, most)]),
        ("batch", [min(4, most)] * min(max_batch, 32)),
    ):
        events = []
        for index, length in enumerate(lengths):
            id = f"warm-up-{name}-{index}"
            done[id] = threading.Event()
            prompt = tuple((index + position) % limits.vocab_size for position in range(length))
            sampling = SamplingParams(max_tokens=_NEW_TOKENS, temperature=0.0, ignore_eos=True)
            try:
                loop.submit(Request(id, prompt, sampling, salt="enginebay-warm-up"))
            except RequestError:
                continue  # longer than this cache allows: clients cannot send it either
            events.append(done[id])
        for event in events:
            if not event.wait(_TIMEOUT):
                raise RuntimeError(f"warm-up '{name}': no answer after {_TIMEOUT:g} s")
    stats = loop.stats()
    if loop.failure is not None or stats.failed:
        raise RuntimeError(
            f"warm-up: {stats.failed} of the first requests failed: {loop.failure or 'see the log'}"
        )
