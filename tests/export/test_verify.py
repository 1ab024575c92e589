"""verify(): on text with a tokenizer, on random ids without, and honest about a model that is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from export_support import ReferenceRunner, make_model, save
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig

from enginebay.export.errors import ExportError
from enginebay.export.exporter import export_model
from enginebay.export.stepping import Step
from enginebay.export.verify import verify


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("verify")
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
    save(make_model(config), folder / "model")
    export_model(folder / "model", folder / "exported")
    return folder / "model", folder / "exported"


class Disturbed:
    """A runner whose logits have one wrong value."""

    def __init__(self, runner: ReferenceRunner, value: float) -> None:
        self.limits, self._runner, self._value = runner.limits, runner, value

    def run(self, inputs: Step) -> Any:
        logits = self._runner.run(inputs)
        logits[0, 5] += self._value
        return logits


def test_random_ids_without_a_tokenizer(model: tuple[Path, Path]) -> None:
    folder, exported = model
    result = verify(ReferenceRunner(exported), folder, tokens=96, window=32)
    assert not result.text
    assert result.tokens == 96
    assert result.max_abs_logit_error < 1e-4
    assert result.mean_kl < 1e-9
    assert result.greedy_match == 1.0
    assert result.perplexity == pytest.approx(result.reference_perplexity, rel=1e-5)
    assert result.perplexity > 10


def test_text_with_a_tokenizer(model: tuple[Path, Path]) -> None:
    folder, exported = model
    vocab = {chr(32 + index): index for index in range(96)} | {"\n": 96}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    try:
        result = verify(ReferenceRunner(exported), folder, tokens=64, window=32)
    finally:
        (folder / "tokenizer.json").unlink()
        (folder / "tokenizer_config.json").unlink()
    assert result.text
    assert result.max_abs_logit_error < 1e-4


@pytest.mark.parametrize("value", [3.0, np.nan])
def test_a_wrong_logit_shows(model: tuple[Path, Path], value: float) -> None:
    folder, exported = model
    result = verify(Disturbed(ReferenceRunner(exported), value), folder, tokens=64, window=32)
    assert np.isnan(result.max_abs_logit_error) if np.isnan(value) else result.max_abs_logit_error > 2.9
    assert not result.mean_kl < 1e-6


def test_another_vocabulary_is_refused(model: tuple[Path, Path], tmp_path: Path) -> None:
    _, exported = model
    other = save(
        make_model(
            LlamaConfig(
                vocab_size=51, hidden_size=32, intermediate_size=8, num_hidden_layers=1, num_attention_heads=4
            )
        ),
        tmp_path / "other",
    )
    with pytest.raises(ExportError, match=r"97 tokens.*51"):
        verify(ReferenceRunner(exported), other)


def test_a_folder_that_is_no_model_is_refused(model: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="cannot load"):
        verify(ReferenceRunner(model[1]), tmp_path)
