"""PagedAttention on the GPU against float64 over ragged batches, every feature, and hostile inputs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cuda_library import CudaLibrary, poisoned
from matrices import relative_error
from steps import Shape, Step, encode, expected, narrow, random_step, rotated

from enginebay.plugins import reference

F16, BF16, F8, I8 = torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8
DECODE = ((1, 1), (1, 15), (1, 16), (1, 17), (1, 300), (1, 1000), (1, 2049))
VERIFY = ((5, 5), (4, 40), (7, 600), (16, 16), (1, 77))
PREFILL = ((64, 64), (100, 100), (1, 33), (65, 200), (129, 1000), (3, 3), (200, 207))
BUILT = tuple(
    (io, cache, head_dim)
    for io in (F16, BF16)
    for cache in (io, F8, I8)
    for head_dim in (64, 96, 128, 192, 256)
)


def tolerance(shape: Shape) -> float:
    """Of a row: rounding of queries, probabilities and output to the narrower of the io dtype and half."""
    return {F16: 2.0**-10, BF16: 2.0**-7}[shape.io] * (1.5 if not narrow(shape) else 2)


def check(library: CudaLibrary, step: Step) -> torch.Tensor:
    shape = step.shape
    cache = step.inputs["cache"]
    assert cache is not None
    before = cache.clone()
    out = library.attention(step.desc, step.inputs)
    torch.cuda.synchronize()
    used = sum(q for q, _ in shape.lengths)
    assert torch.isfinite(out).all()
    assert (out[used:] == 0).all()
    assert relative_error(
        out[:used].view(-1, shape.head_dim), expected(step, cache)[:used].view(-1, shape.head_dim)
    ) < (tolerance(shape))
    check_cache(step, before)
    return out


def check_cache(step: Step, before: torch.Tensor) -> None:
    """Every slot of the step holds its token's key and value, every other what it held."""
    s, inputs = step.shape, step.inputs
    cache, slots = inputs["cache"], inputs["slot_mapping"]
    assert cache is not None
    assert slots is not None
    slots = slots[slots >= 0].long()
    new = torch.stack(
        [
            rotated(step, s.heads, s.kv_heads)[: len(slots)],
            inputs["qkv"]
            .view(-1, s.heads + 2 * s.kv_heads, s.head_dim)[: len(slots), -s.kv_heads :]
            .double(),
        ],
        1,
    )  # [T, 2, Hkv, D]
    rows = cache.transpose(1, 2).flatten(0, 1)  # [slots, 2, Hkv, D]
    if narrow(s):
        scales = inputs["cache_scales"]
        assert scales is not None
        stored = rows[slots].double() * scales[:, :, None].double()
        limit = scales.max() * (0.51 if s.cache is I8 else 448 / 16)
        close = (stored - new).abs() <= (limit if s.cache is I8 else new.abs() / 15 + scales.max() * 2**-9)
        top = {I8: 127.0, F8: 448.0}[s.cache] * scales[:, :, None].double()
        assert (close | (new.abs() >= top * 0.99)).all()
    else:
        assert relative_error(rows[slots].double(), new) < {F16: 2.0**-10, BF16: 2.0**-7}[s.cache]
    untouched = torch.ones(rows.shape[0], dtype=torch.bool, device=rows.device)
    untouched[slots] = False
    old = before.transpose(1, 2).flatten(0, 1)
    assert torch.equal(rows[untouched].view(torch.uint8), old[untouched].view(torch.uint8))


@pytest.mark.parametrize(("io", "cache", "head_dim"), BUILT)
@pytest.mark.parametrize(
    "lengths", [DECODE, VERIFY, PREFILL, (*DECODE, *PREFILL)], ids=["decode", "verify", "prefill", "mixed"]
)
def test_every_instance(
    library: CudaLibrary,
    generator: torch.Generator,
    io: torch.dtype,
    cache: torch.dtype,
    head_dim: int,
    lengths: tuple[tuple[int, int], ...],
) -> None:
    shape = Shape(lengths, io=io, cache=cache, head_dim=head_dim, padding_tokens=3, padding_sequences=2)
    check(library, random_step(shape, generator))


