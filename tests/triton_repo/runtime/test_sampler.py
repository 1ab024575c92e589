"""Sampling: filters against a full sort, rows independent of each other, distributions, bad logits."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from enginebay.triton_repo.runtime.request import SamplingParams
from enginebay.triton_repo.runtime.rng import philox4x32, uniform
from enginebay.triton_repo.runtime.sampler import RowState, candidates, sample, token_logprob, top_ids


def state(
    prompt: tuple[int, ...] = (), seed: int = 0, stop: frozenset[int] = frozenset(), **fields: object
) -> RowState:
    return RowState(SamplingParams(**fields), prompt, stop, seed)


def one(logits: list[float] | np.ndarray, row: RowState) -> int:
    (choice,) = sample(np.asarray([logits], np.float32), [row])
    assert choice.error is None
    return choice.token


def sorted_reference(row: np.ndarray, params: SamplingParams) -> dict[int, float]:
    """Allowed ids and their probabilities, by sorting everything in float64."""
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    if params.top_k > 0:
        order = order[: params.top_k]
    scaled = np.array([(float(row[i]) - float(row.max())) / params.temperature for i in order])
    weights = np.exp(scaled)
    total, kept, mass = weights.sum(), 0, 0.0
    for weight in weights:
        if kept and params.top_p < 1 and mass >= params.top_p * total:
            break
        kept, mass = kept + 1, mass + weight
    order, weights = order[:kept], weights[:kept]
    keep = [(i, w) for i, w in zip(order, weights, strict=True) if w >= params.min_p]
    mass = sum(w for _, w in keep)
    return {i: w / mass for i, w in keep if w >= 1e-37}  # float32 has no smaller weights


def distribution(row: np.ndarray, params: SamplingParams) -> dict[int, float]:
    ids, weights = candidates(row, params)
    ids = np.arange(len(row)) if ids is None else ids
    total = weights.sum()
    return {int(i): float(w / total) for i, w in zip(ids, weights, strict=True) if w >= 1e-37}


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.sampled_from([3, 63, 64, 65, 500, 4096, 10_000]),
    spread=st.sampled_from([0.01, 1.0, 5.0]),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, -1, 1, 2, 40, 700, 9_999_999]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 1e-9, 0.0]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
)
def test_filters_equal_a_full_sort(
    seed: int, size: int, spread: float, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    row = np.random.default_rng(seed).normal(0, spread, size).astype(np.float32)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    found, expected = distribution(row, params), sorted_reference(row, params)
    # Rounding may move a border by one candidate whose weight is about that rounding.
    for token in found.keys() ^ expected.keys():
        assert found.get(token, expected.get(token, 1.0)) < 1e-2
        assert abs(len(found) - len(expected)) <= 1
    if found.keys() == expected.keys():
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-12)


@given(
    row=hnp.arrays(np.float32, st.integers(1, 400), elements=st.integers(-3, 3).map(float)),
    count=st.integers(1, 500),
)
def test_top_ids_among_many_ties(row: np.ndarray, count: int) -> None:
    expected = sorted(range(len(row)), key=lambda i: (-row[i], i))[:count]
    assert top_ids(row, count).tolist() == expected


def test_top_ids_of_a_masked_row() -> None:
    row = np.full(1000, -np.inf, np.float32)
    row[[7, 900]] = 1.0, 2.0
    assert top_ids(row, 3).tolist() == [900, 7, 0]


# S07: edges of the filters. Everything else is what temperature alone would give.
@pytest.mark.parametrize("fields", [{"top_k": 9_999_999}, {"top_k": -1}, {"top_k": 0}, {"top_p": 1.0}])
def test_s07_filters_that_filter_nothing(fields: dict[str, float]) -> None:
    row = np.array([2, 1, 0, -1], np.float32)
    params = SamplingParams(temperature=1.0, **fields)
    weights = np.exp(row.astype(np.float64))
    assert list(distribution(row, params).values()) == pytest.approx(weights / weights.sum(), rel=1e-6)


@pytest.mark.parametrize("fields", [{"top_k": 1}, {"top_p": 0.0}, {"top_p": 1e-9}, {"min_p": 1.0}])
def test_s07_filters_that_leave_the_best(fields: dict[str, float]) -> None:
    row = np.array([0, 3, 3, -1], np.float32)
    best = distribution(row, SamplingParams(temperature=1.0, **fields))
    assert best == ({1: 0.5, 2: 0.5} if "min_p" in fields else {1: 1.0})


def test_s07_temperature_zero_is_argmax_whatever_the_filters() -> None:
    assert one([0, 5, 5, 1], state(temperature=0.0, top_p=0.5, top_k=3, seed=9)) == 1


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-300])
def test_p03_tiny_temperatures_are_finite_and_sharp(temperature: float) -> None:
    row = np.array([1, 4, 3.9, -1], np.float32)
    ids, weights = candidates(row, SamplingParams(temperature=temperature))
    assert ids is None
    assert np.isfinite(weights).all()
    assert weights.tolist() == [0, 1, 0, 0]


def test_s07_top_logprobs_beyond_the_vocabulary() -> None:
    logits = np.array([0.0, 1.0, 2.0], np.float32)
    result = token_logprob(logits, 1, 100)
    assert [token for token, _ in result.top] == [2, 1, 0]
    assert np.exp([value for _, value in result.top]).sum() == pytest.approx(1)


def test_logprobs_are_those_of_the_model_before_any_adjustment() -> None:
    logits = np.random.default_rng(5).normal(0, 3, 300).astype(np.float32)
    row = state(
        (1, 2, 3), temperature=0.7, top_k=4, repetition_penalty=1.8, frequency_penalty=1.0, logprobs=3, seed=3
    )
    (choice,) = sample(logits[None], [row])
    exact = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum())
    assert choice.logprob is not None
    assert choice.logprob.logprob == pytest.approx(exact[choice.token], abs=1e-5)
    best = np.argsort(-exact)[:3]
    assert [token for token, _ in choice.logprob.top] == best.tolist()
    assert [value for _, value in choice.logprob.top] == pytest.approx(exact[best], abs=1e-5)


def test_s06_repetition_covers_prompt_and_output() -> None:
    row = state((0, 0), repetition_penalty=2.0)
    row.append(1)
    adjusted = row.adjust(np.array([2, -1, 0.5], np.float32))
    assert adjusted.tolist() == [1, -2, 0.5]  # prompt 0, output 1; 2 was never seen
    row.append(2)
    assert row.adjust(np.array([2, -1, 0.5], np.float32)).tolist() == [1, -2, 0.25]


def test_s06_presence_and_frequency_cover_the_output_only() -> None:
    row = state((0, 0), presence_penalty=0.5, frequency_penalty=0.25)
    for token in (1, 1, 2):
        row.append(token)
    assert row.adjust(np.zeros(4, np.float32)).tolist() == [0, -1, -0.75, 0]


def test_penalties_over_many_tokens_equal_a_plain_count() -> None:
    rng = np.random.default_rng(2)
    prompt = tuple(rng.integers(0, 50, 30).tolist())
    output = rng.integers(0, 90, 200).tolist()
    row = state(prompt, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.1)
    for token in output:
        row.append(token)
    logits = rng.normal(0, 2, 100).astype(np.float32)
    counts = Counter(output)
    for token, value in enumerate(row.adjust(logits)):
        expected = float(logits[token])
        if token in counts or token in prompt:
            expected = expected / 1.3 if expected > 0 else expected * 1.3
        expected -= 0.4 * (token in counts) + 0.1 * counts[token]
        assert value == pytest.approx(expected, abs=1e-5)


def test_s06_rows_do_not_depend_on_their_neighbours() -> None:
    """Every mixture and order of rows gives each row what it gets alone."""
    rng = np.random.default_rng(11)
    logits = rng.normal(0, 2, (8, 1000)).astype(np.float32)
    logits[4, 3] = np.nan
    kinds = [
        {},
        {"temperature": 1.0},
        {"temperature": 0.5, "top_k": 7},
        {"repetition_penalty": 2.0},
        {},  # the row with a NaN
        {"temperature": 2.0, "top_p": 0.8, "logprobs": 2},
        {"temperature": 1.0, "min_p": 0.1},
        {"min_tokens": 3, "logprobs": 0},
    ]

    def rows() -> list[RowState]:
        return [state((1, 2), seed, frozenset({5}), **kind) for seed, kind in enumerate(kinds)]

    alone = [sample(logits[i : i + 1], [row])[0] for i, row in enumerate(rows())]
    for order in ([*range(8)], [*reversed(range(8))], rng.permutation(8).tolist()):
        states = rows()
        assert sample(logits[order], [states[i] for i in order]) == [alone[i] for i in order]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 500, 999])
def test_unusable_logits_fail_their_row_alone(bad: float, place: int) -> None:
    logits = np.random.default_rng(0).normal(0, 1, (3, 1000)).astype(np.float32)
    logits[1, place] = bad
    choices = sample(logits, [state(), state(temperature=1.0), state()])
    assert choices[1].token == -1
    assert str(bad) in (choices[1].error or "")
    assert [choices[0].token, choices[2].token] == logits[[0, 2]].argmax(1).tolist()


def test_a_row_masked_entirely_fails() -> None:
    (choice,) = sample(np.full((1, 10), -np.inf, np.float32), [state(temperature=1.0)])
    assert choice.error
    (choice,) = sample(np.zeros((1, 2), np.float32), [state(stop=frozenset({0, 1}), min_tokens=1)])
    assert "min_tokens" in (choice.error or "")


def test_equal_logits_take_the_lowest_id() -> None:
    logits = np.zeros((2, 5000), np.float32)
    logits[:, [4000, 17, 4999]] = 3.0
    greedy, best = sample(logits, [state(), state(temperature=1.0, top_k=1)])
    assert (greedy.token, best.token) == (17, 17)


def test_end_tokens_are_barred_until_min_tokens() -> None:
    row = state(stop=frozenset({2}), min_tokens=2)
    taken = []
    for _ in range(3):
        taken.append(one([0, 1, 9], row))
        row.append(taken[-1])
    assert taken == [1, 1, 2]


# Known answers of Philox4x32-10, published with the Random123 library.
@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, int, int, int]
) -> None:
    assert philox4x32(counter, key) == expected


def test_uniform_is_uniform_within_a_seed_and_across_seeds() -> None:
    for numbers in ([uniform(3, i) for i in range(4000)], [uniform(i, 3) for i in range(4000)]):
        assert min(numbers) >= 0
        assert max(numbers) < 1
        counts = np.histogram(numbers, 20, (0, 1))[0]
        chi = ((counts - 200.0) ** 2 / 200).sum()
        assert chi < 55  # 19 degrees of freedom: beyond 55 about 2 in 100,000


def test_negative_and_wide_seeds_are_distinct_streams() -> None:
    assert len({uniform(seed, 0) for seed in (0, -1, 2**63, 2**32, 1)}) == 5


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 5},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.2},
        {"temperature": 1.0, "repetition_penalty": 1.5},
    ],
)
def test_draws_follow_the_distribution(fields: dict[str, float]) -> None:
    rng = np.random.default_rng(7)
    logits = rng.normal(0, 1.2, 12).astype(np.float32)
    params = SamplingParams(**fields)
    prompt = (0, 1, 2)
    adjusted = RowState(params, prompt, frozenset(), 0).adjust(logits)
    expected = sorted_reference(adjusted, replace(params, repetition_penalty=1.0))
    draws = 6000
    rows = [RowState(params, prompt, frozenset(), seed) for seed in range(draws)]
    counts = Counter(c.token for c in sample(np.repeat(logits[None], draws, 0), rows))
    assert counts.keys() <= expected.keys()
    chi = sum((counts[t] - draws * p) ** 2 / (draws * p) for t, p in expected.items())
    # Mean df, variance 2 df: five standard deviations and a margin for few degrees of freedom.
    freedom = len(expected) - 1
    assert chi < freedom + 6 * np.sqrt(2 * max(freedom, 1)) + 6


def test_draws_over_a_whole_vocabulary_of_any_size() -> None:
    """Without filters the draw goes by stretches of the vocabulary; the last one is shorter."""
    draws = 5000
    for size in (255, 256, 257, 1000):
        logits = np.random.default_rng(size).normal(0, 1.5, size).astype(np.float32)
        rows = [state(temperature=1.0, seed=seed) for seed in range(draws)]
        counts = Counter(c.token for c in sample(np.repeat(logits[None], draws, 0), rows))
        weights = np.exp(logits.astype(np.float64))
        expected = draws * weights / weights.sum()
        bins = np.cumsum(expected) // 100  # about 100 draws in each
        found = np.array([counts[token] for token in range(size)], float)
        chi = sum(
            (found[bins == b].sum() - expected[bins == b].sum()) ** 2 / expected[bins == b].sum()
            for b in np.unique(bins)
        )
        freedom = len(np.unique(bins)) - 1
        assert chi < freedom + 6 * np.sqrt(2 * freedom)


def test_the_same_seed_draws_the_same_and_positions_differ() -> None:
    logits = np.zeros(1000, np.float32)

    def draw(seed: int) -> list[int]:
        row = state(temperature=1.0, seed=seed)
        tokens = []
        for _ in range(20):
            tokens.append(one(logits, row))
            row.append(tokens[-1])
        return tokens

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
    assert len(set(draw(1))) > 10


def test_a_request_that_cannot_be_followed_fails_alone() -> None:
    logits = np.zeros((2, 4), np.float32)
    logits[:, 2] = 1
    odd = state(stop=frozenset({99}), min_tokens=3)
    failed, fine = sample(logits, [odd, state()])
    assert failed.error is not None
    assert "IndexError" in failed.error
    assert fine.token == 2


@pytest.mark.parametrize("temperature", [1e30, 1e46, 1e300, 1.7e308])
@pytest.mark.parametrize("filters", [{}, {"top_k": 4}, {"top_p": 0.999}, {"min_p": 1e-300}])
def test_barred_tokens_are_never_drawn_however_hot(temperature: float, filters: dict[str, float]) -> None:
    """0 times -inf would be NaN."""
    row = np.zeros(300, np.float32)
    row[7:] = -np.inf
    params = SamplingParams(temperature=temperature, **filters)
    _, weights = candidates(row, params)
    assert np.isfinite(weights).all()
    drawn = {one(row, RowState(params, (), frozenset(), seed)) for seed in range(200)}
    assert drawn == set(range(4 if "top_k" in filters else 7))


def test_penalties_beyond_float32_fail_their_row() -> None:
    logits = np.array([[3e38, 1.0], [0.0, 1.0]], np.float32)
    odd = state(prompt=(0,), repetition_penalty=1e-3)
    with np.errstate(over="ignore"):
        failed, fine = sample(logits, [odd, state()])
    assert "penalties" in (failed.error or "")
    assert fine.token == 1
