"""Reading an HF config.json so that no key goes unnoticed.

Each key is read by a family, known not to matter to inference, or refused by name with its value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginebay.export.errors import UnsupportedModelError

_REQUIRED: Any = object()

# No model comes near: what is beyond them is damage, and would exhaust memory or overflow in arithmetic.
MAX_INTEGER = 2**31 - 1
MAX_NUMBER = 1e15
MAX_REPEATED = 10_000  # layers and experts: each is an object or more
_REPEATED = frozenset(
    [
        "num_hidden_layers",
        "n_layer",
        "num_experts",
        "num_local_experts",
        "n_routed_experts",
        "n_shared_experts",
    ]
)

# Keys that change nothing a causal forward pass computes: training, generation, bookkeeping.
IRRELEVANT = frozenset(
    [
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_flash_attn_2_enabled",
        "_name_or_path",
        "_model_name_or_path",
        "architectures",
        "attention_dropout",
        "attn_implementation",
        "attn_pdrop",
        "attribute_map",
        "auto_map",
        "bad_words_ids",
        "begin_suppress_tokens",
        "bos_token_id",
        "chunk_size_feed_forward",
        "classifier_dropout",
        "cls_token_id",
        "decoder_start_token_id",
        "diversity_penalty",
        "do_sample",
        "dtype",
        "early_stopping",
        "embd_pdrop",
        "embedding_dropout",
        "encoder_no_repeat_ngram_size",
        "eos_token_id",
        "exponential_decay_length_penalty",
        "finetuning_task",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "gradient_checkpointing",
        "hidden_dropout",
        "hidden_dropout_prob",
        "id2label",
        "ignore_index",
        "initializer_factor",
        "initializer_range",
        "is_decoder",
        "keys_to_ignore_at_inference",
        "label2id",
        "length_penalty",
        "max_length",
        "mask_token_id",
        "min_length",
        "model_type",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "output_scores",
        "pad_token_id",
        "prefix",
        "problem_type",
        "pruned_heads",
        "remove_invalid_values",
        "repetition_penalty",
        "resid_pdrop",
        "resid_dropout",
        "residual_dropout",
        "return_dict",
        "return_dict_in_generate",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "sep_token_id",
        "summary_activation",
        "summary_first_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
        "suppress_tokens",
        "task_specific_params",
        "temperature",
        "tf_legacy_loss",
        "tie_encoder_decoder",
        "tokenizer_class",
        "top_k",
        "top_p",
        "torch_dtype",
        "torchscript",
        "transformers_version",
        "typical_p",
        "unk_token_id",
        "unsloth_version",
        "unsloth_fixed",
        "use_bfloat16",
        "use_cache",
        "cache_implementation",
    ]
)


class Config:
    """A config.json as a mapping that remembers which keys were read.

    Readers raise UnsupportedModelError on a missing key or a value of the wrong type. `null` counts as
    absent.
    """

    def __init__(self, values: Mapping[str, Any], where: str = "config.json") -> None:
        self._values = values
        self._where = where
        self._read: set[str] = set()

    def has(self, key: str) -> bool:
        """Whether `key` is there and not null."""
        return self._values.get(key) is not None

    def has_key(self, key: str) -> bool:
        """Whether `key` is there, null or not."""
        return key in self._values

    def raw(self, key: str, default: Any = _REQUIRED) -> Any:
        """The value as parsed JSON."""
        self._read.add(key)
        value = self._values.get(key)
        if value is None:
            if default is _REQUIRED:
                raise UnsupportedModelError(f"{self._where} has no '{key}', which this architecture needs")
            return default
        return value

    def integer(self, key: str, default: Any = _REQUIRED) -> int:
        value = self.raw(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        value = int(self._typed(key, value, int, "an integer"))
        limit = MAX_REPEATED if key in _REPEATED else MAX_INTEGER
        if abs(value) > limit:
            raise self.refusal(key, value, f"must not be beyond {limit}")
        return value

    def count(self, key: str, default: Any = _REQUIRED) -> int:
        """A positive integer."""
        value = self.integer(key, default)
        if value <= 0:
            raise self.refusal(key, value, "must be positive")
        return value

    def nullable(self, key: str, default: int | None) -> int | None:
        """A positive integer or null, which here is a value.

        `default` counts only where the key is absent.
        """
        if key not in self._values:
            return default
        self._read.add(key)
        return self.count(key) if self.has(key) else None

    def number(self, key: str, default: Any = _REQUIRED) -> float:
        return self._number(key, self.raw(key, default))

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of numbers."""
        return tuple(self._number(key, value) for value in self.items(key))

    def positive(self, key: str, default: Any = _REQUIRED) -> float:
        """A number above 0."""
        value = self.number(key, default)
        if value <= 0:
            raise self.refusal(key, value, "must be positive")
        return value

    def flag(self, key: str, default: Any = _REQUIRED) -> bool:
        return bool(self._typed(key, self.raw(key, default), bool, "true or false"))

    def text(self, key: str, default: Any = _REQUIRED) -> str:
        return str(self._typed(key, self.raw(key, default), str, "a string"))

    def items(self, key: str, default: Any = _REQUIRED) -> list[Any]:
        return list(self._typed(key, self.raw(key, default), (list, tuple), "a list"))

    def table(self, key: str, defaults: Mapping[str, Any] | None = None) -> Config:
        """The object under `key` (empty where absent) over `defaults`, its own keys to be read and
        finished."""
        found = self._typed(key, self.raw(key, {}), Mapping, "an object")
        return Config({**(defaults or {}), **found}, f"{self._where}: {key}")

    def expect(self, key: str, *allowed: Any) -> None:
        """Refuses any value of `key` but those `allowed`; absent is allowed."""
        value = self.raw(key, None)
        if value is not None and value not in allowed:
            reason = f"only {' or '.join(map(repr, allowed))} is supported" if allowed else "is not supported"
            raise self.refusal(key, value, reason)

    def ignore(self, *keys: str) -> None:
        """These keys are known not to matter here."""
        self._read.update(keys)

    def refusal(self, key: str, value: Any, reason: str) -> UnsupportedModelError:
        """The error for a value that this family does not cover."""
        return UnsupportedModelError(f"{self._where}: '{key}' is {_short(value)}: {reason}")

    def finish(self) -> None:
        """Refuses keys that nobody read and that are not known to be irrelevant."""
        left = {
            key: value
            for key, value in self._values.items()
            if key not in self._read and key not in IRRELEVANT and value is not None
        }
        if left:
            listed = ", ".join(f"'{key}': {_short(value)}" for key, value in sorted(left.items()))
            raise UnsupportedModelError(
                f"{self._where} has keys that this architecture's exporter does not know: {listed}. "
                "Ignoring them could give a "
                "different model; remove them if they are yours, or teach the family (docs/families.md)"
            )

    def _number(self, key: str, value: Any) -> float:
        value = self._typed(key, value, (int, float), "a number")
        if not abs(value) <= MAX_NUMBER:  # NaN is none either
            raise self.refusal(key, value, f"must not be beyond {MAX_NUMBER:g}")
        return float(value)

    def _typed(self, key: str, value: Any, kind: Any, words: str) -> Any:
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.refusal(key, value, f"must be {words}")
        return value


def _short(value: Any) -> str:
    words = repr(value)
    return words if len(words) <= 60 else words[:57] + "..."
