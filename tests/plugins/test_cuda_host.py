"""The CUDA library's host side, which needs no GPU: sizes, packing against numpy, refusals, instances."""

from __future__ import annotations

import re
import sys
from ctypes import byref, c_int64, c_size_t, c_void_p
from pathlib import Path

import numpy as np
import pytest
import torch

from enginebay.plugins import build_cuda, ops
from enginebay.plugins.load import read_op_table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gpu"))
from cuda_library import AttentionDesc, CudaLibrary, LibraryError, MoeDesc, SpecDesc, library_path
from matrices import int4_weights

F16, BF16 = torch.float16, torch.bfloat16


@pytest.fixture(scope="module")
def library() -> CudaLibrary:
    if not library_path().is_file():
        pytest.skip(
            f"not run: no CUDA library at {library_path()}; make plugins-cuda (needs nvcc 13, no GPU)"
        )
    return CudaLibrary()


def attention_desc(**changes: float) -> object:
    values = {
        "num_heads": 8,
        "num_kv_heads": 2,
        "head_dim": 128,
        "block_size": 16,
        "num_blocks": 64,
        "table_width": 8,
        "rotary_dim": 128,
        "rope_positions": 4096,
        "rope_interleaved": 0,
        "causal": 1,
        "window": 0,
        "scale": 0.1,
        "softcap": 0.0,
        "norm_epsilon": 1e-6,
        "io_dtype": 2,
        "cache_dtype": 2,
    }
    return AttentionDesc(**{**values, **changes})


def refusal(library: CudaLibrary, name: str, *arguments: object, **options: int) -> tuple[int, str]:
    with pytest.raises(LibraryError) as caught:
        library.call(name, *arguments, **options)
    return caught.value.status, str(caught.value)


def test_the_op_table_is_of_this_version(library: CudaLibrary) -> None:
    table = read_op_table(library.path, library.op_table())
    assert table == {op.name: op.version for op in ops.OPS if op.name in table}
    assert set(table) == set(build_cuda.OPS)


