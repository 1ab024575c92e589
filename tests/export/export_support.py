"""Tiny random models made with transformers, and two ways to run their exported graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from transformers import AutoModelForCausalLM, PretrainedConfig

from enginebay.builder.build import BuildConfig, build_engine
from enginebay.export.exporter import ExportReport, export_model
from enginebay.export.spec import ModelSpec
from enginebay.export.stepping import Step, Stepper, Stream
from enginebay.plugins import ops, reference
from enginebay.triton_repo.runtime.ort_engine import EngineOptions, OrtEngine

torch.set_num_threads(1)  # tiny models: threads only wait for each other

BLOCK_SIZE = 4
NUM_BLOCKS = 96


@dataclass(frozen=True)
class TinyLimits:
    vocab_size: int
    max_sequence: int
    max_batch: int = 16
    max_step_tokens: int = 512
    block_size: int = BLOCK_SIZE
    num_blocks: int = NUM_BLOCKS
    rope_switch: int = 0


@torch.no_grad()
def make_model(config: PretrainedConfig, seed: int = 0) -> torch.nn.Module:
    """A model in which every parameter matters.

    Norms near 1 (or 0), biases of about 1, matrices that keep the scale.
    """
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape)
        if parameter.ndim >= 2:
            fan_in = parameter.shape[-1]
            parameter.copy_(noise / fan_in**0.5 if "embed" not in name else noise)
        elif "norm" in name and name.endswith("weight"):
            parameter.copy_(parameter + 0.3 * noise)
        else:
            parameter.copy_(0.5 + 0.5 * noise)
    for name, buffer in model.named_buffers():
        if name in model.state_dict():
            buffer.copy_(0.5 * torch.randn(buffer.shape))
    return model


def save(model: torch.nn.Module, folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    """Saves an HF folder with weights of `dtype`."""
    model.to(dtype).save_pretrained(folder, **options)
    return folder


@torch.no_grad()
def oracle_logits(model: torch.nn.Module, tokens: list[int]) -> np.ndarray:
    """Logits [tokens, vocab] of transformers in float32."""
    return model(torch.tensor([tokens]), use_cache=False).logits[0].float().numpy()


class PagedAttention(OpRun):
    op_domain = "enginebay"

    def _run(self, *arrays: np.ndarray | None, **attributes: Any) -> tuple[np.ndarray, np.ndarray]:
        inputs = {param.name: array for param, array in zip(ops.PAGED_ATTENTION.inputs, arrays, strict=False)}
        wide = {key: widened(array) for key, array in inputs.items() if key != "cache"}
        attention, cache = reference.paged_attention(cache=inputs["cache"], **wide, **attributes)
        return attention.astype(np.float32), cache


class MoE(OpRun):
    op_domain = "enginebay"

    def _run(self, *arrays: np.ndarray | None, **attributes: Any) -> tuple[np.ndarray]:
        inputs = {param.name: widened(a) for param, a in zip(ops.MOE.inputs, arrays, strict=False)}
        for shape in ("num_experts", "hidden", "intermediate"):
            attributes.pop(shape)
        x, logits, gate_up, down = (inputs.pop(key) for key in ("x", "router_logits", "gate_up", "down"))
        return (reference.moe(x, logits, gate_up, down, **inputs, **attributes).astype(np.float32),)


def widened(array: np.ndarray | None) -> np.ndarray | None:
    return array.astype(np.float64) if array is not None and array.dtype == np.float32 else array


class ReferenceRunner:
    """Runs a canonical graph with ONNX's own evaluator: no runtime of ours, no kernel."""

    def __init__(self, exported: Path) -> None:
        self.spec = ModelSpec.from_json((exported / "spec.json").read_text())
        self.limits = TinyLimits(
            self.spec.vocab_size, self.spec.max_positions, rope_switch=self.spec.rope_switch
        )
        self._evaluator = ReferenceEvaluator(
            onnx.load(exported / "model.onnx"), new_ops=[PagedAttention, MoE]
        )
        group = self.spec.cache_groups[0]
        self._caches = {
            f"cache.{layer}": np.full((NUM_BLOCKS, *group.block_shape(BLOCK_SIZE)), np.nan, np.float32)
            for layer in range(self.spec.num_layers)
        }

    def run(self, inputs: Step) -> np.ndarray:
        logits, *caches = self._evaluator.run(None, {**step_feeds(inputs), **self._caches})
        self._caches = dict(zip(self._caches, caches, strict=True))
        return logits


