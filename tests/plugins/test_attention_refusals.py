"""Bad input to PagedAttention: refused with the values that are wrong, before anything is written."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attention_cases import Heads, Pool, rows_of, step

from enginebay.plugins import load
from enginebay.plugins.load import KernelLibrary, PluginError

HEADS = Heads(num_heads=4, num_kv_heads=2, head_dim=16, rotary_dim=16, positions=64)


def good_step() -> tuple[dict[str, Any], Any, dict[str, Any]]:
    """Sequences at 0..19 and 16..16 in blocks of 16, table of 3; (inputs, cache of 8 blocks, keywords)."""
    rng = np.random.default_rng()
    pool = Pool(HEADS, rng, block_size=16, blocks=8)
    pool.cache[:] = rng.normal(size=pool.cache.shape)
    table = pool.table([20, 17], 3)
    now = step([rows_of(rng, HEADS, 20), rows_of(rng, HEADS, 1)], [0, 16], table, 16, padding=1)
    return {**now, **HEADS.constants(rng)}, pool.cache, HEADS.keywords()


def change(array: Any, index: Any, value: int) -> Any:
    changed = array.copy()
    changed[index] = value
    return changed


ARRAYS = {
    "block beyond the pool": (
        "block_table",
        (0, 1),
        8,
        r"block_table\[0\]\[1\] is 8; the cache has 8 blocks",
    ),
    "negative block": ("block_table", (1, 1), -1, r"block_table\[1\]\[1\] is -1; the cache has 8 blocks"),
    "slot beyond the pool": ("slot_mapping", 3, 128, r"slot_mapping\[3\] is 128; the cache has 128 slots"),
    "slot below -1": ("slot_mapping", 20, -2, r"slot_mapping\[20\] is -2"),
    "position beyond RoPE": (
        "position_ids",
        2,
        64,
        r"position_ids\[2\] is 64; the RoPE table has 64 positions",
    ),
    "negative position": ("position_ids", 2, -1, r"position_ids\[2\] is -1"),
    "query_start falls": ("query_start", 1, -1, r"query_start falls from 0 at 0 to -1 at 1"),
    "query_start is late": ("query_start", 0, 1, r"query_start\[0\] is 1, expected 0"),
    "query_start overruns": ("query_start", 2, 23, r"query_start ends at 23, there are 22 tokens"),
    "kv_len short of the chunk": ("kv_len", 0, 19, r"sequence 0 has 20 tokens in this step but kv_len 19"),
    "kv_len of padding": ("kv_len", 1, 0, r"sequence 1 has 1 tokens in this step but kv_len 0"),
    "kv_len beyond its blocks": (
        "kv_len",
        1,
        49,
        r"sequence 1 has kv_len 49, its 3 blocks of 16 tokens hold 48",
    ),
    "kv_len negative": ("kv_len", 1, -1, r"sequence 1 has 1 tokens in this step but kv_len -1"),
}


@pytest.mark.parametrize("fault", ARRAYS)
def test_wrong_indices(library: KernelLibrary, fault: str) -> None:
    name, index, value, message = ARRAYS[fault]
    inputs, cache, keywords = good_step()
    library.run_attention(cache=cache.copy(), **inputs, **keywords)
    before = cache.copy()
    if fault == "query_start overruns":  # let the other checks pass
        inputs["kv_len"] = change(inputs["kv_len"], 1, 19)
    with pytest.raises(PluginError, match=message):
        library.run_attention(cache=cache, **{**inputs, name: change(inputs[name], index, value)}, **keywords)
    np.testing.assert_array_equal(cache, before, "nothing was written")


DESCRIPTORS = {
    "heads": ({"num_heads": 3, "head_dim": 20}, "num_heads 3 is no multiple of num_kv_heads 2"),
    "no heads": ({"num_heads": 0}, "num_heads is 0, expected 1 to"),
    "head_dim": ({"head_dim": 1024}, "head_dim 1024; this library goes up to 640"),
    "softcap": ({"softcap": float("nan")}, "softcap is nan"),
    "negative softcap": ({"softcap": -1.0}, "softcap is -1"),
    "softcap without end": ({"softcap": float("inf")}, "softcap is inf"),
    "scale": ({"scale": float("nan")}, "scale is -?nan, expected a positive finite number"),
    "negative scale": ({"scale": -0.5}, "scale is -0.5"),
    "no scale": ({"scale": 0.0}, "scale is 0"),
    "scale without end": ({"scale": float("inf")}, "scale is inf"),
    "norm_epsilon": ({"norm_epsilon": float("nan")}, "norm_epsilon is -?nan, expected 0 or a positive"),
    "negative norm_epsilon": ({"norm_epsilon": -1e-6}, "norm_epsilon is -1e-06"),
    "norm_epsilon without end": ({"norm_epsilon": float("inf")}, "norm_epsilon is inf"),
    "causal": ({"causal": 2}, "causal is 2, expected 0 to 1"),
    "rope_interleaved": ({"rope_interleaved": -1}, "rope_interleaved is -1, expected 0 to 1"),
    "window": ({"window": -1}, "window is -1"),
    "window looks ahead": ({"window": 8, "causal": False}, "window 8 with causal 0"),
}


@pytest.mark.parametrize("fault", DESCRIPTORS)
def test_wrong_attributes(library: KernelLibrary, fault: str) -> None:
    changes, message = DESCRIPTORS[fault]
    inputs, cache, keywords = good_step()
    with pytest.raises(PluginError, match=message):
        library.run_attention(cache=cache, **inputs, **{**keywords, **changes})


def test_rotary_dim_beyond_the_head(library: KernelLibrary) -> None:
    inputs, cache, keywords = good_step()
    table = np.ones((64, 9), np.float32)
    with pytest.raises(PluginError, match="rotary_dim is 18, expected 0 to 16"):
        library.run_attention(cache=cache, **{**inputs, "rope_cos": table, "rope_sin": table}, **keywords)


@pytest.mark.parametrize("missing", ["qkv", "cache", "query_start", "kv_len", "slot_mapping", "rope_sin"])
def test_null_pointers(library: KernelLibrary, missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, cache, keywords = good_step()
    wanted = inputs.get(missing, cache)
    whole = load._pointer
    monkeypatch.setattr(load, "_pointer", lambda array: None if array is wanted else whole(array))
    with pytest.raises(PluginError, match=f"{missing} is null"):
        library.run_attention(cache=cache, **inputs, **keywords)


def test_narrow_io_is_unsupported(library: KernelLibrary) -> None:
    inputs, cache, keywords = good_step()
    inputs["qkv"] = inputs["qkv"].astype(np.float16)
    with pytest.raises(PluginError, match="qkv is float16; the CPU library computes in float32"):
        library.run_attention(cache=cache, **inputs, **keywords)


def test_blocks_behind_a_window_may_be_gone(library: KernelLibrary) -> None:
    """A cache frees what no token of the step sees: those table entries are not looked at."""
    heads = Heads(num_heads=4, num_kv_heads=2, head_dim=16, rotary_dim=16, attributes={"window": 20})
    rng = np.random.default_rng()
    pool = Pool(heads, rng, block_size=16, blocks=8)
    pool.cache[:] = rng.normal(size=pool.cache.shape)
    table = pool.table([70], 5)
    now = {**step([rows_of(rng, heads, 2)], [68], table, 16), **heads.constants(rng)}
    wanted = library.run_attention(cache=pool.cache.copy(), **now, **heads.keywords())
    # Token 68 sees 49..68: blocks 3 and 4.
    gone = {**now, "block_table": change(table, (0, slice(0, 3)), -7)}
    got = library.run_attention(cache=pool.cache.copy(), **gone, **heads.keywords())
    np.testing.assert_array_equal(got, wanted)
    with pytest.raises(PluginError, match=r"block_table\[0\]\[3\] is -7"):
        library.run_attention(
            cache=pool.cache, **{**now, "block_table": change(table, (0, 3), -7)}, **heads.keywords()
        )


def test_plan_and_workspace_are_checked(library: KernelLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, cache, keywords = good_step()
    before = cache.copy()
    whole = KernelLibrary.call

    def call(change_argument: tuple[int, Any]) -> Any:
        position, value = change_argument

        def changed(self: KernelLibrary, name: str, *arguments: Any) -> None:
            if name == "eb_paged_attention_run":
                arguments = (*arguments[:position], value(arguments[position]), *arguments[position + 1 :])
            whole(self, name, *arguments)

        return changed

    other = np.zeros(64, np.int32)
    for fault, message in (
        ((3, lambda count: 3), "the plan has 3 ints, a header takes"),
        ((2, lambda _: other.ctypes.data), "the plan is for 0 tokens of 0 sequences, the call has 22 and 2"),
        ((5, lambda size: size - 1), "the workspace has .* bytes, this step takes"),
        ((4, lambda _: None), "the workspace has .* bytes, this step takes"),
    ):
        monkeypatch.setattr(KernelLibrary, "call", call(fault))
        with pytest.raises(PluginError, match=message):
            library.run_attention(cache=cache, **inputs, **keywords)
    np.testing.assert_array_equal(cache, before)


def test_context_of_another_version(library: KernelLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, cache, keywords = good_step()
    monkeypatch.setattr(load, "ABI_VERSION", 99)
    with pytest.raises(PluginError, match="invalid argument"):
        library.run_attention(cache=cache, **inputs, **keywords)


def test_struct_layouts_match_the_headers(tmp_path: Path) -> None:
    """A field added to a header and not to load.py shows in the size of its structure."""
    structures = {
        "eb_context": load._Context,
        "eb_paged_attention_desc": load._AttentionDesc,
        "eb_paged_attention_args": load._AttentionArgs,
        "eb_quant_linear_desc": load._LinearDesc,
        "eb_quant_linear_weights": load._LinearWeights,
        "eb_rms_norm_desc": load._NormDesc,
        "eb_gated_activation_desc": load._ActivationDesc,
    }
    headers = ("elementwise", "paged_attention", "quant_linear")
    lines = [f'#include "enginebay/{name}.h"' for name in headers]
    lines += [f'_Static_assert(sizeof({n}) == {ctypes.sizeof(s)}, "{n}");' for n, s in structures.items()]
    source = tmp_path / "sizes.c"
    source.write_text("\n".join(lines) + "\n")
    include = Path(load.__file__).parent / "include"
    command = ["gcc", "-std=c11", "-fsyntax-only", f"-I{include}", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