@pytest.mark.parametrize("io", [F16, BF16])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("n", "k", "block"), [(16, 64, 64), (40, 256, 128), (1, 128, 128), (100, 640, 64)])
def test_int4_round_trip(
    library: CudaLibrary, io: torch.dtype, symmetric: bool, n: int, k: int, block: int
) -> None:
    values, scales, minimums = int4_weights(
        n, k, block, symmetric, torch.Generator().manual_seed(torch.seed() % 2**31)
    )
    desc = library.linear_desc(k, n, "i4", io, block, symmetric)
    packed = library.pack(desc, values, scales, minimums)
    q = values.numpy().astype(np.float64) - 8
    scale = np.repeat(scales.to(io).double().numpy(), block, axis=1)
    expected = scale * q
    if minimums is not None:
        centre = (minimums + 8 * scales).to(io).double().numpy()
        expected = expected + np.repeat(centre, block, axis=1)
    assert np.array_equal(library.unpack(desc, packed).numpy(), expected.astype(np.float32))
    # Half a byte a weight, padded to whole tiles, and a scale (and centre) a block.
    rows = -(-n // 16) * 16
    size = -(-rows * k // 2 // 256) * 256 + rows * (k // block) * (2 if symmetric else 4)
    assert len(packed) == size


def test_the_documented_place_of_a_nibble(library: CudaLibrary) -> None:
    """cuda-i4-m16k64-v1: row 9, column 27 of a tile is word 1 of lane 5, pair 3, odd: bits 28 to 31."""
    values = torch.full((16, 64), 8, dtype=torch.uint8)
    values[9, 27] = 15
    desc = library.linear_desc(64, 16, "i4", F16, 64)
    packed = library.pack(desc, values, torch.ones(16, 1))
    words = packed[:512].view(torch.int32).numpy().view(np.uint32)
    assert words[5 * 4 + 1] == 0xF8888888
    assert (np.delete(words, 21) == 0x88888888).all()
    assert library.layout(desc) == "cuda-i4-m16k64-f16-v1"


def test_fp8_and_wide_round_trips(library: CudaLibrary) -> None:
    codes = torch.arange(256).repeat(2).to(torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0
    values = codes.view(torch.float8_e4m3fn).view(16, 32)
    scales = torch.rand(16) + 0.5
    desc = library.linear_desc(32, 16, "f8", BF16)
    packed = library.pack(desc, values, scales)
    assert torch.equal(library.unpack(desc, packed), values.float() * scales[:, None])
    wide = torch.randn(16, 32).bfloat16()
    desc = library.linear_desc(32, 16, "bf16", BF16)
    assert torch.equal(library.unpack(desc, library.pack(desc, wide)), wide.float())


def test_packing_refuses_what_would_not_be_weights(library: CudaLibrary) -> None:
    desc = library.linear_desc(64, 16, "i4", F16, 64)
    values, scales = torch.full((16, 64), 8, dtype=torch.uint8), torch.ones(16, 1)
    for bad_values, bad_scales, words in (
        (values + 8, scales, "16 at row 0, column 0 is above 15"),
        (values, scales * 1e6, "not finite in float16"),
        (values, scales * float("nan"), "not finite"),
        (values, None, "need scales"),
    ):
        with pytest.raises(LibraryError, match=words):
            library.pack(desc, bad_values, bad_scales)
    nan = torch.full((16, 16), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
    with pytest.raises(LibraryError, match="is NaN"):
        library.pack(library.linear_desc(16, 16, "f8", F16), nan, torch.ones(16))
    ones = torch.ones(16, 16).to(torch.float8_e4m3fn)
    for scale in (0.0, -1.0, float("nan")):
        with pytest.raises(LibraryError, match="positive and finite"):
            library.pack(library.linear_desc(16, 16, "f8", F16), ones, torch.full((16,), scale))


@pytest.mark.parametrize(
    ("desc", "status", "words"),
    [
        ((100, 16, "i4", F16, 64), 1, "in_features 100 is no multiple of block_size 64"),
        ((64, 16, "i4", F16, 32), 2, "int4 block_size 32; it has 64 and 128"),
        ((0, 16, "i4", F16, 64), 1, "must be positive"),
        ((64, -3, "i4", F16, 64), 1, "must be positive"),
        ((64, 16, "i4", torch.float32, 64), 2, "io_dtype float32"),
        ((64, 16, "i8", F16, 64), 2, "format int8"),
        ((64, 17, "f8", F16, 0), 2, "multiples of 16, not 64 and 17"),
    ],
)
def test_linear_descriptors_are_checked(
    library: CudaLibrary, desc: tuple[int, int, str, torch.dtype, int], status: int, words: str
) -> None:
    built = library.linear_desc(*desc)
    assert refusal(library, "eb_quant_linear_packed_bytes", byref(built), byref(c_size_t()))[0] == status
    assert words in refusal(library, "eb_quant_linear_packed_bytes", byref(built), byref(c_size_t()))[1]


def test_null_pointers_sizes_and_versions_are_refused(library: CudaLibrary) -> None:
    size = c_size_t()
    assert "desc is NULL" in refusal(library, "eb_quant_linear_packed_bytes", None, byref(size))[1]
    assert refusal(library, "eb_quant_linear_packed_bytes", None, byref(size), abi_version=99)[0] == 1
    desc = library.linear_desc(64, 16, "i4", F16, 64)
    needed = library.packed_bytes(desc)
    for packed, given, words in (
        (None, needed, "packed weights are NULL"),
        (c_void_p(8), needed, "not aligned to 16 bytes"),
        (
            c_void_p(16),
            needed - 1,
            f"{needed - 1} packed bytes where layout cuda-i4-m16k64-f16-v1 takes {needed}",
        ),
    ):
        arguments = (byref(desc), c_int64(1), c_void_p(16), packed, c_size_t(given), None, c_void_p(16))
        assert words in refusal(library, "eb_quant_linear_run", *arguments, None, c_size_t(0))[1]
    arguments = (byref(desc), c_int64(-1), c_void_p(16), c_void_p(16), c_size_t(needed), None, c_void_p(16))
    assert "rows -1" in refusal(library, "eb_quant_linear_run", *arguments, None, c_size_t(0))[1]


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({"num_heads": 7}, 1, "num_heads 7 must be a positive multiple of num_kv_heads 2"),
        ({"head_dim": 80, "rotary_dim": 80}, 2, "without io float16, cache float16, head_dim 80"),
        ({"io_dtype": 9}, 2, "io unknown"),
        ({"rotary_dim": 130}, 1, "rotary_dim 130 must be even and at most head_dim 128"),
        ({"block_size": 0}, 1, "must be positive"),
        ({"window": -1}, 1, "neither negative nor NaN"),
        ({"scale": float("nan")}, 1, "neither negative nor NaN"),
        ({"num_heads": 130, "num_kv_heads": 1}, 2, "130 query heads a key head"),
    ],
)
def test_attention_descriptors_are_checked(
    library: CudaLibrary, changes: dict[str, float], status: int, words: str
) -> None:
    desc, size = attention_desc(**changes), c_size_t()
    arguments = (byref(desc), c_int64(1), c_int64(1), byref(size), byref(size))
    code, message = refusal(library, "eb_paged_attention_plan_size", *arguments)
    assert code == status
    assert words in message


def test_workspaces_grow_with_the_step_and_plans_are_empty(library: CudaLibrary) -> None:
    sizes = []
    for tokens, sequences in ((1, 1), (64, 64), (512, 8), (8192, 8)):
        ints, size = c_size_t(99), c_size_t()
        desc = attention_desc()
        library.call(
            "eb_paged_attention_plan_size",
            *(byref(desc), c_int64(tokens), c_int64(sequences), byref(ints), byref(size)),
        )
        assert ints.value == 0
        sizes.append(size.value)
    assert sizes == sorted(sizes)
    assert sizes[-1] - sizes[0] > 8191 * 8 * 128 * 2  # the rotated queries
    small, large = c_size_t(), c_size_t()
    desc = SpecDesc(32000, 4, 2)
    library.call("eb_spec_verify_workspace_size", byref(desc), c_int64(1), c_int64(5), byref(small))
    library.call("eb_spec_verify_workspace_size", byref(desc), c_int64(16), c_int64(80), byref(large))
    assert small.value < large.value
    assert (
        "5 sequences, 3 rows"
        in refusal(
            library, "eb_spec_verify_workspace_size", byref(desc), c_int64(5), c_int64(3), byref(small)
        )[1]
    )


def test_moe_descriptors_are_checked(library: CudaLibrary) -> None:
    def desc(**changes: float) -> object:
        values = {
            "num_experts": 8,
            "top_k": 2,
            "hidden": 256,
            "intermediate": 128,
            "routed_scale": 1.0,
            "format": 6,
        }
        return MoeDesc(**{**values, "block_size": 64, "symmetric": 1, "io_dtype": 3, **changes})

    up, down = library.expert_strides(desc())
    assert up % 256 == down % 256 == 0
    assert up >= 2 * 128 * 256 // 2
    for changes, words in (
        ({"top_k": 9}, "top_k 9 of num_experts 8"),
        ({"num_groups": 3, "top_groups": 1}, "cannot give 2"),
        ({"format": 3}, "bfloat16 takes block_size 0 and symmetric 1, not 64 and 1"),
        ({"format": 5}, "format int8 with io_dtype bfloat16"),
        ({"block_size": 48}, "int4 block_size 48"),
        ({"scoring": 7}, "unknown scoring 7"),
    ):
        built, size = desc(**changes), c_size_t()
        arguments = ("eb_moe_workspace_size", byref(built), c_int64(4), byref(size))
        assert words in refusal(library, *arguments)[1]


def test_one_table_names_every_instance() -> None:
    names = [entry.name for entry in build_cuda.ATTENTION]
    assert len(set(names)) == len(names) == 30
    ci = build_cuda.attention_table("ci")
    assert 0 < len(ci) <= 3
    assert {entry.head_dim for entry in build_cuda.ATTENTION} == {64, 96, 128, 192, 256}
    assert all(re.fullmatch(r"attention_(b?f16)_(b?f16|f8|i8)_\d+", name) for name in names)


def test_a_missing_compiler_or_architecture_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(build_cuda.BuildError, match=r"no kernels for sm_\[70\]; there are sm_80"):
        build_cuda.build((70,), directory=tmp_path)
    monkeypatch.setenv("NVCC", "no-such-nvcc")
    with pytest.raises(build_cuda.BuildError, match="'no-such-nvcc' is not on PATH"):
        build_cuda.build((90,), directory=tmp_path)
