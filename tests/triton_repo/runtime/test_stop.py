"""Stop strings (S03): the earliest is cut exactly, only true prefixes are held, nothing is lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from enginebay.triton_repo.runtime.stop import StopMatcher


def send(stop: tuple[str, ...], pieces: list[str], *, include: bool = False) -> tuple[list[str], bool]:
    """What comes out for each piece, and whether a stop string was met. Flushed at the end otherwise."""
    matcher = StopMatcher(stop, include=include)
    sent = []
    for piece in pieces:
        released = matcher.push(piece)
        sent.append(released.text)
        if released.stopped:
            return sent, True
    sent.append(matcher.flush())
    return sent, False


@pytest.mark.parametrize(
    ("stop", "pieces", "sent", "stopped"),
    [
        (("DEFGHIJ",), ["ABC", "DEF", "GHI", "J"], ["ABC", "", "", ""], True),
        (("DEFGHIJ",), ["ABC", "DEF", "X"], ["ABC", "", "DEFX", ""], False),
        (("stop",), ["please stop!"], ["please "], True),
        (("stop!",), ["st", "op", "!"], ["", "", ""], True),
        (("xyz", "de"), ["abcdexyz"], ["abc"], True),
        (("xyz", "de"), ["abcx", "yzde"], ["abc", ""], True),
        (("DEF",), ["ABCDE"], ["ABC", "DE"], False),
        (("aab",), ["a", "a", "a", "b"], ["", "", "a", ""], True),
        (("b", "abc"), ["a", "b"], ["", "a"], True),
        (("ab", "b"), ["ab"], [""], True),
        ((), ["anything"], ["anything", ""], False),
    ],
)
def test_s03(stop: tuple[str, ...], pieces: list[str], sent: list[str], stopped: bool) -> None:
    assert send(stop, pieces) == (sent, stopped)


def test_include_keeps_the_stop_string_and_nothing_after_it() -> None:
    assert send(("END",), ["a E", "ND b"], include=True) == (["a ", "END"], True)


ALPHABET = st.text("ab🙂", min_size=1, max_size=4)


@settings(max_examples=400)
@given(
    stop=st.lists(ALPHABET, min_size=1, max_size=3).map(tuple), pieces=st.lists(st.text("ab🙂c", max_size=5))
)
def test_the_cut_into_pieces_does_not_matter(stop: tuple[str, ...], pieces: list[str]) -> None:
    text = "".join(pieces)
    sent, stopped = send(stop, pieces)
    matches = [(end, -len(s)) for s in stop for end in range(len(s), len(text) + 1) if text[:end].endswith(s)]
    assert stopped == bool(matches)
    if matches:
        end, negative = min(matches)
        assert "".join(sent) == text[: end + negative]
    else:
        assert "".join(sent) == text


@settings(max_examples=200)
@given(
    stop=st.lists(ALPHABET, min_size=1, max_size=3).map(tuple), pieces=st.lists(st.text("ab🙂c", max_size=5))
)
def test_only_true_prefixes_are_held_back(stop: tuple[str, ...], pieces: list[str]) -> None:
    matcher = StopMatcher(stop)
    seen = sent = ""
    for piece in pieces:
        released = matcher.push(piece)
        if released.stopped:
            return
        seen, sent = seen + piece, sent + released.text
        held = seen[len(sent) :]
        assert seen == sent + held
        assert not held or any(s.startswith(held) for s in stop)
        assert not any(
            s.startswith(seen[start:]) for s in stop for start in range(len(sent)) if seen[start:]
        ), "a prefix of a stop string went out"
