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
from enginebay.triton_repo.runtime.ort_engine import EngineOptions, OrtEngine

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


def paged_attention(
    qkv: np.ndarray,
    cache: np.ndarray,
    query_start: np.ndarray,
    kv_len: np.ndarray,
    block_table: np.ndarray,
    slot_mapping: np.ndarray,
    position_ids: np.ndarray,
    inputs: dict[str, np.ndarray | None],
    attributes: dict[str, Any],
) -> tuple[np.ndarray, np.ndarray]:
    """PagedAttention in float64, one query at a time: slow, and not derived from any kernel."""
    heads, kv_heads, dim = (attributes[key] for key in ("num_heads", "num_kv_heads", "head_dim"))
    tokens, block_size = qkv.shape[0], cache.shape[2]
    q, k, v = np.split(qkv.astype(np.float64), [heads * dim, (heads + kv_heads) * dim], axis=1)
    q, k, v = (array.reshape(tokens, -1, dim) for array in (q, k, v))
    for key, array in (("q_norm", q), ("k_norm", k)):
        if inputs.get(key) is not None:
            mean = (array**2).mean(-1, keepdims=True)
            array[:] = array / np.sqrt(mean + attributes["norm_epsilon"]) * inputs[key]
    if inputs.get("rope_cos") is not None:
        cos, sin = (
            inputs[key][position_ids][:, None, :].astype(np.float64) for key in ("rope_cos", "rope_sin")
        )
        pairs = cos.shape[-1]
        for array in (q, k):
            if attributes["rope_interleaved"]:
                first, second = array[..., 0 : 2 * pairs : 2], array[..., 1 : 2 * pairs : 2]
            else:
                first, second = array[..., :pairs], array[..., pairs : 2 * pairs]
            turned = first * cos - second * sin, second * cos + first * sin
            first[:], second[:] = turned
    cache = cache.copy()
    for token, slot in enumerate(slot_mapping):
        if slot >= 0:
            cache[slot // block_size, :, slot % block_size] = np.stack([k[token], v[token]])
    out = np.zeros((tokens, heads, dim))
    for sequence, length in enumerate(kv_len):
        begin, end = query_start[sequence], query_start[sequence + 1]
        places = np.arange(length)
        blocks = block_table[sequence][places // block_size]
        keys, values = (cache[blocks, side, places % block_size].astype(np.float64) for side in (0, 1))
        for token in range(begin, end):
            here = length - (end - token)
            low = max(0, here - attributes["window"] + 1) if attributes["window"] else 0
            for head in range(heads):
                kv = head * kv_heads // heads
                scores = keys[low : here + 1, kv] @ q[token, head] * attributes["scale"]
                if attributes["softcap"]:
                    scores = attributes["softcap"] * np.tanh(scores / attributes["softcap"])
                if inputs.get("sinks") is not None:
                    scores = np.append(scores, inputs["sinks"][head])
                weights = np.exp(scores - scores.max())
                weights = (weights / weights.sum())[: here + 1 - low]
                out[token, head] = weights @ values[low : here + 1, kv]
    return out.reshape(tokens, -1).astype(np.float32), cache


class PagedAttention(OpRun):
    op_domain = "enginebay"

    def _run(self, *arrays: np.ndarray, **attributes: Any) -> tuple[np.ndarray, np.ndarray]:
        optional = dict(zip(("rope_cos", "rope_sin", "q_norm", "k_norm", "sinks"), arrays[7:], strict=False))
        return paged_attention(*arrays[:7], optional, attributes)


class LatentAttention(OpRun):
    op_domain = "enginebay"

    def _run(self, *arrays: np.ndarray, **attributes: Any) -> tuple[np.ndarray, np.ndarray]:
        """As one key/value head whose values are its keys' first elements."""
        query, latent, cache, *rest, cos, sin = arrays
        rope, rank = attributes["rope_dim"], attributes["latent_dim"]
        width, heads = rank + rope, attributes["num_heads"]

        def turned_first(array: np.ndarray) -> np.ndarray:
            return np.roll(array.reshape(*array.shape[:-1], -1, width), rope, axis=-1).reshape(array.shape)

        keys = turned_first(latent)
        qkv = np.concatenate([turned_first(query), keys, keys], axis=-1)
        both = np.stack([turned_first(cache)] * 2, axis=1)[:, :, :, None]
        attributes |= {"num_kv_heads": 1, "head_dim": width, "window": 0, "softcap": 0.0}
        out, both = paged_attention(qkv, both, *rest, {"rope_cos": cos, "rope_sin": sin}, attributes)
        stored = np.roll(both[:, 0, :, 0], -rope, axis=-1)
        return out.reshape(-1, heads, width)[..., rope:].reshape(-1, heads * rank), stored


class MoE(OpRun):
    op_domain = "enginebay"

    def _run(
        self,
        x: np.ndarray,
        logits: np.ndarray,
        gate_up: np.ndarray,
        down: np.ndarray,
        *biases: Any,
        **attributes: Any,
    ) -> tuple[np.ndarray]:
        correction, gate_up_bias, down_bias = (*biases, None, None, None)[:3]
        out = np.zeros(x.shape, np.float64)
        for token, row in enumerate(logits.astype(np.float64)):
            for expert, weight in routed(row, correction, attributes):
                both = gate_up[expert].astype(np.float64) @ x[token]
                both += 0 if gate_up_bias is None else gate_up_bias[expert]
                gate, up = np.split(both, 2)
                if attributes["clamp"]:
                    gate, up = (
                        np.minimum(gate, attributes["clamp"]),
                        np.clip(up, -attributes["clamp"], attributes["clamp"]),
                    )
                    inner = (up + 1) * gate / (1 + np.exp(-attributes["clamp_alpha"] * gate))
                else:
                    assert attributes["activation"] == "silu"
                    inner = gate / (1 + np.exp(-gate)) * up
                out[token] += weight * (
                    down[expert] @ inner + (0 if down_bias is None else down_bias[expert])
                )
        return (out.astype(np.float32),)


def routed(
    row: np.ndarray, correction: np.ndarray | None, attributes: dict[str, Any]
) -> list[tuple[int, float]]:
    """The experts of one token with their weights, from its router logits."""
    if attributes["scoring"] == "sigmoid":
        scores = 1 / (1 + np.exp(-row))
    elif attributes["scoring"] == "softmax":
        scores = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
    else:
        scores = row
    ranked = scores + (0 if correction is None else correction)
    groups = attributes["num_groups"]
    if groups:
        by_group = ranked.reshape(groups, -1)
        best = np.sort(by_group, axis=1)[:, ::-1]
        worth = best[:, 0] if correction is None else best[:, :2].sum(axis=1)
        for group in np.argsort(-worth, kind="stable")[attributes["top_groups"] :]:
            by_group[group] = -np.inf
    chosen = np.argsort(-ranked, kind="stable")[: attributes["top_k"]]
    weights = scores[chosen]
    if attributes["scoring"] == "softmax_topk":
        weights = np.exp(weights - weights.max()) / np.exp(weights - weights.max()).sum()
    if attributes["renormalize"]:
        weights = weights / weights.sum()
    return list(zip(chosen.tolist(), (weights * attributes["routed_scale"]).tolist(), strict=True))


class ReferenceRunner:
    """Runs a canonical graph with ONNX's own evaluator: no runtime of ours, no kernel."""

    def __init__(self, exported: Path) -> None:
        self.spec = ModelSpec.from_json((exported / "spec.json").read_text())
        self.limits = TinyLimits(self.spec.vocab_size, self.spec.max_positions)
        self._evaluator = ReferenceEvaluator(
            onnx.load(exported / "model.onnx"), new_ops=[PagedAttention, LatentAttention, MoE]
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
    stepper = Stepper(runner, spec.rope_switch)
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
    vocab = report.spec.vocab_size
    sequences = [rng.integers(0, vocab, length).tolist() for length in lengths]
    shared = sequences[0][: 2 * BLOCK_SIZE + 1]
    sequences.append(shared + rng.integers(0, vocab, 20).tolist())
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
