"""The stages by their stable forms, on a tiny model: what each prints, keeps, refuses."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from enginebay.cli.main import main


def test_export_build_inspect_in_order(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exported, engine = tmp_path / "exported", tmp_path / "engine"
    assert main(["export", str(model), str(exported), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == 82_240
    assert (
        main(["build", str(exported), str(engine), "--target", "ort-cpu", "--quant", "int4", "--json"]) == 0
    )
    assert json.loads(capsys.readouterr().out)["recipe"] == "int4"
    for folder, kind in ((model, "Hugging Face model"), (exported, "exported model"), (engine, "engine")):
        assert main(["inspect", str(folder), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["kind"] == kind
        assert main(["inspect", str(folder)]) == 0
        assert kind in capsys.readouterr().out


def test_inspect_says_what_the_cache_holds(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exported, engine = tmp_path / "exported", tmp_path / "engine"
    tokens = tmp_path / "tokens.json"
    tokens.write_text(json.dumps([list(range(40))]))
    build = ["build", str(exported), str(engine), "--kv-cache", "int8", "--calibrate", str(tokens)]
    assert main(["export", str(model), str(exported)]) == main(build) == 0
    capsys.readouterr()
    assert main(["inspect", str(engine)]) == 0
    assert re.search(r"cache +paged int8, \d+ bytes a token", capsys.readouterr().out)


def test_a_dry_run_writes_nothing(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["export", str(model), "--dry-run"]) == 0
    said = capsys.readouterr()
    assert "would export" in said.err
    assert re.search(r"^ +2 x +24,576  F32 +64x96  model\.layers\.\*\.mlp\.down", said.out, re.MULTILINE)
    assert list(tmp_path.iterdir()) == []


def test_keep_does_nothing_until_something_changed(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exported, engine = tmp_path / "exported", tmp_path / "engine"
    export = ["export", str(model), str(exported), "--keep"]
    build = ["build", str(exported), str(engine), "--quant", "fp32", "--keep"]
    assert main(export) == main(build) == 0
    before = {path: path.stat().st_mtime_ns for path in [*exported.iterdir(), *engine.iterdir()]}
    capsys.readouterr()
    assert main(export) == main(build) == 0
    assert capsys.readouterr().err.count("kept") == 2
    assert before == {path: path.stat().st_mtime_ns for path in [*exported.iterdir(), *engine.iterdir()]}
    assert main([*build[:3], "--quant", "int4", "--keep"]) == 0
    assert "built" in capsys.readouterr().err
    with (engine / "weights.bin").open("r+b") as weights:
        weights.truncate(100)
    assert main([*build[:3], "--quant", "int4", "--keep"]) == 0
    assert "built" in capsys.readouterr().err


def test_weights_are_quantised_as_asked(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exported, engine = tmp_path / "exported", tmp_path / "engine"
    assert main(["export", str(model), str(exported)]) == 0
    tokens = tmp_path / "tokens.json"
    tokens.write_text(json.dumps([[1, 5, 9, 30, 2, 7] * 5] * 4))
    options = ["--quant", "int4-gptq", "--block", "32", "--symmetric", "--calibrate", str(tokens)]
    command = ["build", str(exported), str(engine), *options, "--override", "layers.0.*=i8", "--json"]
    capsys.readouterr()
    assert main(command) == 0
    layers = {layer["layer"]: layer for layer in json.loads(capsys.readouterr().out)["layers"]}
    assert layers["layers.0.attention.qkv"]["format"] == "i8"
    assert (layers["layers.1.attention.qkv"]["format"], layers["layers.1.attention.qkv"]["method"]) == (
        "i4.b32.sym",
        "gptq",
    )
    with pytest.raises(SystemExit) as caught:
        main([*command, "--override", "layers.0=i5"])
    assert caught.value.code == 2
    assert "weight format 'i5' is unknown" in capsys.readouterr().err
    assert main(["build", str(exported), str(engine), "--quant", "int8", "--block", "64"]) == 1
    assert "recipe int8 has no int4 or fp8 layers" in capsys.readouterr().err


def test_options_are_checked_before_there_is_anything_to_build(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check = ["build", str(tmp_path / "exported"), str(tmp_path / "engine"), "--check-only"]
    assert main([*check, "--quant", "int4"]) == 0
    assert capsys.readouterr().err == ""
    for options, words in (
        (["--quant", "int3"], "'int3' is unknown"),
        (["--quant", "int8", "--block", "64"], "recipe int8 has no int4 or fp8 layers"),
        (["--target", "abacus"], "target 'abacus' is unknown"),
        (["--kv-cache", "int3"], "kv cache 'int3' is unknown; there are auto, fp32"),
        (["--kv-cache", "tiers", "--cache-ages", "64,64"], "cache_ages are (64, 64)"),
        (["--max-batch", "0"], "max_batch is 0"),
        (["--calibrate", "my.txt"], "--quant int4 with --kv-cache auto looks at no text"),
    ):
        assert main([*check, *options]) == 1
        assert words in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_verify_prints_its_figures_and_judges_when_asked(
    model: Path, engine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verify = ["verify", str(engine), "--reference", str(model), "--tokens", "128", "--window", "64"]
    assert main([*verify, "--json", "--max-perplexity-ratio", "1.001"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["max_abs_logit_error"] < 1e-4
    assert figures["greedy_match"] == 1.0
    assert not figures["text"]
    assert {"mean_kl", "perplexity", "reference_perplexity"} <= set(figures)
    assert main([*verify, "--max-perplexity-ratio", "0.5"]) == 1
    assert "above 0.5" in capsys.readouterr().err


def test_bench_prints_rows(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(engine), "--json", "--batch", "1,3", "--prompt", "9", "--new", "5"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["batch"] for row in rows] == [1, 3]
    fields = {"batch", "prompt", "new", "prefill_tok_s", "decode_tok_s", "step_ms_p50", "peak_rss_mb"}
    assert fields <= set(rows[0])
    assert all(row["decode_tok_s"] > 0 for row in rows)


def test_bench_refuses_a_batch_beyond_the_engine(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(engine), "--batch", "5"]) == 1
    assert "batch 5" in capsys.readouterr().err


def test_generate_needs_a_tokenizer(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(engine), "hello"]) == 1
    assert "tokenizer.json" in capsys.readouterr().err


def test_keep_sees_a_tokenizer_that_came_later(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, exported, engine = tmp_path / "model", tmp_path / "exported", tmp_path / "engine"
    shutil.copytree(model, source)
    export = ["export", str(source), str(exported), "--keep"]
    build = ["build", str(exported), str(engine), "--quant", "fp32", "--keep"]
    assert main(export) == main(build) == 0
    assert "no tokenizer.json" in capsys.readouterr().err
    (source / "tokenizer.json").write_text("{}")
    assert main(export) == main(build) == 0
    assert "kept" not in capsys.readouterr().err
    assert (engine / "tokenizer.json").read_text() == "{}"


def test_serve_tells_an_engine_from_a_repository(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(engine)]) == 1
    assert "is an engine folder" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["127.0.0.1:9", "http://127.0.0.1:9"])
def test_a_client_without_a_server_says_how_to_start_one(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["client", "hello", "--url", url]) == 1
    words = capsys.readouterr().err
    assert url in words
    assert "enginebay serve" in words
