"""Comparing an engine with transformers, the oracle: logits, divergence, greedy choices and perplexity.

torch and transformers are imported only when a comparison runs.
"""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginebay.export.errors import ExportError
from enginebay.export.stepping import Stepper, StepRunner, Stream

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
_DECODED_TAIL = 8

Oracle = Callable[[Sequence[int]], NDArray[np.float32]]


@dataclass(frozen=True)
class Verification:
    """How an engine differs from the reference over `tokens` positions.

    `max_abs_logit_error`: largest difference of a logit. `mean_kl`: mean over positions of KL(reference ‖
    engine), nats. `greedy_match`: share of positions at which both choose the same token. Perplexities are
    of the next token of the same windows. `text`: natural text, or random ids where the model has no
    tokenizer.
    """

    max_abs_logit_error: float
    mean_kl: float
    greedy_match: float
    perplexity: float
    reference_perplexity: float
    tokens: int
    text: bool


def verify(
    runner: StepRunner,
    reference: Path,
    *,
    tokens: int = 2048,
    window: int = 256,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Verification:
    """Runs windows of text through `runner` and through transformers in float32.

    The engine sees each batch of windows as steps that mix whole prefill, chunked prefill and decode.
    `reference` is an HF folder or a GGUF file; `progress(done, total)` counts tokens. Raises ExportError
    where the two cannot be compared.
    """
    oracle, vocab = load_oracle(reference)
    if runner.limits.vocab_size != vocab:
        raise ExportError(
            f"the engine has {runner.limits.vocab_size} tokens, {reference} has {vocab}: not the same model"
        )
    window = min(window, tokens, runner.limits.max_sequence)
    ids = text_ids(reference)
    windows = _windows(ids, vocab, window=window, count=max(1, tokens // window), seed=seed)
    tally = _Tally()
    size = max(1, min(4, runner.limits.max_batch, runner.limits.max_step_tokens // (window + 1)))
    for start in range(0, len(windows), size):
        batch = windows[start : start + size]
        for sequence, logits in zip(batch, ragged_logits(runner, batch), strict=True):
            tally.add(sequence, logits, oracle(sequence))
            if progress is not None:
                progress(tally.positions, len(windows) * window)
    return tally.result(text=ids is not None)


def load_oracle(reference: Path) -> tuple[Oracle, int]:
    """transformers' logits [tokens, vocab] in float32 as a function of token ids, and the vocabulary's size.

    Raises ExportError where torch or transformers is not installed, or the folder is not a model it reads.
    """
    try:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging
    except ImportError as error:
        raise ExportError(
            f"verifying needs torch and transformers ({error}): pip install 'enginebay[torch]'"
        ) from error
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # its advice to those who train is not ours to pass on
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            reference.parent if reference.is_file() else reference,
            gguf_file=gguf_file(reference),
            dtype=torch.float32,
            attn_implementation="eager",  # the others leave out soft caps and sinks
            local_files_only=True,
            trust_remote_code=False,
        )
    except (OSError, ValueError) as error:
        raise ExportError(f"transformers cannot load {reference}: {error}") from error
    model.eval()

    def logits(ids: Sequence[int]) -> NDArray[np.float32]:
        with torch.inference_mode():
            values = model(torch.tensor([list(ids)]), use_cache=False).logits[0].float()
        result: NDArray[np.float32] = values.numpy()
        return result

    return logits, int(model.get_input_embeddings().weight.shape[0])


def gguf_file(folder: Path) -> str | None:
    """The GGUF file of a folder that has no other weights, or the file itself."""
    if folder.is_file():
        return folder.name
    names = [path.name for path in sorted(folder.glob("*.gguf"))]
    others = any(folder.glob("*.safetensors")) or any(folder.glob("pytorch_model*.bin"))
    return names[0] if names and not others else None


def text_ids(reference: Path) -> list[int] | None:
    """The second half of Python's own help topics as token ids; None where the folder has no tokenizer."""
    if not any((reference / name).is_file() for name in _TOKENIZER_FILES) and gguf_file(reference) is None:
        return None
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            reference.parent if reference.is_file() else reference,
            gguf_file=gguf_file(reference),
            local_files_only=True,
            trust_remote_code=False,
        )
    except Exception as error:  # transformers and tokenizers raise many kinds for files that are none
        raise ExportError(f"transformers cannot read the tokenizer of {reference}: {error}") from error
    topics = pydoc_data.topics.topics
    text = "\n\n".join(topics[name] for name in sorted(topics))
    return list(tokenizer(text[len(text) // 2 :], add_special_tokens=False)["input_ids"])


def ragged_logits(runner: StepRunner, sequences: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
    """Logits [tokens, vocab] of every position of each sequence, from steps that mix prefill, chunks and
    decode.

    Even sequences are prefilled whole, odd ones in chunks, and all decode their last tokens one by one.
    """
    stepper = Stepper(runner)
    streams = [Stream(list(tokens)) for tokens in sequences]
    parts: list[list[NDArray[np.float32]]] = [[] for _ in streams]
    budget = max(1, runner.limits.max_step_tokens // max(1, len(streams)))
    while True:
        work = [
            (index, stream, _count(stream, index, budget))
            for index, stream in enumerate(streams)
            if stream.computed < len(stream.tokens)
        ]
        if not work:
            break
        outputs = stepper.step([(stream, count) for _, stream, count in work])
        for (index, _, _), output in zip(work, outputs, strict=True):
            parts[index].append(output)
    return [np.concatenate(part) for part in parts]


def _count(stream: Stream, index: int, budget: int) -> int:
    """Tokens of the next step.

    What is left of the prompt (a third of it in odd streams), then one at a time.
    """
    prompt = max(1, len(stream.tokens) - _DECODED_TAIL)
    if stream.computed >= prompt:
        return 1
    wanted = prompt if index % 2 == 0 else -(-prompt // 3)
    return min(wanted, prompt - stream.computed, budget)


def _windows(ids: list[int] | None, vocab: int, *, window: int, count: int, seed: int) -> list[list[int]]:
    """`count` windows spread over the text, or random ids."""
    if ids is None or len(ids) < window:
        rng = np.random.default_rng(seed)
        return [rng.integers(0, vocab, window).tolist() for _ in range(count)]
    starts = np.linspace(0, len(ids) - window, count).astype(int)
    return [ids[start : start + window] for start in starts]


class _Tally:
    """Sums over positions."""

    def __init__(self) -> None:
        self.positions = 0
        self._predicted = 0
        self._error = 0.0
        self._kl = 0.0
        self._matches = 0
        self._losses = [0.0, 0.0]

    def add(self, ids: Sequence[int], logits: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
        self.positions += len(ids)
        self._predicted += len(ids) - 1
        difference = np.abs(logits - expected)
        # A NaN anywhere must show, and max() of Python would hide it.
        self._error = float(np.maximum(self._error, difference.max()))
        self._matches += int((logits.argmax(-1) == expected.argmax(-1)).sum())
        ours, theirs = _log_softmax(logits), _log_softmax(expected)
        self._kl += float((np.exp(theirs) * (theirs - ours)).sum())
        following = np.arange(len(ids) - 1), np.asarray(ids[1:])
        for side, values in enumerate((ours, theirs)):
            self._losses[side] -= float(values[following].sum())

    def result(self, text: bool) -> Verification:
        predicted = max(1, self._predicted)
        return Verification(
            max_abs_logit_error=self._error,
            mean_kl=self._kl / self.positions,
            greedy_match=self._matches / self.positions,
            perplexity=float(np.exp(self._losses[0] / predicted)),
            reference_perplexity=float(np.exp(self._losses[1] / predicted)),
            tokens=self.positions,
            text=text,
        )


def _log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result
