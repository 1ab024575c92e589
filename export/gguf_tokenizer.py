"""The tokenizer that a GGUF file carries, as tokenizer.json and what goes with it. Byte-level BPE only."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from enginebay.export.errors import CheckpointError
from enginebay.export.gguf_header import shown
from enginebay.export.gguf_model import GgufModel, write_json

_CONTROL_TOKEN = 3  # tokenizer.ggml.token_type of special tokens
_TOKEN_OF = {"bos_token_id": "bos_token", "eos_token_id": "eos_token", "pad_token_id": "pad_token"}


def known_tokenizer(model: GgufModel) -> bool:
    """Whether `write_tokenizer` knows how this file splits text."""
    kind = (model.meta.get("tokenizer.ggml.model"), model.meta.get("tokenizer.ggml.pre"))
    return kind == ("gpt2", "smollm")


def write_tokenizer(model: GgufModel, folder: Path) -> None:
    """tokenizer.json, tokenizer_config.json, generation_config.json, and the chat template if there is one.

    'smollm' splits digits one by one, then as GPT-2 does. CheckpointError where lists are missing, of other
    lengths than the vocabulary, or do not fit each other.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    special = model.llama.special
    tokens = _list(model, "tokens", str)
    kinds = _list(model, "token_type", int)
    merges = _list(model, "merges", str)
    if len(tokens) > model.llama.vocab or len(kinds) != len(tokens):
        raise _wrong(
            model,
            f"{len(tokens)} tokens and {len(kinds)} token types for a vocabulary of {model.llama.vocab}",
        )
    beyond = {key: value for key, value in special.items() if value >= len(tokens)}
    if beyond:
        raise _wrong(model, f"{beyond} where there are {len(tokens)} tokens")
    repeated = [token for token, count in Counter(tokens).items() if count > 1]
    if repeated:
        raise _wrong(model, f"token {shown(repeated[0])} has two ids")
    pairs = [tuple(merge.split(" ")) for merge in merges]
    unpaired = [merge for merge, pair in zip(merges, pairs, strict=True) if len(pair) != 2]
    if unpaired:
        raise _wrong(model, f"merge {shown(unpaired[0])} is not two tokens with a space between")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    try:
        tokenizer: Any = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    except Exception as error:  # tokenizers raises plain Exception for merges of what is no token
        raise _wrong(model, shown(str(error))) from error
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == _CONTROL_TOKEN
        ]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            **{_TOKEN_OF[key]: tokens[value] for key, value in special.items()},
            "add_bos_token": bool(model.meta.get("tokenizer.ggml.add_bos_token", False)),
            "model_max_length": model.llama.context,
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )
    write_json(folder / "generation_config.json", dict(sorted(special.items())))
    template = model.meta.get("tokenizer.chat_template")
    if template is not None:
        (folder / "chat_template.jinja").write_text(str(template), encoding="utf-8")


def _list(model: GgufModel, name: str, kind: type) -> list[Any]:
    values = model.meta.get(f"tokenizer.ggml.{name}")
    if not isinstance(values, list) or not all(type(value) is kind for value in values):
        said = "missing" if values is None else shown(values)
        raise _wrong(model, f"tokenizer.ggml.{name} is {said}; a list of {kind.__name__} is wanted")
    return values


def _wrong(model: GgufModel, what: str) -> CheckpointError:
    return CheckpointError(f"{model.path}: its tokenizer cannot be read: {what}")
