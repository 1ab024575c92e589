"""What calibration runs on: token sequences from text or from a token file."""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from enginebay.builder.quant.formats import QuantizationError
from enginebay.builder.quant.interpreter import Batch
from enginebay.builder.quant.source_file import read_text, read_tokens


@dataclass(frozen=True)
class CalibrationConfig:
    """Which tokens calibration sees.

    source     a text file (.txt, .md) of 32 MiB at most, a token file (.json: a list of lists of ids, 32 MiB;
               .npy: integers [sequences, length], 256 MiB), or None: the first half of Python's help topics,
               in English prose
    sequences  at most this many, spread evenly over the text
    length     tokens of a sequence
    """

    source: Path | None = None
    sequences: int = 24
    length: int = 512

    def __post_init__(self) -> None:
        if self.sequences <= 0 or self.length <= 1:
            raise QuantizationError(
                f"calibration needs a sequence of at least two tokens, not {self.sequences} of {self.length}"
            )


def default_text(half: int) -> str:
    """The first (0) or second (1) half of Python's help topics: one to calibrate on, the other to measure
    with."""
    topics = pydoc_data.topics.topics
    text = "\n\n".join(topics[name] for name in sorted(topics))
    middle = len(text) // 2
    return text[middle:] if half else text[:middle]


def calibration_batch(folder: Path, vocab_size: int, config: CalibrationConfig) -> Batch:
    """The sequences that `config` describes; `folder` holds the tokenizer.

    Raises QuantizationError naming the file for what cannot be read, ids outside the vocabulary, and text
    without a tokenizer.
    """
    source = config.source
    if source is not None and source.suffix in (".json", ".npy"):
        tokens = read_tokens(source, config.sequences, config.length)
        return Batch(_checked(tokens, vocab_size, str(source), config))
    text = default_text(0) if source is None else read_text(source)
    return text_batch(
        folder, vocab_size, text, config, "Python's help topics" if source is None else str(source)
    )


def text_batch(folder: Path, vocab_size: int, text: str, config: CalibrationConfig, name: str) -> Batch:
    """Sequences spread evenly over `text`, tokenised by `folder`'s tokenizer.json."""
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise QuantizationError(
            f"{folder}: has no tokenizer.json to read {name} with; calibrate on a token file (.json or .npy)"
        )
    try:
        ids = Tokenizer.from_file(str(path)).encode(text, add_special_tokens=False).ids
    except Exception as error:  # tokenizers raises plain Exception for a file that is none
        raise QuantizationError(f"{path}: not a tokenizer: {error}") from error
    count = min(config.sequences, max(1, len(ids) // config.length))
    stride = len(ids) // count
    windows = [ids[i * stride : i * stride + min(config.length, stride)] for i in range(count)]
    return Batch(_checked(windows, vocab_size, name, config))


def _checked(
    sequences: Sequence[Sequence[int]], vocab_size: int, name: str, config: CalibrationConfig
) -> tuple[tuple[int, ...], ...]:
    kept = [tuple(s[: config.length]) for s in sequences[: config.sequences] if len(s) > 1]
    if not kept:
        raise QuantizationError(f"{name}: holds no sequence of at least two tokens to calibrate on")
    for index, sequence in enumerate(kept):
        low, high = min(sequence), max(sequence)
        if low < 0 or high >= vocab_size:
            raise QuantizationError(
                f"{name}: sequence {index} has token {low if low < 0 else high}, outside the model's "
                f"0..{vocab_size - 1}"
            )
    return tuple(kept)
