"""Incremental decoding equals decoding at once, and never sends what it would have to take back."""

from __future__ import annotations

import time
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_samples import KINDS
from tokenizers import Tokenizer

from enginebay.triton_repo.runtime.detokenize import ByteLevelStream, StreamFactory, WindowStream


@cache
def tokenizer(kind: str) -> Tokenizer:
    return KINDS[kind]()


@cache
def factory(kind: str) -> StreamFactory:
    return StreamFactory(tokenizer(kind))


def pieces(kind: str, ids: list[int]) -> list[str]:
    stream = factory(kind).stream()
    return [*(stream.push(token) for token in ids), stream.flush()]


def full(kind: str, ids: list[int]) -> str:
    return tokenizer(kind).decode(ids, skip_special_tokens=True)


@settings(max_examples=300, deadline=None)
@given(kind=st.sampled_from(sorted(KINDS)), data=st.data())
def test_pieces_equal_the_whole(kind: str, data: st.DataObject) -> None:
    size = tokenizer(kind).get_vocab_size()
    ids = data.draw(st.lists(st.integers(0, size - 1), max_size=40))
    assert "".join(pieces(kind, ids)) == full(kind, ids)


@settings(max_examples=200, deadline=None)
@given(raw=st.one_of(st.binary(max_size=24), st.text(max_size=10).map(str.encode)))
def test_bytes_one_by_one(raw: bytes) -> None:
    """Any bytes, valid or not, as single-byte tokens of both kinds of byte tokenizers."""
    for kind, ids in (("byte_level", byte_level_ids(raw)), ("byte_fallback", fallback_ids(raw))):
        assert "".join(pieces(kind, ids)) == full(kind, ids)


def byte_level_ids(raw: bytes) -> list[int]:
    table = factory("byte_level").stream()._table
    return [table.index(bytes([byte])) for byte in raw]


def fallback_ids(raw: bytes) -> list[int]:
    return [tokenizer("byte_fallback").token_to_id(f"<0x{byte:02X}>") for byte in raw]


def test_the_cheap_stream_is_used_where_it_is_exact() -> None:
    assert isinstance(factory("byte_level").stream(), ByteLevelStream)
    assert isinstance(factory("byte_fallback").stream(), WindowStream)


def test_s01_an_emoji_in_four_tokens() -> None:
    assert pieces("byte_level", byte_level_ids("🙂".encode())) == ["", "", "", "🙂", ""]
    ids = [*fallback_ids("🙂".encode()), tokenizer("byte_fallback").token_to_id("a")]
    assert pieces("byte_fallback", ids) == ["", "", "", "", "🙂a", ""]


def test_s01_a_character_that_is_completed_late_is_sent_once() -> None:
    """ "A 世" with the last byte of 世 in a later token than the first ones, then more text."""
    raw = "A 世ab世".encode()
    sent = pieces("byte_level", byte_level_ids(raw))
    assert sent == ["A", " ", "", "", "世", "a", "b", "", "", "世", ""]


def test_s01_the_end_in_the_middle_of_a_character() -> None:
    ids = byte_level_ids("a🙂".encode()[:-1])
    assert pieces("byte_level", ids) == ["a", "", "", "", "\ufffd"]
    assert full("byte_level", ids) == "a\ufffd"
    ids = fallback_ids("🙂".encode()[:-1])
    assert pieces("byte_fallback", ids) == ["", "", "", "\ufffd" * 3]


def test_s01_an_invalid_byte_goes_out_once_it_is_final() -> None:
    assert pieces("byte_level", byte_level_ids(b"a\xffb")) == ["a", "\ufffd", "b", ""]
    assert pieces("byte_level", byte_level_ids(b"\xe4\xb8a")) == ["", "", "\ufffda", ""]


def test_special_tokens_are_silent_and_do_not_cut_a_character() -> None:
    eos = tokenizer("byte_level").token_to_id("</s>")
    smile = byte_level_ids("🙂".encode())
    assert "".join(pieces("byte_level", [*smile[:2], eos, *smile[2:]])) == "🙂"
    eos = tokenizer("byte_fallback").token_to_id("</s>")
    smile = fallback_ids("🙂".encode())
    ids = [*smile[:2], eos, *smile[2:]]
    assert "".join(pieces("byte_fallback", ids)) == full("byte_fallback", ids) == "🙂"


def test_ids_beyond_the_tokenizer_are_silent() -> None:
    """Models pad their vocabulary."""
    for kind in KINDS:
        ids = [5, tokenizer(kind).get_vocab_size() + 100, 6]
        assert "".join(pieces(kind, ids)) == full(kind, ids)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "metaspace"])
def test_text_survives_a_round_trip(kind: str) -> None:
    text = "The quick brown fox, again and again."
    ids = tokenizer(kind).encode(text, add_special_tokens=False).ids
    sent = pieces(kind, ids)
    assert "".join(sent) == text
    assert sum(bool(piece) for piece in sent) > len(ids) // 2, "text is sent as it comes"


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "metaspace"])
def test_cost_is_linear(kind: str) -> None:
    """Ten times the tokens cost far less than a hundred times as much."""
    ids = tokenizer(kind).encode("one two three " * 40, add_special_tokens=False).ids[:100]

    def seconds(tokens: list[int]) -> float:
        best = float("inf")
        for _ in range(3):
            began = time.thread_time()
            pieces(kind, tokens)
            best = min(best, time.thread_time() - began)
        return best

    assert seconds(ids * 50) < 40 * seconds(ids * 5)
