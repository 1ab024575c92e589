"""Random PagedAttention steps and their answer in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from cuda_library import DTYPES, AttentionDesc

Tensor = torch.Tensor


@dataclass(frozen=True)
class Shape:
    """What a step looks like. `lengths`: (new tokens, tokens cached once they are written) a sequence."""

    lengths: tuple[tuple[int, int], ...]
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 128
    block_size: int = 16
    io: torch.dtype = torch.float16
    cache: torch.dtype = torch.float16
    causal: bool = True
    window: int = 0
    softcap: float = 0.0
    scale: float = 0.0
    rotary: int = -1  # -1: head_dim
    interleaved: bool = False
    norm: bool = False
    sinks: bool = False
    tree: bool = False
    padding_tokens: int = 0
    padding_sequences: int = 0


@dataclass
class Step:
    """A step's inputs on the GPU, and how the answer was made."""

    shape: Shape
    inputs: dict[str, Tensor | None]
    desc: object
    tree_rows: list[Tensor] = field(default_factory=list)  # [q, q] bool a sequence


def narrow(shape: Shape) -> bool:
    return shape.cache in (torch.int8, torch.float8_e4m3fn)


def random_step(shape: Shape, generator: torch.Generator) -> Step:
    """Fresh inputs; the cache's history is random too, and blocks are dealt out in random order."""
    s, device = shape, "cuda"

    def randn(*size: int) -> Tensor:
        return torch.randn(*size, device=device, generator=generator)

    tokens = sum(q for q, _ in s.lengths)
    blocks_of = [math.ceil(kv / s.block_size) for _, kv in s.lengths]
    width = max([*blocks_of, 1]) + 1
    num_blocks = sum(blocks_of) + 3
    sequences = len(s.lengths) + s.padding_sequences
    order = torch.randperm(num_blocks, device=device, generator=generator).int()
    table = torch.full((sequences, width), -1, dtype=torch.int32, device=device)
    slots, positions, starts = [], [], [0]
    at = 0
    for index, ((q, kv), count) in enumerate(zip(s.lengths, blocks_of, strict=True)):
        table[index, :count] = order[at : at + count]
        at += count
        where = torch.arange(kv - q, kv, device=device)
        slots.append(table[index, where // s.block_size].long() * s.block_size + where % s.block_size)
        positions.append(where)
        starts.append(starts[-1] + q)
    starts += [starts[-1]] * s.padding_sequences
    pad = torch.full((s.padding_tokens,), -1, dtype=torch.int64, device=device)
    rotary = s.head_dim if s.rotary < 0 else s.rotary
    kv_size = (num_blocks, 2, s.block_size, s.kv_heads, s.head_dim)
    scales = None
    if narrow(s):
        scales = 0.02 + 0.03 * torch.rand(2, s.kv_heads, device=device, generator=generator)
        cache = encode(randn(*kv_size), s.cache, scales)
    else:
        cache = randn(*kv_size).to(s.cache)
    tree_rows: list[Tensor] = []
    tree_mask = None
    position_ids = torch.cat([*positions, pad.clamp_min(0)]).int()
    if s.tree:
        words = max(math.ceil(max(q for q, _ in s.lengths) / 32), 1)
        tree_mask = torch.zeros(tokens + s.padding_tokens, words, dtype=torch.int32, device=device)
        for index, (q, kv) in enumerate(s.lengths):
            seen, depth = random_tree(q, generator)
            tree_rows.append(seen.to(device))
            position_ids[starts[index] : starts[index] + q] = (kv - q + depth).int().to(device)
            bits = torch.zeros(q, words * 32, dtype=torch.int64)
            bits[:, :q] = seen.long()
            packed = (bits.view(q, words, 32) << torch.arange(32)).sum(-1)
            packed = torch.where(packed >= 2**31, packed - 2**32, packed)
            tree_mask[starts[index] : starts[index] + q] = packed.int().to(device)
    angles = torch.arange(4096 if max(kv for _, kv in s.lengths) < 4096 else 140000, device=device)[
        :, None
    ].double()
    angles = angles * 10000.0 ** -(
        torch.arange(0, max(rotary, 2), 2, device=device).double() / max(rotary, 2)
    )
    inputs: dict[str, Tensor | None] = {
        "qkv": randn(tokens + s.padding_tokens, (s.heads + 2 * s.kv_heads) * s.head_dim).to(s.io),
        "cache": cache,
        "query_start": torch.tensor(starts, dtype=torch.int32, device=device),
        "kv_len": torch.tensor(
            [kv for _, kv in s.lengths] + [0] * s.padding_sequences, dtype=torch.int32, device=device
        ),
        "block_table": table,
        "slot_mapping": torch.cat([*slots, pad]).int(),
        "position_ids": position_ids,
        "rope_cos": angles.cos().float() if rotary else None,
        "rope_sin": angles.sin().float() if rotary else None,
        "q_norm": 1 + 0.1 * randn(s.head_dim) if s.norm else None,
        "k_norm": 1 + 0.1 * randn(s.head_dim) if s.norm else None,
        "sinks": randn(s.heads) if s.sinks else None,
        "cache_scales": scales,
        "tree_mask": tree_mask,
    }
    desc = AttentionDesc(
        *(s.heads, s.kv_heads, s.head_dim, s.block_size, num_blocks, width),
        *(rotary, angles.shape[0] if rotary else 0, int(s.interleaved), int(s.causal), s.window),
        *(s.scale or s.head_dim**-0.5, s.softcap, 1e-6, DTYPES[s.io], DTYPES[s.cache]),
    )
    return Step(shape, inputs, desc, tree_rows)


def random_tree(nodes: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(who sees whom [nodes, nodes] bool, depth [nodes]) of a random tree; node 0 is the root."""
    seen = torch.zeros(nodes, nodes, dtype=torch.bool)
    depth = torch.zeros(nodes, dtype=torch.int64)
    for node in range(nodes):
        if node:
            parent = int(torch.randint(0, node, (1,), device=generator.device, generator=generator))
            seen[node] = seen[parent]
            depth[node] = depth[parent] + 1
        seen[node, node] = True
    return seen, depth


def encode(values: Tensor, dtype: torch.dtype, scales: Tensor) -> Tensor:
    """Keys and values [..., 2, block, Hkv, D] to an 8-bit cache: value/scale, clamped."""
    scaled = values / scales[:, None, :, None]
    if dtype is torch.int8:
        return scaled.round().clamp(-127, 127).to(torch.int8)
    return scaled.clamp(-448, 448).to(dtype)


def expected(step: Step, cache_after: Tensor) -> Tensor:
    """The answer in float64, from the cache as the kernel left it: its rounding is not counted twice."""
    s, inputs = step.shape, step.inputs
    qkv = inputs["qkv"]
    assert qkv is not None
    out = torch.zeros(qkv.shape[0], s.heads, s.head_dim, dtype=torch.float64, device=qkv.device)
    queries = rotated(step, 0, s.heads)
    table, group = inputs["block_table"], s.heads // s.kv_heads
    assert table is not None
    at = 0
    for index, (q, kv) in enumerate(s.lengths):
        where = torch.arange(kv, device=qkv.device)
        rows = cache_after[table[index, where // s.block_size].long(), :, where % s.block_size].double()
        if narrow(s):
            scales = inputs["cache_scales"]
            assert scales is not None
            rows = rows * scales[None, :, :, None].double()
        keys, values = rows[:, 0].repeat_interleave(group, 1), rows[:, 1].repeat_interleave(group, 1)
        score = torch.einsum("qhd,khd->hqk", queries[at : at + q], keys) * step.desc.scale
        if s.softcap:
            score = s.softcap * torch.tanh(score / s.softcap)
        position = inputs["position_ids"][at : at + q].long()
        slot = torch.arange(kv - q, kv, device=qkv.device)
        seen = torch.ones(q, kv, dtype=torch.bool, device=qkv.device)
        if s.tree:
            seen[:, kv - q :] = step.tree_rows[index]
        elif s.causal:
            seen &= where[None] <= slot[:, None]
        if s.window:
            key_position = where.clone()
            if s.tree:
                key_position[kv - q :] = position
            own = position if s.tree else slot
            seen &= own[:, None] - key_position[None] < s.window
        score = score.masked_fill(~seen, -math.inf)
        if s.sinks:
            sink = inputs["sinks"].double()[:, None, None].expand(-1, q, 1)
            probability = torch.softmax(torch.cat([score, sink], -1), -1)[..., :-1]
        else:
            probability = torch.softmax(score, -1)
        out[at : at + q] = torch.einsum("hqk,khd->qhd", probability, values)
        at += q
    return out.flatten(1)


def rotated(step: Step, first: int, count: int) -> Tensor:
    """Heads [first, first + count) of qkv after norm and RoPE, float64 [T, count, D]."""
    s, inputs = step.shape, step.inputs
    x = inputs["qkv"].view(-1, s.heads + 2 * s.kv_heads, s.head_dim)[:, first : first + count].double()
    if s.norm:
        weight = inputs["q_norm" if first == 0 else "k_norm"]
        assert weight is not None
        x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    if inputs["rope_cos"] is None:
        return x
    position = inputs["position_ids"].long()
    cos, sin = (inputs[name][position].double()[:, None] for name in ("rope_cos", "rope_sin"))
    half = cos.shape[-1]
    y = x.clone()
    first_of, second_of = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
        if s.interleaved
        else (slice(0, half), slice(half, 2 * half))
    )
    a, b = x[..., first_of], x[..., second_of]
    y[..., first_of], y[..., second_of] = a * cos - b * sin, b * cos + a * sin
    return y
