"""QuantLinear and Embedding on the GPU against float64 products with the weights the layout unpacks to."""

from __future__ import annotations

import pytest
import torch
from cuda_library import CudaLibrary, poisoned
from matrices import int4_weights, relative_error

IO = (torch.float16, torch.bfloat16)
EPSILON = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def _check(
    y: torch.Tensor, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, extra: float = 1.0
) -> None:
    """Row by row: rounding of the output and of products whose terms add up at random."""
    expected = x.double() @ w.double().T.to(x.device)
    if bias is not None:
        expected = expected + bias.double()
    assert torch.isfinite(y).all()
    assert relative_error(y, expected) < 2 * EPSILON[x.dtype] * extra


@pytest.mark.parametrize("io", IO)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize(
    ("n", "k"),
    [
        *((16, 128), (40, 256), (1000, 640), (4096, 4096), (576, 1536), (6144, 4096), (320, 14336)),
        (17001, 640),
    ],
)
def test_int4_matches_float64_at_every_kind_of_row_count(
    library: CudaLibrary,
    generator: torch.Generator,
    io: torch.dtype,
    symmetric: bool,
    block: int,
    n: int,
    k: int,
) -> None:
    weights = int4_weights(n, k, block, symmetric, generator)
    desc = library.linear_desc(k, n, "i4", io, block, symmetric)
    host = library.pack(desc, *weights)
    w = library.unpack(desc, host).cuda()
    packed = host.cuda()
    bias = torch.randn(n, device="cuda", generator=generator)
    for rows in (1, 3, 8, 9, 16, 17, 33, 64, 100, 128, 129, 256, 300, 513):
        x = torch.randn(rows, k, device="cuda", generator=generator).to(io)
        for b in (None, bias):
            _check(library.linear(desc, x, packed, b), x, w, b, extra=3 if rows > 16 else 1.5)


