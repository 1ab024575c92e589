"""GPU tests: reported as not run, with the reason, where there is no GPU or no CUDA library."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cuda_library import CudaLibrary, library_path

HERE = Path(__file__).resolve().parent


def _why_not() -> str | None:
    if not torch.cuda.is_available():
        return "not run: no NVIDIA GPU (torch.cuda.is_available() is False)"
    if not library_path().is_file():
        return f"not run: no CUDA library at {library_path()}; python -m enginebay.plugins.build_cuda"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = _why_not()
    for item in items:
        if HERE in Path(item.path).parents:
            item.add_marker(pytest.mark.gpu)
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def library() -> CudaLibrary:
    return CudaLibrary()


@pytest.fixture
def generator(request: pytest.FixtureRequest) -> torch.Generator:
    """Fresh random numbers each session; the seed is printed with a failure."""
    seed = torch.seed() % 2**31
    print(f"seed {seed}")
    return torch.Generator(device="cuda").manual_seed(seed)
