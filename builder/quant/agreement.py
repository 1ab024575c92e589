"""What an engine rounds beside its weights: its logits next to those of the same weights in float32.

A kernel rounds the inputs of its products, to int8 or E4M3, and the cache rounds keys and values. Here the
engine itself runs, in ONNX Runtime, and is compared with its own weights multiplied as float32 numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginebay.builder.quant.evaluate import Logits, log_softmax
from enginebay.builder.quant.formats import QuantizationError
from enginebay.builder.quant.interpreter import Batch
from enginebay.plugins.load import library_path

# Of a pool: the numpy type that holds its bits, and ONNX's number for its elements.
_CACHE_TYPES: dict[str, tuple[Any, int]] = {
    "tensor(float)": (np.float32, 1),
    "tensor(uint8)": (np.uint8, 2),
    "tensor(int8)": (np.int8, 3),
    "tensor(float16)": (np.float16, 10),
    "tensor(bfloat16)": (np.uint16, 16),
    "tensor(float8e4m3fn)": (np.uint8, 17),
}


@dataclass(frozen=True)
class EngineError:
    """Over `tokens` positions: perplexity by the engine, mean KL(float32 || engine) in nats, and the share of
    positions at which both choose the same token."""

    tokens: int
    perplexity: float
    mean_kl: float
    greedy_agreement: float


def engine_error(graph: Path, block_size: int, reference: Logits, batch: Batch) -> EngineError:
    """Runs engine `graph` (engine.onnx beside its weights), a sequence of `batch` a step, beside `reference`,
    the same weights in float32 on the same batch. QuantizationError where logits are not finite."""
    engine = _Engine(graph, block_size, max(map(len, batch.sequences)))
    loss, divergence, same, start = 0.0, 0.0, 0, 0
    for sequence in batch.sequences:
        exact = log_softmax(reference.rows(start, start + len(sequence)))
        ours = log_softmax(engine.logits(Batch((sequence,))).astype(np.float64))
        divergence += float((np.exp(exact) * (exact - ours)).sum())
        same += int((exact.argmax(axis=1) == ours.argmax(axis=1)).sum())
        loss -= float(ours[np.arange(len(sequence) - 1), sequence[1:]].sum())
        start += len(sequence)
    perplexity = float(np.exp(loss / (batch.tokens - len(batch.sequences))))
    if not np.isfinite([perplexity, divergence]).all():
        raise QuantizationError(
            f"the engine cannot be evaluated: perplexity {perplexity:g} on the text, KL {divergence:g} "
            "from its own weights; build without --evaluate to look at it"
        )
    return EngineError(batch.tokens, perplexity, divergence / batch.tokens, same / batch.tokens)


class _Engine:
    """A session with pools for `tokens`, which every step fills anew."""

    def __init__(self, graph: Path, block_size: int, tokens: int) -> None:
        import onnxruntime as ort  # type: ignore[import-untyped]

        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.register_custom_ops_library(str(library_path()))
        self._session = ort.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
        self._binding: Any = self._session.io_binding()
        self._block_size, self._pools = block_size, []
        for value in self._session.get_inputs():
            if value.name.startswith("cache_"):  # a colder pool, which a fresh step reads nothing of
                storage, element = _CACHE_TYPES[value.type]
                self._pools.append(np.zeros((1, *value.shape[1:]), storage))
                self._binding.bind_ortvalue_input(
                    value.name, ort.OrtValue.ortvalue_from_numpy_with_onnx_type(self._pools[-1], element)
                )
            elif value.name.startswith("cache."):
                storage, element = _CACHE_TYPES[value.type]
                pool = np.zeros((-(-tokens // block_size), *value.shape[1:]), storage)
                bound = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(pool, element)
                self._pools.append(pool)
                self._binding.bind_ortvalue_input(value.name, bound)
                self._binding.bind_ortvalue_output(value.name.replace("cache.", "cache_out."), bound)

    def logits(self, batch: Batch) -> NDArray[np.float32]:
        """[tokens, vocab], of every token."""
        for name, array in batch.arrays(self._block_size).items():
            self._binding.bind_cpu_input(name, array)
        self._binding.bind_output("logits")
        self._session.run_with_iobinding(self._binding)
        result: NDArray[np.float32] = self._binding.get_outputs()[-1].numpy()  # bound last
        return result
