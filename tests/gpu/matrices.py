"""Random weights and how far an answer is from a float64 one."""

from __future__ import annotations

import torch


def int4_weights(
    n: int, k: int, block: int, symmetric: bool, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(values 0..15 uint8 [n, k], scales [n, k/block], minimums or None) on the host."""
    device = generator.device
    values = torch.randint(0, 16, (n, k), dtype=torch.uint8, device=device, generator=generator)
    scales = 0.01 + 0.02 * torch.rand(n, k // block, device=device, generator=generator)
    minimums = None
    if not symmetric:
        minimums = (-scales * (6 + 4 * torch.rand(n, k // block, device=device, generator=generator))).cpu()
    return values.cpu(), scales.cpu(), minimums


def relative_error(y: torch.Tensor, expected: torch.Tensor) -> float:
    """The worst row's |y - expected| / |expected|; NaN never passes a comparison."""
    difference = torch.linalg.vector_norm(y.double() - expected.double(), dim=-1)
    size = torch.linalg.vector_norm(expected.double(), dim=-1)
    return float((difference / size.clamp_min(1e-30)).max())
