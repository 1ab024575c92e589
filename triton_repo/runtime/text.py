"""Text to token ids and back, from the tokenizer files of an engine folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from enginebay.triton_repo.runtime.admission import check_text
from enginebay.triton_repo.runtime.chat_template import ChatTemplate, Message
from enginebay.triton_repo.runtime.detokenize import StreamFactory, TokenStream
from enginebay.triton_repo.runtime.engine import EngineLimits
from enginebay.triton_repo.runtime.request import RequestError

_NORMALIZED = 4  # bytes of text that a normalizer may make one of: NFC and NFKC make 1 of 3
_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


class TextTokenizer:
    """Reads tokenizer.json, and where present tokenizer_config.json, generation_config.json, config.json and
    chat_template.jinja. Safe to share between threads.

    With the `limits` of the engine that it serves, end tokens outside the model's vocabulary are refused, and
    so are, before they are encoded, texts that cannot fit. FileNotFoundError without tokenizer.json;
    ValueError naming the file that cannot be read.
    """

    def __init__(self, folder: Path, limits: EngineLimits | None = None) -> None:
        self._limits = limits
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file; text in and out needs the model's tokenizer")
        try:
            self._tokenizer: Tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{path}: not a tokenizer this version reads: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._streams = StreamFactory(self._tokenizer)
        config = _read_json(folder / "tokenizer_config.json")
        special = {
            name: text for name in _SPECIAL_TOKENS if (text := _token_text(config.get(name))) is not None
        }
        self._eos_ids = self._find_eos(folder, special.get("eos_token"))
        self._token_bytes = self._most_bytes_of_a_token()
        source = _template_source(folder, config)
        self._template = ChatTemplate(source, special) if source is not None else None

    @property
    def eos_ids(self) -> frozenset[int]:
        """Every token that ends a sequence: of generation_config.json, config.json and the tokenizer."""
        return self._eos_ids

    @property
    def vocab_size(self) -> int:
        """Tokens of the tokenizer, added ones included. The model's own vocabulary may be larger."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Token ids of a text. RequestError where it is no valid Unicode, too long, or has no tokens."""
        check_text("text", text)
        self._check_length(text)
        ids = tuple(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
        if not ids:
            raise RequestError("text: the prompt has no tokens; at least 1 is needed")
        return ids

    def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> tuple[int, ...]:
        """Token ids of a conversation through the chat template, whose special tokens are the only ones.

        RequestError where there is no template, no message, or the template refuses.
        """
        if self._template is None:
            raise RequestError("messages: this model has no chat template; send a raw text prompt")
        if not messages:
            raise RequestError("messages: empty; at least 1 message is needed")
        text = self._template.render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, **variables
        )
        return self.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of all ids at once."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def stream(self) -> TokenStream:
        """Incremental decoding for one request."""
        return self._streams.stream()

    def _check_length(self, text: str) -> None:
        """Encoding takes time, so a text that cannot fit is refused by its length."""
        if self._limits is None:
            return
        size = len(text.encode())
        most = self._limits.max_sequence * self._token_bytes
        if size > most:
            raise RequestError(
                f"text: {size} bytes; the {self._limits.max_sequence} tokens of prompt and output that this "
                f"engine holds stand for {most} bytes at most"
            )

    def _most_bytes_of_a_token(self) -> int:
        """How much text one token stands for at most, generously where a normalizer shortens the text."""
        added = {token.content for token in self._tokenizer.get_added_tokens_decoder().values()}
        longest = max(
            # A space between words may belong to no token at all.
            len(token) if self._streams.byte_level and token not in added else len(token.encode()) + 1
            for token in self._tokenizer.get_vocab(with_added_tokens=True)
        )
        return longest if self._tokenizer.normalizer is None else _NORMALIZED * longest

    def _find_eos(self, folder: Path, eos_token: str | None) -> frozenset[int]:
        ids: set[int] = set()
        for name in ("generation_config.json", "config.json"):
            path = folder / name
            value = _read_json(path).get("eos_token_id")
            for token in value if isinstance(value, list) else [value]:
                if token is None:
                    continue
                if not isinstance(token, int) or isinstance(token, bool) or token < 0:
                    raise ValueError(f"{path}: eos_token_id {value!r} is not a token id or a list of them")
                self._check_eos(path, token)
                ids.add(token)
        if eos_token is not None and (token := self._tokenizer.token_to_id(eos_token)) is not None:
            self._check_eos(folder / "tokenizer_config.json", token)
            ids.add(token)
        return frozenset(ids)

    def _check_eos(self, path: Path, token: int) -> None:
        if self._limits is not None and token >= self._limits.vocab_size:
            raise ValueError(
                f"{path}: end token {token} is outside the model's vocabulary of {self._limits.vocab_size} "
                "tokens; correct the file"
            )


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a file, empty where there is no file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: holds {type(value).__name__}, not an object")
    return value


def _token_text(value: object) -> str | None:
    """A special token as text; some files wrap it in an object."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _template_source(folder: Path, config: dict[str, Any]) -> str | None:
    """chat_template.jinja, or else the template inside tokenizer_config.json ("default" of several)."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None
