"""Small tokenizers of the kinds in use, made here so that tests need no download."""

from __future__ import annotations

import json
import pydoc_data.topics

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

TEXT = list(pydoc_data.topics.topics.values())[:30]


def byte_level() -> Tokenizer:
    """GPT-2 and Llama-3 style: every byte has a token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.add_tokens([AddedToken("<tool call>"), AddedToken("é"), "世界"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Llama-2 style: ▁ for spaces, <0xNN> for what the vocabulary lacks, one leading space stripped."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<unk>", "<s>", "</s>", *bytes_], show_progress=False
    )
    words = [word for text in TEXT[:8] for word in text.split()]
    tokenizer.train_from_iterator([" ".join(words)[:40_000].replace("\n", " ")], trainer)
    # Byte tokens are part of the vocabulary, not special: write the tokenizer anew with that.
    config = json.loads(tokenizer.to_str())
    config["added_tokens"] = [t for t in config["added_tokens"] if not t["content"].startswith("<0x")]
    return Tokenizer.from_str(json.dumps(config))


def metaspace() -> Tokenizer:
    """T5 and Gemma-like: a Metaspace decoder, no bytes."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXT[:10], trainer)
    return tokenizer


def word_piece() -> Tokenizer:
    """BERT style: ## marks what continues a word."""
    vocabulary = ["[UNK]", "the", "##ing", "eat", "!", "un", "##s", "世", "��"]
    tokenizer = Tokenizer(models.WordPiece({t: i for i, t in enumerate(vocabulary)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return tokenizer


KINDS = {
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "metaspace": metaspace,
    "word_piece": word_piece,
}
