"""Logits to tokens. Each row is computed from that row and its request alone, whatever stands beside it.

Order of the steps: repetition, presence and frequency penalties; end tokens barred before `min_tokens`;
temperature; top-k; top-p over what top-k left; min-p relative to the best. Equal logits: the lowest id first.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginebay.triton_repo.runtime.request import SamplingParams, TokenLogprob
from enginebay.triton_repo.runtime.rng import uniform

_log = logging.getLogger(__name__)

Float32 = NDArray[np.float32]
Ids = NDArray[np.int64]

_STRETCH = 256  # tokens that `_draw` sums first
_GROUPS = 64  # rows of the view in which `top_ids` looks for a threshold


@dataclass(frozen=True)
class Choice:
    """A row's token. `error` says why there is none (`token` is then −1)."""

    token: int
    logprob: TokenLogprob | None = None
    error: str | None = None


class RowState:
    """What a request's next choice depends on beside its logits. Preemption leaves it alone."""

    def __init__(
        self, params: SamplingParams, prompt_ids: Sequence[int], stop_ids: frozenset[int], seed: int
    ) -> None:
        self.params = params
        self.seed = seed
        self.generated = 0
        self._stop_ids = np.array(sorted(stop_ids), np.int64)
        self.penalised = (
            params.repetition_penalty != 1.0
            or params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
        )
        self._slot: dict[int, int] = {}  # token id -> index into the two arrays below
        self._ids: Ids = np.empty(0, np.int64)
        self._counts: NDArray[np.float32] = np.empty(0, np.float32)  # occurrences in the output
        if self.penalised:
            unique = list(dict.fromkeys(prompt_ids))
            self._slot = {token: index for index, token in enumerate(unique)}
            self._ids = np.array(unique, np.int64)
            self._counts = np.zeros(len(unique), np.float32)

    def append(self, token: int) -> None:
        """Takes note of a token that was accepted."""
        self.generated += 1
        if not self.penalised:
            return
        slot = self._slot.setdefault(token, len(self._slot))
        if slot == len(self._ids):  # room for as many again: amortised constant cost
            room = max(16, slot)
            self._ids = np.concatenate([self._ids, np.zeros(room, np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(room, np.float32)])
        self._ids[slot] = token
        self._counts[slot] += 1

    @property
    def adjusts(self) -> bool:
        """Whether the next choice is made on other logits than the model's."""
        return self.penalised or (self.generated < self.params.min_tokens and self._stop_ids.size > 0)

    def adjust(self, logits: Float32) -> Float32:
        """A copy of [V] logits with penalties applied and, before `min_tokens`, end tokens barred."""
        row = logits.copy()
        params = self.params
        if self.penalised:
            ids, counts = self._ids[: len(self._slot)], self._counts[: len(self._slot)]
            values = row[ids]
            if params.repetition_penalty != 1.0:
                penalty = np.float32(params.repetition_penalty)
                values = np.where(values > 0, values / penalty, values * penalty)
            values -= np.float32(params.frequency_penalty) * counts
            values -= np.float32(params.presence_penalty) * (counts > 0)
            row[ids] = values
        if self.generated < params.min_tokens:
            row[self._stop_ids] = -np.inf
        return row


def sample(logits: Float32, rows: Sequence[RowState]) -> list[Choice]:
    """One choice for each row of [R, V] logits.

    A row whose best logit is not a finite number, or whose request cannot be followed, gets an error and
    disturbs no other.
    """
    if not rows:
        return []
    best = logits.argmax(axis=1)  # a NaN counts as the largest; of equals the first is taken
    values = logits[np.arange(len(rows)), best]
    finite = np.isfinite(values).tolist()
    return [
        _choose_or_fail(logits[index], state, token)
        if finite[index]
        else Choice(-1, error=f"the model computed no usable logits: the largest is {values[index]}")
        for index, (state, token) in enumerate(zip(rows, best.tolist(), strict=True))
    ]


def _choose_or_fail(logits: Float32, state: RowState, best: int) -> Choice:
    try:
        return _choose(logits, state, best)
    except Exception as error:  # the request's fault, not the engine's
        _log.exception("sampling failed")
        return Choice(-1, error=f"sampling failed: {type(error).__name__}: {error}")


def _choose(logits: Float32, state: RowState, best: int) -> Choice:
    params = state.params
    row = logits
    if state.adjusts:
        row = state.adjust(logits)
        best = int(row.argmax())
        if np.isposinf(row[best]) or np.isnan(row[best]):
            return Choice(-1, error="the penalties take the logits out of float32's range")
        if np.isneginf(row[best]):
            return Choice(-1, error="min_tokens and stop_token_ids together leave no token to choose")
    token = best
    if params.temperature > 0:
        ids, weights = candidates(row, params)
        token = _draw(ids, weights, uniform(state.seed, state.generated))
    if params.logprobs is None:
        return Choice(token)
    return Choice(token, token_logprob(logits, token, params.logprobs))


def candidates(row: Float32, params: SamplingParams) -> tuple[Ids | None, NDArray[np.floating[Any]]]:
    """The tokens that may be drawn from [V] logits and their weights (the largest is 1; not normalised).

    Ids None stands for the whole vocabulary in order.
    """
    top = row.max()
    # Kept from infinity and from 0, with which the 0 of the best and the -inf of what is barred make NaN.
    inverse = np.float32(1.0 / min(max(params.temperature, 1e-30), 1e30))
    if 0 < params.top_k < len(row):
        ids = top_ids(row, params.top_k)
        weights = np.exp((row[ids] - top) * inverse).astype(np.float64)
        if params.top_p < 1:
            count = _nucleus(weights, params.top_p * weights.sum())
            ids, weights = ids[:count], weights[:count]
    else:
        everything = row - top
        everything *= inverse
        np.exp(everything, out=everything)
        if params.top_p < 1:
            ids, weights = _top_p(row, everything, params.top_p)
        elif params.min_p > 0:
            ids = np.flatnonzero(everything >= np.float32(params.min_p))
            return ids, everything[ids].astype(np.float64)
        else:
            return None, everything
    if params.min_p > 0:
        keep = weights >= params.min_p
        ids, weights = ids[keep], weights[keep]
    return ids, weights


def _top_p(row: Float32, weights: Float32, top_p: float) -> tuple[Ids, NDArray[np.float64]]:
    """The smallest set of best tokens that holds `top_p` of all weight, without sorting the vocabulary.

    A few best tokens are usually enough. Otherwise buckets of weights, an eighth of an octave wide, are
    counted from the top, and only the bucket in which the sum passes the goal is sorted.
    """
    goal = top_p * float(weights.sum(dtype=np.float64))
    ids = top_ids(row, _GROUPS)
    best = weights[ids].astype(np.float64)
    if best.sum() >= goal:
        count = _nucleus(best, goal)
        return ids[:count], best[:count]
    buckets = weights.view(np.int32) >> 20  # exponent and three bits of the mantissa: grows with the weight
    mass = np.bincount(buckets, weights)
    last = max(len(mass) - 1 - int(np.searchsorted(np.cumsum(mass[::-1]), goal)), 0)
    inside = np.flatnonzero(buckets > last)
    border = np.flatnonzero(buckets == last)
    border = border[np.argsort(-row[border], kind="stable")]
    missing = goal - float(weights[inside].sum(dtype=np.float64))
    ids = np.concatenate([inside, border[: _nucleus(weights[border].astype(np.float64), missing)]])
    return ids, weights[ids].astype(np.float64)


def _nucleus(weights: NDArray[np.float64], goal: float) -> int:
    """How many leading weights reach `goal`; at least one."""
    return min(int(np.searchsorted(np.cumsum(weights), goal)) + 1, len(weights))


def top_ids(row: Float32, count: int) -> Ids:
    """The `count` best ids of [V] logits, best first, equal logits by id. Exact, without sorting all.

    The count-th largest maximum of disjoint groups is at most the count-th largest value, so everything at
    or above it holds the answer and little more.
    """
    count = min(count, len(row))
    groups = len(row) // _GROUPS
    if count < groups:
        maxima = row[: groups * _GROUPS].reshape(_GROUPS, groups).max(axis=0)
        threshold = np.partition(maxima, groups - count)[groups - count]
    else:
        threshold = np.partition(row, len(row) - count)[len(row) - count]
    ids = np.flatnonzero(row >= threshold)
    order = np.argsort(-row[ids], kind="stable")
    best: Ids = ids[order[:count]]
    return best


def _draw(ids: Ids | None, weights: NDArray[np.floating[Any]], number: float) -> int:
    """The token at which the running sum of the weights passes `number` of their total."""
    if ids is not None:
        return int(ids[_passing(weights, number)])
    # The whole vocabulary: first a stretch, then a token of it.
    edges = np.arange(0, len(weights), _STRETCH)
    stretches = np.add.reduceat(weights, edges).astype(np.float64)
    stretch = _passing(stretches, number)
    before = float(stretches[:stretch].sum())
    inside = min(max((number * float(stretches.sum()) - before) / float(stretches[stretch]), 0.0), 1.0)
    start = int(edges[stretch])
    return start + _passing(weights[start : start + _STRETCH], inside)


def _passing(weights: NDArray[np.floating[Any]], number: float) -> int:
    """The first index whose running sum exceeds `number` of the total; the last with weight, if none does."""
    sums = np.cumsum(weights, dtype=np.float64)
    index = int(np.searchsorted(sums, number * sums[-1], side="right"))
    return index if index < len(sums) else int(np.flatnonzero(weights)[-1])


def token_logprob(logits: Float32, token: int, count: int) -> TokenLogprob:
    """Log probabilities under the model's own distribution over [V]: the token's and the `count` best."""
    top = logits.max()
    normaliser = float(top) + float(np.log(np.exp(logits - top).sum(dtype=np.float64)))
    best = top_ids(logits, count).tolist() if count else []
    return TokenLogprob(
        token_id=token,
        logprob=float(logits[token]) - normaliser,
        top=tuple((other, float(logits[other]) - normaliser) for other in best),
    )
