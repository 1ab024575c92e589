"""The kernel library, as it is and held back to each instruction set this processor has."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from enginebay.plugins.load import KernelLibrary, PluginError, library_path

ISAS = ("baseline", "avx2", "avx512", "avx512vnni", "amx")


@pytest.fixture(scope="session")
def library() -> KernelLibrary:
    return KernelLibrary()


@pytest.fixture(scope="session")
def library_at(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], KernelLibrary]:
    """The library as it behaves under ENGINEBAY_ISA: a copy of its own, since it asks once per load."""
    loaded: dict[str, KernelLibrary] = {}

    def load(isa: str) -> KernelLibrary:
        if isa not in loaded:
            copy = Path(shutil.copy(library_path(), tmp_path_factory.mktemp(isa) / "libenginebay_cpu.so"))
            before = os.environ.get("ENGINEBAY_ISA")
            os.environ["ENGINEBAY_ISA"] = isa
            try:
                held_back = KernelLibrary(copy)
                one = np.ones((1, 1), np.float32)
                held_back.run_add_rms_norm(one, one, one[0], 0.0)
                loaded[isa] = held_back
            finally:
                os.environ.pop("ENGINEBAY_ISA")
                if before is not None:
                    os.environ["ENGINEBAY_ISA"] = before
        return loaded[isa]

    return load


@pytest.fixture(scope="session", params=["baseline", "avx2", "avx512"])
def isa_library(request: pytest.FixtureRequest, library_at: Callable[[str], KernelLibrary]) -> KernelLibrary:
    """The library at each level whose float kernels differ; what this processor lacks does not run."""
    try:
        return library_at(request.param)
    except PluginError as error:
        pytest.skip(f"not run here: {error}")
