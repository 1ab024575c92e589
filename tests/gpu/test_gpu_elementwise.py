"""AddRMSNorm and GatedActivation on the GPU against plugins/reference.py."""

from __future__ import annotations

import pytest
import torch
from cuda_library import ACTIVATIONS, CudaLibrary
from matrices import relative_error

from enginebay.plugins import reference

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
EPSILON = {torch.float32: 2.0**-20, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 8), (3, 576), (33, 4096), (512, 8192)])
def test_add_rms_norm(
    library: CudaLibrary, generator: torch.Generator, dtype: torch.dtype, rows: int, width: int
) -> None:
    x, residual = (torch.randn(rows, width, device="cuda", generator=generator).to(dtype) for _ in range(2))
    weight = 1 + 0.1 * torch.randn(width, device="cuda", generator=generator)
    for r in (residual, None):
        y, total = library.add_rms_norm(x, r, weight, 1e-5)
        added = x if r is None else (x.float() + r.float()).to(dtype)
        assert torch.equal(total, added)
        expected = reference.rms_norm(added.double().cpu().numpy(), weight.double().cpu().numpy(), 1e-5)
        assert relative_error(y.cpu(), torch.from_numpy(expected)) < EPSILON[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_activation(
    library: CudaLibrary, generator: torch.Generator, dtype: torch.dtype, activation: str
) -> None:
    for rows, width in ((1, 8), (7, 1536), (300, 14336)):
        x = 3 * torch.randn(rows, 2 * width, device="cuda", generator=generator).to(dtype)
        y = library.gated_activation(x, activation)
        sample = slice(0, 3)
        expected = reference.gated_activation(x[sample].double().cpu().numpy(), activation)
        assert relative_error(y[sample].cpu(), torch.from_numpy(expected)) < EPSILON[dtype]
        assert torch.isfinite(y).all()