VARIANTS = {
    "mha": {"heads": 3, "kv_heads": 3},
    "gqa16": {"heads": 32, "kv_heads": 2},
    "gqa7": {"heads": 14, "kv_heads": 2},
    "mqa": {"heads": 5, "kv_heads": 1},
    "no_rope": {"rotary": 0},
    "partial_rope": {"rotary": 32},
    "interleaved": {"interleaved": True},
    "norm": {"norm": True},
    "window": {"window": 50},
    "window1": {"window": 1},
    "softcap": {"softcap": 5.0},
    "sinks": {"sinks": True},
    "scale": {"scale": 0.03},
    "not_causal": {"causal": False},
    "block1": {"block_size": 1},
    "block64": {"block_size": 64},
    "all": {"window": 70, "softcap": 8.0, "sinks": True, "norm": True, "rotary": 64, "block_size": 32},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("cache", [BF16, F8])
def test_variants(library: CudaLibrary, generator: torch.Generator, variant: str, cache: torch.dtype) -> None:
    for lengths in (DECODE, VERIFY, PREFILL):
        base = Shape(lengths, io=BF16, cache=cache, head_dim=128)
        check(library, random_step(replace(base, **VARIANTS[variant]), generator))


@pytest.mark.parametrize("window", [0, 6])
def test_tree_mask(library: CudaLibrary, generator: torch.Generator, window: int) -> None:
    for lengths in (VERIFY, ((40, 90), (70, 300), (1, 20), (9, 9))):
        shape = Shape(lengths, io=BF16, cache=BF16, tree=True, window=window)
        check(library, random_step(shape, generator))


@pytest.mark.parametrize("sequences", [1, 2, 33, 512])
def test_ragged_batches(library: CudaLibrary, generator: torch.Generator, sequences: int) -> None:
    lengths = torch.randint(1, 700, (sequences,), device="cuda", generator=generator).tolist()
    check(library, random_step(Shape(tuple((1, n) for n in lengths)), generator))


def test_long_contexts(library: CudaLibrary, generator: torch.Generator) -> None:
    """128k tokens, and a million cached in all."""
    lengths = ((1, 131072), *(((1, 8192),) * 100), (3, 65536), (1, 5))
    shape = Shape(lengths, heads=4, kv_heads=1, block_size=64)
    check(library, random_step(shape, generator))


def test_unknown_blocks_slots_and_positions_are_contained(
    library: CudaLibrary, generator: torch.Generator
) -> None:
    for lengths in (((1, 40), (1, 50), (1, 60)), ((70, 70), (80, 90), (100, 120))):
        step = random_step(Shape(lengths, io=BF16, cache=BF16), generator)
        sound = {name: None if t is None else t.clone() for name, t in step.inputs.items()}
        good = library.attention(step.desc, sound)
        first, second = lengths[0][0], lengths[0][0] + lengths[1][0]
        for name, spoil in {
            "block_table": lambda t: t[1].fill_(2**30),
            "kv_len": lambda t: t[1:2].fill_(2**30),
            "position_ids": lambda t, at=slice(first, second): t[at].fill_(-5),
        }.items():
            inputs = {key: None if t is None else t.clone() for key, t in step.inputs.items()}
            spoil(inputs[name])
            out = library.attention(step.desc, inputs)
            torch.cuda.synchronize()
            assert torch.equal(out[:first], good[:first]), name
            assert torch.equal(out[second:], good[second:]), name
            assert out[first:second].isnan().any(), name
        inputs = {key: None if t is None else t.clone() for key, t in step.inputs.items()}
        inputs["slot_mapping"][0] = 2**31 - 1
        library.attention(step.desc, inputs)
        torch.cuda.synchronize()


def test_a_nan_stays_in_its_sequence(library: CudaLibrary, generator: torch.Generator) -> None:
    for lengths in (((1, 40), (1, 500), (1, 60)), ((70, 70), (80, 90), (100, 120))):
        step = random_step(Shape(lengths, io=BF16, cache=BF16), generator)
        # What lies in blocks no sequence has, and past a sequence's end, is NaN.
        cache, table = step.inputs["cache"], step.inputs["block_table"]
        assert cache is not None
        assert table is not None
        live = torch.zeros(cache.shape[0], cache.shape[2], dtype=torch.bool, device="cuda")
        for index, (_, kv) in enumerate(lengths):
            where = torch.arange(kv, device="cuda")
            live[table[index, where // 16].long(), where % 16] = True
        cache[~live[:, None].expand(-1, 2, -1)] = float("nan")
        good = library.attention(
            step.desc, {k: None if t is None else t.clone() for k, t in step.inputs.items()}
        )
        assert torch.isfinite(good).all()
        first, second = lengths[0][0], lengths[0][0] + lengths[1][0]
        step.inputs["qkv"][first] = float("nan")
        out = library.attention(step.desc, step.inputs)
        assert torch.equal(out[:first], good[:first])
        assert torch.equal(out[second:], good[second:])
        assert out[first].isnan().all()


def test_a_captured_graph_follows_changed_lengths(library: CudaLibrary, generator: torch.Generator) -> None:
    longest = Shape(((1, 3000), (1, 3000), (1, 3000), (40, 3000)), io=BF16, cache=BF16)
    captured = random_step(longest, generator)
    tokens, width = captured.inputs["qkv"].shape[0], captured.inputs["block_table"].shape[1]
    out = poisoned((tokens, captured.desc.num_heads * captured.desc.head_dim), BF16)
    workspace = library.attention_workspace(captured.desc, tokens, 4)
    library.attention(captured.desc, captured.inputs, out, workspace)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        library.attention(captured.desc, captured.inputs, out, workspace)
    for lengths in (((1, 7), (1, 2999), (1, 64), (40, 41)), ((10, 10), (1, 1), (2, 900), (30, 2000))):
        step = random_step(replace(longest, lengths=lengths), generator)
        for name in ("qkv", "query_start", "kv_len", "slot_mapping", "position_ids"):
            captured.inputs[name].copy_(step.inputs[name])
        captured.inputs["block_table"].fill_(-1)
        captured.inputs["block_table"][:, : step.inputs["block_table"].shape[1]] = step.inputs["block_table"]
        captured.inputs["cache"][: step.inputs["cache"].shape[0]] = step.inputs["cache"]
        assert step.inputs["block_table"].shape[1] <= width
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        captured.shape = step.shape
        assert (
            relative_error(out.view(-1, 128), expected(captured, captured.inputs["cache"]).view(-1, 128))
            < 2.0**-7 * 1.5
        )


def test_scales_of_an_8_bit_cache_are_per_head(library: CudaLibrary, generator: torch.Generator) -> None:
    """One head's scale 10 times another's; a kernel that used a common one would be far off."""
    for cache in (F8, I8):
        step = random_step(
            Shape(((1, 200), (5, 100)), io=BF16 if cache is F8 else F16, cache=cache), generator
        )
        scales = torch.tensor([[0.02, 0.2], [0.3, 0.03]], device="cuda")
        size = step.inputs["cache"].shape
        step.inputs["cache_scales"] = scales
        step.inputs["cache"] = encode(torch.randn(size, device="cuda", generator=generator), cache, scales)
        check(library, step)


@pytest.mark.parametrize("variant", ["mha", "no_rope", "partial_rope", "interleaved", "not_causal", "all"])
def test_the_oracle_is_the_reference(library: CudaLibrary, generator: torch.Generator, variant: str) -> None:
    """`steps.expected`, which large steps need, against plugins/reference.py; and the kernel against both."""
    lengths = ((1, 20), (5, 40), (70, 90))
    step = random_step(replace(Shape(lengths, io=F16, cache=F16), **VARIANTS[variant]), generator)
    given = {name: t for name, t in step.inputs.items() if t is not None}
    arrays = {name: t.cpu().numpy() for name, t in given.items()}
    arrays["qkv"] = arrays["qkv"].astype("float64")
    s, desc = step.shape, step.desc
    answer, cache = reference.paged_attention(
        **arrays,
        num_heads=s.heads,
        num_kv_heads=s.kv_heads,
        head_dim=s.head_dim,
        scale=desc.scale,
        causal=s.causal,
        window=s.window,
        softcap=s.softcap,
        rope_interleaved=s.interleaved,
    )
    out = check(library, step)
    after = step.inputs["cache"]
    assert after is not None
    rows = torch.from_numpy(answer).view(-1, s.head_dim)
    # The reference's own cache rounds keys and values as the kernel's does.
    assert (
        relative_error(expected(step, torch.from_numpy(cache).cuda()).cpu().view(-1, s.head_dim), rows) < 1e-6
    )
    assert relative_error(out.cpu().view(-1, s.head_dim), rows) < tolerance(s) * 1.5
