"""A real model over the real server: what quickstart promises."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from enginebay.builder.build import BuildConfig, build_engine
from enginebay.export.exporter import export_model
from enginebay.triton_repo.client import generate_grpc, generate_http
from enginebay.triton_repo.package import package_repo
from enginebay.triton_repo.server import TritonServer

CHECKPOINT = Path(__file__).resolve().parents[2] / "build" / "models" / "smollm2"

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(
        not (CHECKPOINT / "config.json").is_file(),
        reason=f"not run: no {CHECKPOINT}; make quickstart fetches it",
    ),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    folder = tmp_path_factory.mktemp("smollm2")
    export_model(CHECKPOINT, folder / "exported")
    build_engine(folder / "exported", folder / "engine", BuildConfig(quant="int4"))
    package_repo(folder / "engine", folder / "repo")
    with TritonServer(folder / "repo") as running:
        yield running


def test_the_capital_of_france(server: TritonServer) -> None:
    question = "What is the capital of France?"
    for ask, url in ((generate_grpc, server.grpc_url), (generate_http, server.http_url)):
        answer = ask(url, question, {"temperature": 0, "max_tokens": 40}, chat=True)
        pieces = list(answer)
        assert len(pieces) > 1  # it streams
        assert "".join(pieces) == "The capital of France is Paris."
        assert answer.finish_reason == "stop"
        assert answer.tokens == 7
        assert answer.first_token_seconds is not None
        assert answer.tokens_per_second is not None
