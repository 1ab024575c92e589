"""The tokenizer that a GGUF file carries, as tokenizer.json and what goes with it. Byte-level BPE only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from enginebay.export.errors import CheckpointError
from enginebay.export.gguf_model import GgufModel, write_json

_CONTROL_TOKEN = 3  # tokenizer.ggml.token_type of special tokens
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding"}


def known_tokenizer(model: GgufModel) -> bool:
    """Whether `write_tokenizer` knows how this file splits text."""
    kind = (model.meta.get("tokenizer.ggml.model"), model.meta.get("tokenizer.ggml.pre"))
    return kind == ("gpt2", "smollm")


def write_tokenizer(model: GgufModel, folder: Path) -> None:
    """tokenizer.json, tokenizer_config.json, generation_config.json, and the chat template if there is one.

    'smollm' splits digits one by one, then as GPT-2 does.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    meta = model.meta
    try:
        tokens: list[str] = meta["tokenizer.ggml.tokens"]
        merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
        kinds: list[int] = meta["tokenizer.ggml.token_type"]
        vocabulary = {token: index for index, token in enumerate(tokens)}
        tokenizer: Any = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    except Exception as error:  # tokenizers raises plain Exception for merges of what is no token
        raise CheckpointError(f"{model.path}: its tokenizer cannot be read: {error!r}") from error
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
    ids = {key: meta.get(f"tokenizer.ggml.{name}_token_id") for key, name in _SPECIAL.items()}
    write_json(
        folder / "tokenizer_config.json",
        {
            **{key: tokens[int(value)] for key, value in ids.items() if value is not None},
            "add_bos_token": bool(meta.get("tokenizer.ggml.add_bos_token", False)),
            "model_max_length": int(meta["llama.context_length"]),
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )
    defaults = {f"{key}_id": int(value) for key, value in sorted(ids.items()) if value is not None}
    write_json(folder / "generation_config.json", defaults)
    template = meta.get("tokenizer.chat_template")
    if template is not None:
        (folder / "chat_template.jinja").write_text(str(template), encoding="utf-8")
