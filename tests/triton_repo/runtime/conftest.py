"""Engines that are built once for all tests of this folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_engine import WIDE, build_tiny, export_tiny

EngineFolder = Callable[..., Path]


@pytest.fixture(scope="session")
def engine_folder(tmp_path_factory: pytest.TempPathFactory) -> EngineFolder:
    """engine_folder("int4") or engine_folder("fp32", "bf16"): an engine of the tiny model."""
    root = tmp_path_factory.mktemp("tiny")
    exported = export_tiny(root / "plain")
    wide = export_tiny(root / "wide", model=WIDE)
    built: dict[tuple[str, str, bool], Path] = {}

    def folder(quant: str, cache: str = "auto", *, wider: bool = False) -> Path:
        wider = wider or cache in ("int4", "tiers")
        key = (quant, cache, wider)
        if key not in built:
            built[key] = build_tiny(
                wide if wider else exported, root / f"{quant}-{cache}-{wider}", quant, cache
            )
        return built[key]

    return folder
