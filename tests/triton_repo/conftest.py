"""One engine and one running server for all tests that only ask questions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import served_model

from enginebay.triton_repo.package import PackageConfig, package_repo
from enginebay.triton_repo.runtime.llm import LLM
from enginebay.triton_repo.runtime.ort_engine import EngineOptions
from enginebay.triton_repo.server import TritonServer


@pytest.fixture(scope="session")
def served_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return served_model.build(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="session")
def repository(served_engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository = tmp_path_factory.mktemp("triton") / "repo"
    package_repo(served_engine, repository, PackageConfig(settings=served_model.SETTINGS))
    return repository


@pytest.fixture(scope="session")
def server(repository: Path) -> Iterator[TritonServer]:
    with TritonServer(repository) as running:
        yield running


@pytest.fixture(scope="session")
def oracle(served_engine: Path) -> Iterator[LLM]:
    """The same engine without Triton."""
    with LLM.load(served_engine, options=EngineOptions(threads=1, num_blocks=1024)) as llm:
        yield llm
