"""What every operator of the op table means: plain numpy in float64, one row at a time.

Slow and obviously right. Tests compare kernels with these functions; calibration routes
experts with `route`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from enginebay.plugins.reference_cache import channel_scales, decode, encode

Array = NDArray[np.float64]
Ints = NDArray[np.int32]


def rms_norm(x: Array, weight: Array, epsilon: float) -> Array:
    """x / sqrt(mean(x^2) + epsilon) * weight over the last axis (Zhang and Sennrich, 2019)."""
    mean: Array = np.mean(x * x, axis=-1, keepdims=True)
    y: Array = x / np.sqrt(mean + epsilon) * weight
    return y


def add_rms_norm(x: Array, residual: Array, weight: Array, epsilon: float) -> tuple[Array, Array]:
    """AddRMSNorm: (y, sum), each [T, H]."""
    total = x + residual
    return rms_norm(total, weight, epsilon), total


def activation(name: str, x: Array) -> Array:
    """silu, gelu (exact), gelu_tanh, relu or relu2 of every element."""
    y: Array
    if name == "silu":
        y = x / (1 + np.exp(-x))
    elif name == "gelu":
        y = x * 0.5 * (1 + np.vectorize(math.erf, otypes=[np.float64])(x / math.sqrt(2)))
    elif name == "gelu_tanh":
        y = x * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    elif name == "relu":
        y = np.maximum(x, 0.0)
    elif name == "relu2":
        y = np.square(np.maximum(x, 0.0))
    else:
        raise ValueError(f"no activation '{name}'")
    return y


def gated_activation(gate_up: Array, name: str) -> Array:
    """GatedActivation: activation(first half of each row) * second half, [T, 2I] to [T, I]."""
    gate, up = np.split(gate_up, 2, axis=-1)
    return activation(name, gate) * up


def dequantise(
    values: NDArray[np.generic], scales: Array | None, minimums: Array | None, format: str
) -> Array:
    """Weights [N, K] as QuantLinear reads them.

    Float formats: the values. i8: scale*q. i4 (values 0..15): scale*(q-8), or scale*q + minimum where
    minimums are given. scales and minimums are [N, K/block].
    """
    weights = values.astype(np.float64)
    if scales is None:
        return weights
    block = weights.shape[1] // scales.shape[1]
    scale = np.repeat(scales, block, axis=1)
    if minimums is not None:
        return scale * weights + np.repeat(minimums, block, axis=1)
    return scale * (weights - 8) if format == "i4" else scale * weights


def quant_linear(x: Array, weights: Array, bias: Array | None = None) -> Array:
    """QuantLinear over dequantised weights: x [T, K], weights [N, K] to [T, N]."""
    y = x @ weights.T
    return y if bias is None else y + bias


def layer_tail(
    x: Array,
    residual: Array,
    norms: tuple[Array, Array],
    weights: Sequence[Array],
    biases: Sequence[Array | None],
    *,
    name: str,
    epsilons: tuple[float, float],
) -> tuple[Array, Array]:
    """LayerTail: (y, sum). `weights` [N, K] and `biases` in the order of ops.TAIL_PRODUCTS."""
    out, gate_up, down, following = zip(weights, biases, strict=True)
    normed, total = add_rms_norm(quant_linear(x, *out), residual, norms[0], epsilons[0])
    gated = gated_activation(quant_linear(normed, *gate_up), name)
    normed, total = add_rms_norm(quant_linear(gated, *down), total, norms[1], epsilons[1])
    return quant_linear(normed, *following), total


F8_MAX = 448.0  # of E4M3; beyond it a cast gives NaN


def to_f8(x: Array) -> Array:
    """The nearest E4M3 numbers, ties to even, at most F8_MAX in magnitude; NaN stays NaN (OCP 8-bit FP).

    Normal numbers have three bits behind the leading one; below 2^-6 steps are 2^-9.
    """
    magnitude = np.minimum(np.abs(x), F8_MAX)
    exponent = np.maximum(np.floor(np.log2(np.maximum(magnitude, 2.0**-9))), -6)
    step = np.exp2(exponent - 3)
    y: Array = np.copysign(np.rint(magnitude / step) * step, x)
    return y


def f8_inputs(x: Array, input_scale: float = 0.0, repeated: Sequence[int] | Ints = ()) -> Array:
    """What QuantLinearF8Inputs multiplies by: x [T, K] as scale*E4M3, in float64, and behind it what that
    left of the columns `repeated`, as scale/16*E4M3.

    The scale is `input_scale`, or where that is 0 the F8_MAX-th part of each row's largest. A row that
    holds NaN or infinity is NaN.
    """
    largest = np.abs(x).max(axis=1, keepdims=True, initial=0)
    scale = np.full_like(largest, input_scale) if input_scale else largest / F8_MAX
    zero = (scale < 2.0**-100 / F8_MAX) | ~np.isfinite(largest)
    y = np.where(zero, 0.0, scale * to_f8(np.where(zero, 0.0, x) / np.where(zero, 1.0, scale)))
    twice, step = np.asarray(repeated, np.intp), np.where(zero, 1.0, scale) / 16
    left = step * to_f8((np.where(zero, 0.0, x) - y)[:, twice] / step)
    result: Array = np.where(np.isfinite(largest), np.concatenate([y, left], axis=1), np.nan)
    return result


def embedding(input_ids: Ints, weights: Array) -> Array:
    """Embedding over dequantised weights [N, K]: rows of them."""
    return weights[input_ids]


def rope(x: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
    """Rotate the first 2*len(cos) elements of a head (Su et al., 2021).

    Pairs are (i, i + R/2), or (2i, 2i+1) where interleaved.
    """
    half = len(cos)
    y = x.copy()
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        y[a] = x[a] * cos[i] - x[b] * sin[i]
        y[b] = x[b] * cos[i] + x[a] * sin[i]
    return y


def paged_attention(
    *,
    qkv: Array,
    cache: NDArray[np.generic],
    query_start: Ints,
    kv_len: Ints,
    block_table: Ints,
    slot_mapping: Ints,
    position_ids: Ints,
    rope_cos: Array | None = None,
    rope_sin: Array | None = None,
    q_norm: Array | None = None,
    k_norm: Array | None = None,
    sinks: Array | None = None,
    cache_scales: Array | None = None,
    cache_int8: NDArray[np.int8] | None = None,
    cache_int4: NDArray[np.uint8] | None = None,
    cache_offsets: Array | None = None,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    scale: float,
    causal: bool = True,
    window: int = 0,
    softcap: float = 0.0,
    rope_interleaved: bool = False,
    norm_epsilon: float = 1e-6,
    latent_dim: int = 0,
) -> tuple[Array, NDArray[np.generic]]:
    """PagedAttention: (attention [T, Hq*D], the cache after the writes, in its own dtype).

    Keys and values pass through the cache's dtype before they are attended to (reference_cache). Padding
    rows give zeros.
    """
    if latent_dim:
        assert rope_cos is not None
        assert rope_sin is not None
        # One key/value head whose rotary elements are moved to the front, and whose value is its key.
        turned = head_dim - latent_dim

        def rotary_first(x: NDArray[np.generic]) -> NDArray[np.generic]:
            return np.roll(x.reshape(*x.shape[:-1], -1, head_dim), turned, -1).reshape(x.shape)

        scales = channel_scales(cache_scales, 1, head_dim)[:1]
        attention, both = paged_attention(
            qkv=rotary_first(np.concatenate([qkv, qkv[:, -head_dim:]], axis=1)).astype(np.float64),
            cache=np.stack([rotary_first(cache)] * 2, axis=1)[:, :, :, None],
            query_start=query_start,
            kv_len=kv_len,
            block_table=block_table,
            slot_mapping=slot_mapping,
            position_ids=position_ids,
            rope_cos=rope_cos,
            rope_sin=rope_sin,
            sinks=sinks,
            cache_scales=np.concatenate([rotary_first(scales)] * 2).astype(np.float64),
            num_heads=num_heads,
            num_kv_heads=1,
            head_dim=head_dim,
            scale=scale,
            causal=causal,
            window=window,
            softcap=softcap,
            rope_interleaved=rope_interleaved,
        )
        values = attention.reshape(len(qkv), num_heads, head_dim)[:, :, turned:]
        return values.reshape(len(qkv), -1), np.roll(both[:, 0, :, 0], -turned, axis=-1)
    cache = cache.copy()
    scales = channel_scales(cache_scales, num_kv_heads, head_dim)
    block_size = cache.shape[2]
    attention = np.zeros((qkv.shape[0], num_heads * head_dim))
    used = int(query_start[-1])
    heads = qkv[:used].reshape(used, num_heads + 2 * num_kv_heads, head_dim).astype(np.float64)
    queries, keys, values = np.split(heads, [num_heads, num_heads + num_kv_heads], axis=1)
    queries, keys = queries.copy(), keys.copy()
    for token in range(used):
        for vectors, weight in ((queries, q_norm), (keys, k_norm)):
            for head in range(vectors.shape[1]):
                x = vectors[token, head]
                if weight is not None:
                    x = rms_norm(x, weight, norm_epsilon)
                if rope_cos is not None and rope_sin is not None:
                    position = position_ids[token]
                    x = rope(x, rope_cos[position], rope_sin[position], rope_interleaved)
                vectors[token, head] = x
        slot = int(slot_mapping[token])
        if slot >= 0:
            for part, vectors in enumerate((keys, values)):
                offsets = None if cache_offsets is None else cache_offsets[part].astype(np.float64)
                stored = encode(vectors[token], scales[part], cache.dtype, offsets)
                cache[slot // block_size, part, slot % block_size] = stored

    tiers = [pool for pool in (cache, cache_int8, cache_int4) if pool is not None]
    offsets = None if cache_offsets is None else cache_offsets[:, None].astype(np.float64)
    pools = np.concatenate(
        [decode(pool, scales[:, None], offsets) for pool in tiers]
    )  # [blocks, 2, block_size, Hkv, D]
    group = num_heads // num_kv_heads
    for sequence, length in enumerate(kv_len):
        first, end = query_start[sequence], query_start[sequence + 1]
        for token in range(first, end):
            position = int(length) - int(end - token)
            last = position + 1 if causal else int(length)
            start = max(0, position - window + 1) if window else 0
            where = np.arange(start, last)
            rows = pools[block_table[sequence, where // block_size], :, where % block_size]
            for head in range(num_heads):
                key, value = rows[:, 0, head // group], rows[:, 1, head // group]
                score = key @ queries[token, head] * scale
                if softcap:
                    score = softcap * np.tanh(score / softcap)
                sink = -np.inf if sinks is None else sinks[head]
                top = max(score.max(), sink)
                weight = np.exp(score - top)
                total = weight.sum() + np.exp(sink - top)
                attention[token, head * head_dim : (head + 1) * head_dim] = weight @ value / total
    return attention, cache


def route(
    logits: Array,
    correction_bias: Array | None,
    *,
    scoring: str,
    top_k: int,
    num_groups: int,
    top_groups: int,
) -> tuple[list[int], Array]:
    """The experts of one token, best first, and their scores (softmax_topk.

    Softmaxed) before any renormalisation.
    """
    exponentials = np.exp(logits - logits.max())
    scores = {
        "softmax": exponentials / exponentials.sum(),
        "sigmoid": 1 / (1 + np.exp(-logits)),
        "softmax_topk": logits,
    }[scoring]
    ranked = scores if correction_bias is None else scores + correction_bias
    if num_groups > 1:
        groups = ranked.reshape(num_groups, -1)
        best = -np.sort(-groups, axis=1)
        worth = best[:, 0] if correction_bias is None else best[:, :2].sum(axis=1)
        kept = np.argsort(-worth, kind="stable")[:top_groups]
        ranked = np.where(np.isin(np.arange(num_groups), kept)[:, None], groups, -np.inf).ravel()
    chosen = np.argsort(-ranked, kind="stable")[:top_k]
    weights = scores[chosen]
    if scoring == "softmax_topk":
        weights = np.exp(weights - weights.max())
        weights = weights / weights.sum()
    return chosen.tolist(), weights


def moe(
    x: Array,
    router_logits: Array,
    gate_up: Array,
    down: Array,
    *,
    correction_bias: Array | None = None,
    gate_up_bias: Array | None = None,
    down_bias: Array | None = None,
    top_k: int,
    activation: str,
    scoring: str = "softmax",
    renormalize: int = 0,
    num_groups: int = 0,
    top_groups: int = 0,
    routed_scale: float = 1.0,
    clamp: float = 0.0,
    clamp_alpha: float = 1.702,
) -> Array:
    """MoE (include/enginebay/moe.h): [T, H] of gate_up [E, 2I, H] and down [E, H, I], token by token."""
    y = np.zeros_like(x)
    routing = {"scoring": scoring, "top_k": top_k, "num_groups": num_groups, "top_groups": top_groups}
    for token, row in enumerate(x):
        if np.isnan(router_logits[token]).any():
            y[token] = np.nan
            continue
        experts, weights = route(router_logits[token], correction_bias, **routing)  # type: ignore[arg-type]
        if renormalize:
            weights = weights / weights.sum()
        for expert, weight in zip(experts, weights * routed_scale, strict=True):
            both = gate_up[expert] @ row + (0 if gate_up_bias is None else gate_up_bias[expert])
            gate, up = np.split(both, 2)
            if clamp:
                gate, up = np.minimum(gate, clamp), np.clip(up, -clamp, clamp)
                inner = (up + 1) * gate / (1 + np.exp(-clamp_alpha * gate))
            else:
                inner = gated_activation(both[None], activation)[0]
            y[token] += weight * (down[expert] @ inner + (0 if down_bias is None else down_bias[expert]))
    return y