@pytest.mark.parametrize("n", [512, 6144])
def test_rows_do_not_touch_each_other(library: CudaLibrary, generator: torch.Generator, n: int) -> None:
    k = 1024
    desc = library.linear_desc(k, n, "i4", torch.float16, 128)
    packed = library.pack(desc, *int4_weights(n, k, 128, True, generator)).cuda()
    for rows in (2, 7, 16, 31, 64, 200):
        x = torch.randn(rows, k, device="cuda", generator=generator).half()
        y = library.linear(desc, x, packed)
        poison = x.clone()
        poison[rows // 2] = float("nan")
        z = library.linear(desc, poison, packed)
        keep = torch.arange(rows, device="cuda") != rows // 2
        assert torch.equal(y[keep], z[keep])
        assert z[rows // 2].isnan().all()
        # Within one kernel, a row's place in the batch does not matter.
        order = torch.randperm(rows, device="cuda", generator=generator)
        assert torch.equal(library.linear(desc, x[order].contiguous(), packed), y[order])


@pytest.mark.parametrize("format", ["i4", "f8", "f16"])
def test_nothing_is_written_outside_y(library: CudaLibrary, generator: torch.Generator, format: str) -> None:
    n, k, rows = 208, 512, 37
    desc = library.linear_desc(k, n, format, torch.float16, 64 if format == "i4" else 0)
    packed = _packed(library, desc, format, n, k, generator).cuda()
    guarded = poisoned((rows + 4, n), torch.float16)
    x = torch.randn(rows, k, device="cuda", generator=generator).half()
    library.linear(desc, x, packed, y=guarded[2:-2])
    assert torch.isfinite(guarded[2:-2]).all()
    assert guarded[:2].isnan().all()
    assert guarded[-2:].isnan().all()


def _packed(
    library: CudaLibrary, desc: object, format: str, n: int, k: int, generator: torch.Generator
) -> torch.Tensor:
    if format == "i4":
        return library.pack(desc, *int4_weights(n, k, 64, True, generator))
    w = torch.randn(n, k, device="cuda", generator=generator).cpu()
    if format == "f16":
        return library.pack(desc, w.half())
    scales = w.abs().amax(1) / 448
    return library.pack(desc, (w / scales[:, None]).to(torch.float8_e4m3fn), scales)


@pytest.mark.parametrize("io", IO)
@pytest.mark.parametrize(("n", "k"), [(64, 256), (1024, 4096), (4096, 4096)])
def test_fp8_matches_the_product_of_what_was_quantised(
    library: CudaLibrary, generator: torch.Generator, io: torch.dtype, n: int, k: int
) -> None:
    desc = library.linear_desc(k, n, "f8", io)
    host = _packed(library, desc, "f8", n, k, generator)
    w, packed = library.unpack(desc, host).cuda(), host.cuda()
    bias = torch.randn(n, device="cuda", generator=generator)
    for rows in (1, 2, 16, 17, 64, 200, 512):
        # Rows of very different size: each has its own scale.
        size = 10 ** (2 * torch.rand(rows, 1, device="cuda", generator=generator))
        x = (torch.randn(rows, k, device="cuda", generator=generator) * size).to(io)
        x[rows // 2] = 0
        # Divided by a tensor: by a number, torch multiplies with its reciprocal.
        largest = x.float().abs().amax(1)
        scale = torch.where(largest > 0, largest / torch.full_like(largest, 448), 1.0)
        q = (x.float() / scale[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale[:, None]
        for b in (None, bias):
            y = library.linear(desc, x, packed, b)
            expected = q.double() @ w.double().T + (0 if b is None else b.double())
            # FP8 units keep 14 bits of each partial sum.
            assert relative_error(y, expected) < 4 * EPSILON[io] + 2.0**-11
            if b is None:
                assert (y[rows // 2] == 0).all()


@pytest.mark.parametrize("format", ["i4", "f8", "f16"])
def test_embedding_is_a_row_and_unknown_ids_are_nan(
    library: CudaLibrary, generator: torch.Generator, format: str
) -> None:
    n, k = 208, 512
    desc = library.linear_desc(k, n, format, torch.float16, 64 if format == "i4" else 0)
    host = _packed(library, desc, format, n, k, generator)
    ids = torch.tensor([0, 1, 15, 16, 17, 207, -1, 208, 2**31 - 1], dtype=torch.int32, device="cuda")
    y = library.embedding(desc, ids, host.cuda(), torch.float16)
    assert torch.equal(y[:6].cpu(), library.unpack(desc, host)[ids[:6].long().cpu()].half())
    assert y[6:].isnan().all()


@pytest.mark.parametrize(("rows", "n"), [(1, 1024), (16, 1024), (16, 8192), (64, 1024), (256, 1024)])
def test_a_captured_graph_replays_on_new_data(
    library: CudaLibrary, generator: torch.Generator, rows: int, n: int
) -> None:
    k = 2048
    desc = library.linear_desc(k, n, "i4", torch.bfloat16, 128, False)
    host = library.pack(desc, *int4_weights(n, k, 128, False, generator))
    packed, w = host.cuda(), library.unpack(desc, host).cuda()
    x = torch.randn(rows, k, device="cuda", generator=generator).bfloat16()
    y, workspace = poisoned((rows, n), torch.bfloat16), library.linear_workspace(desc, rows)
    library.linear(desc, x, packed, y=y, workspace=workspace)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        library.linear(desc, x, packed, y=y, workspace=workspace)
    for _ in range(3):
        x.copy_(torch.randn(rows, k, device="cuda", generator=generator))
        y.fill_(float("nan"))
        graph.replay()
        _check(y, x, w, None, extra=3)


@pytest.mark.parametrize("rows", [1, 8, 16, 32, 64])
def test_x_is_what_the_kernel_before_wrote(
    library: CudaLibrary, generator: torch.Generator, rows: int
) -> None:
    """The product starts while AddRMSNorm, which writes its x, still runs."""
    n, k = 8192, 4096
    desc = library.linear_desc(k, n, "i4", torch.bfloat16, 128)
    host = library.pack(desc, *int4_weights(n, k, 128, True, generator))
    packed, w = host.cuda(), library.unpack(desc, host).cuda()
    source = torch.randn(rows, k, device="cuda", generator=generator).bfloat16()
    weight = torch.ones(k, device="cuda")
    y, workspace = poisoned((rows, n), torch.bfloat16), library.linear_workspace(desc, rows)
    library.linear(desc, source, packed, y=y, workspace=workspace)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x, _ = library.add_rms_norm(source, None, weight, 1e-6)  # NaN until it is written
        library.linear(desc, x, packed, y=y, workspace=workspace)
    for _ in range(5):
        source.copy_(torch.randn(rows, k, device="cuda", generator=generator))
        y.fill_(float("nan"))
        graph.replay()
        _check(y, x, w, None, extra=3)