def engine_runner(exported: Path) -> OrtEngine:
    """The fp32 engine of the exported model: its lowered graph on the CPU kernels."""
    engine = exported.parent / f"{exported.name}.engine"
    build_engine(exported, engine, BuildConfig(quant="fp32", block_size=BLOCK_SIZE, max_step_tokens=512))
    return OrtEngine(engine, EngineOptions(num_blocks=NUM_BLOCKS, threads=1))


def step_feeds(inputs: Step) -> dict[str, np.ndarray]:
    names = {"block_table": "block_table.0", "slot_mapping": "slot_mapping.0"}
    return {names.get(name, name): value for name, value in vars(inputs).items()}


def ragged_logits(runner: Any, spec: ModelSpec, sequences: list[list[int]]) -> list[np.ndarray]:
    """Every position's logits of every sequence, from steps that mix whole and chunked prefill, a prefix
    hit and decode.

    The last sequence must share its first blocks with the first; those shared positions come back as NaN.
    """
    stepper = Stepper(runner)
    vocab = spec.vocab_size
    streams = [Stream(list(tokens)) for tokens in sequences[:-1]]
    results = [np.full((len(tokens), vocab), np.nan, np.float32) for tokens in sequences]
    chunks = [[len(sequences[0])], [5, 1, 1, 7, 2], [1] * 6 + [3], [2, 9, 1]]
    plans = [list(chunks[index % len(chunks)]) for index in range(len(streams))]
    late = False
    while True:
        work = []
        for index, stream in enumerate(streams):
            left = len(stream.tokens) - stream.computed
            if left:
                count = min(
                    left, plans[index].pop(0) if plans[index] else 1 + (stream.computed * 7 + index) % 4
                )
                work.append((index, stream, count))
        if not work:
            return results
        starts = [stream.computed for _, stream, _ in work]
        outputs = stepper.step([(stream, count) for _, stream, count in work])
        for (index, _, count), start, output in zip(work, starts, outputs, strict=True):
            results[index][start : start + count] = output
        if not late:
            shared = stepper.share(streams[0], sequences[-1])
            assert shared.computed > 0
            streams.append(shared)
            plans.append([3, 1, 1])
            late = True


def check_against_oracle(
    folder: Path,
    lengths: tuple[int, ...],
    seed: int = 0,
    tolerance: float = 1e-4,
    reference: Path | None = None,
    make_runner: Callable[[Path], Any] = engine_runner,
    ids: int | None = None,
) -> ExportReport:
    """Exports the HF folder and compares ragged steps with transformers at every position, then greedy
    choices."""
    model = AutoModelForCausalLM.from_pretrained(
        reference or folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    exported = folder.parent / f"{folder.name}.exported"
    report = export_model(folder, exported)
    onnx.checker.check_model(exported / "model.onnx", full_check=True)
    runner = make_runner(exported)
    rng = np.random.default_rng(seed)
    vocab = ids or report.spec.vocab_size
    sequences = [rng.integers(0, vocab, length).tolist() for length in lengths]
    shared = sequences[0][: 2 * BLOCK_SIZE + 1]
    sequences.append(shared + rng.integers(0, vocab, lengths[0] - len(shared)).tolist())
    results = ragged_logits(runner, report.spec, sequences)
    for tokens, result in zip(sequences, results, strict=True):
        expected = oracle_logits(model, tokens)
        computed = ~np.isnan(result).any(axis=1)
        assert computed.sum() >= len(tokens) - 2 * BLOCK_SIZE
        scale = max(1.0, float(np.abs(expected).std()))
        error = np.abs(result[computed] - expected[computed]).max() / scale
        assert error < tolerance, f"logits of {len(tokens)} tokens differ by {error:.2e} times their scale"
        assert np.array_equal(result[computed].argmax(-1), expected[computed].argmax(-1))
    return report
