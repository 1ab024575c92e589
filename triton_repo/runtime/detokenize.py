"""Token ids to text as they arrive. The pieces put together are exactly the decoding of all ids at once.

No replacement character is sent before the bytes behind it are final, nothing that was sent is taken back,
and the cost is linear in the number of tokens.
"""

from __future__ import annotations

import codecs
import json
from typing import Any, Protocol

from tokenizers import Tokenizer

_REPLACEMENT = "\ufffd"


class TokenStream(Protocol):
    """The text of one sequence of tokens, special tokens left out."""

    def push(self, token: int) -> str:
        """The text that became final with this token, often "" in the middle of a character."""
        ...

    def flush(self) -> str:
        """The rest: bytes that never became a character come out as U+FFFD. The stream is over."""
        ...


class StreamFactory:
    """Makes streams for one tokenizer, in the cheapest way that is exact for its decoder."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(
            token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special
        )
        parts = _decoder_parts(json.loads(tokenizer.to_str()).get("decoder"))
        self._bytes = _byte_level_table(tokenizer, self._special) if parts == ["ByteLevel"] else None
        self._byte_tokens = _byte_fallback_ids(tokenizer) if "ByteFallback" in parts else frozenset[int]()

    @property
    def byte_level(self) -> bool:
        """Whether each character of a token stands for one byte of text."""
        return self._bytes is not None

    def stream(self) -> TokenStream:
        """A stream for the output of one request."""
        if self._bytes is not None:
            return ByteLevelStream(self._bytes)
        return WindowStream(self._tokenizer, self._special, self._byte_tokens)


class ByteLevelStream:
    """For byte-level BPE: tokens are bytes, and text is their UTF-8 decoding."""

    def __init__(self, table: list[bytes]) -> None:
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(self._table[token]) if token < len(self._table) else ""

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowStream:
    """For any decoder whose text for a token depends on its neighbours only.

    Decodes a window that begins with the last token already sent, and sends what the new tokens add to it.
    Byte fallback decodes a run of byte tokens as a whole, so a run is final once another token follows.
    """

    def __init__(self, tokenizer: Tokenizer, special: frozenset[int], byte_tokens: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._byte_tokens = byte_tokens
        self._window: list[int] = []
        self._context = 0  # length of the text of the window's first token, which was sent

    def push(self, token: int) -> str:
        if token in self._special or self._tokenizer.id_to_token(token) is None:
            return ""  # decoding leaves these out before anything else, so that they do not even end a run
        self._window.append(token)
        if token in self._byte_tokens:
            return ""
        new = self._decode(self._window)[self._context :]
        if not self._byte_tokens and new.endswith(_REPLACEMENT):
            return ""  # perhaps a character cut in two
        self._window = [token]
        self._context = len(self._decode(self._window))
        return new

    def flush(self) -> str:
        return self._decode(self._window)[self._context :]

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text


def _decoder_parts(decoder: dict[str, Any] | None) -> list[str]:
    """The types of a decoder's parts, in order."""
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [name for part in decoder["decoders"] for name in _decoder_parts(part)]
    return [decoder["type"]]


def _byte_fallback_ids(tokenizer: Tokenizer) -> frozenset[int]:
    ids = (tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
    return frozenset(token for token in ids if token is not None)


def _byte_level_table(tokenizer: Tokenizer, special: frozenset[int]) -> list[bytes]:
    """The bytes of every id. Special tokens have none.

    The decoder maps a token's characters back to bytes; a token with a character outside that map (an added
    one, such as "<a b>") stands for itself in UTF-8.
    """
    characters = _characters_of_bytes()
    vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for text, token in vocabulary.items():
        if token in special:
            continue
        try:
            table[token] = bytes(characters[character] for character in text)
        except KeyError:
            table[token] = text.encode()
    return table


def _characters_of_bytes() -> dict[str, int]:
    """The byte-level alphabet: printable Latin-1 bytes stand for themselves, the others for U+0100 and up."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet
