"""What SpecVerify and Sample compute, in float64 numpy, drawing the same random numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def philox(seed: int, c0: NDArray[np.uint64], c1: int, c2: int, c3: int) -> NDArray[np.uint64]:
    """Philox4x32-10 for counters (c0[i], c1, c2, c3): uint64 [len(c0), 4] of 32-bit values."""
    mask = np.uint64(0xFFFFFFFF)
    a = c0.astype(np.uint64)
    b, c, d = (np.full_like(a, value & 0xFFFFFFFF) for value in (c1, c2, c3))
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF
    for _ in range(10):
        p0, p1 = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        a, b, c, d = (
            (p1 >> np.uint64(32)) ^ b ^ np.uint64(k0),
            p1 & mask,
            (p0 >> np.uint64(32)) ^ d ^ np.uint64(k1),
            p0 & mask,
        )
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack([a, b, c, d], 1)


def exponentials(seed: int, position: int, row: int, vocab: int) -> Array:
    """-log(1 - u) of every token, u uniform."""
    groups = np.arange(-(-vocab // 4), dtype=np.uint64)
    bits = philox(seed, groups, row, position, position >> 32).reshape(-1)[:vocab]
    u = np.minimum((bits.astype(np.float64) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return np.asarray(-np.log1p(-u))


def accept_uniform(seed: int, position: int, row: int) -> float:
    bits = philox(seed, np.array([0xFFFFFFFF], np.uint64), row, position, position >> 32)[0, 0]
    return float(int(bits) >> 8) * 2.0**-24


@dataclass(frozen=True)
class Sampling:
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    position: int = 0


def distribution(logits: Array, s: Sampling) -> Array:
    """softmax after temperature, top-k, top-p and min-p; the order is (logit falling, id rising)."""
    order = np.lexsort((np.arange(len(logits)), -logits))
    order = order[np.isfinite(logits[order])]
    weight = np.exp((logits[order] - logits[order[0]]) / s.temperature)
    keep = np.ones(len(order), bool)
    if s.top_k > 0:
        keep[s.top_k :] = False
    if s.top_p < 1:
        total = np.cumsum(weight * keep)
        keep &= total - weight < s.top_p * total[-1]
        keep[0] = True
    keep &= weight >= min(s.min_p, 1.0)
    out = np.zeros(len(logits))
    out[order] = weight * keep
    return np.asarray(out / out.sum())


def verify(
    logits: Array, drafts: list[int], parents: list[int], q: Array | None, s: Sampling, max_depth: int
) -> tuple[list[int], int, float]:
    """(accepted rows, next token, how clear the choices were) of one sequence.

    Clearness: the smallest relative gap by which any decision was made; below about 1e-4 float32 may differ.
    """
    at, path, clear = 0, [], 1.0
    while True:
        row = logits[at]
        if np.isnan(row).any() or not np.isfinite(row).any():
            return path, -1, clear
        children = [c for c in range(at + 1, len(parents)) if parents[c] == at]
        if len(path) >= max_depth:
            children = []
        if s.temperature == 0:
            best = int(np.argmax(row))
            chosen = next((c for c in children if drafts[c] == best), None)
            if chosen is None:
                return path, best, clear
        else:
            p = distribution(row, s)
            chosen = None
            for c in children:
                x = drafts[c]
                ratio = p[x] / (1.0 if q is None else q[c, x])
                u = accept_uniform(s.seed, s.position, c)
                clear = min(clear, abs(u - ratio))
                if u < ratio:
                    chosen = c
                    break
                rest = p.copy()
                if q is None:
                    rest[x] = 0
                else:
                    rest = np.maximum(p - q[c], 0)
                p = rest / rest.sum() if rest.sum() > 0 else p
            if chosen is None:
                with np.errstate(divide="ignore", invalid="ignore"):
                    cost = np.where(p > 0, exponentials(s.seed, s.position, at, len(p)) / p, np.inf)
                first, second = np.partition(cost, 1)[:2] if len(cost) > 1 else (cost[0], np.inf)
                clear = min(clear, float((second - first) / first) if np.isfinite(second) else 1.0)
                return path, int(np.argmin(cost)), clear
        path.append(chosen)
        at = chosen
