"""The command line as a user meets it: help, exit status, errors in words, JSON that parses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from enginebay.cli import main as cli


def enginebay(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "enginebay.cli.main", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_status:
        cli.main([command, "--help"])
    assert exit_status.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: enginebay {command}")
    assert len(text.splitlines()) > 6


def test_help_shows_the_way_from_checkpoint_to_server() -> None:
    done = enginebay("--help")
    assert done.returncode == 0
    stages = [done.stdout.index(f"enginebay {stage} ") for stage in ("export", "build", "package", "serve")]
    assert stages == sorted(stages)


def test_wrong_usage_has_status_2_and_a_word() -> None:
    done = enginebay("build", "only-one-folder")
    assert done.returncode == 2
    assert "OUT" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("export", "nowhere", "out"), ("nowhere",)),
        (("build", "nowhere", "out"), ("nowhere", "enginebay export")),
        (("package", "nowhere", "repo"), ("nowhere", "enginebay build")),
        (("serve", "nowhere"), ("nowhere", "enginebay package")),
        (("inspect", "nowhere"), ("nowhere",)),
        (("generate", "nowhere", "hello"), ("nowhere", "enginebay build")),
        (("bench", "nowhere", "--json"), ("nowhere",)),
        (("client", "hello", "--url", "127.0.0.1:9", "--model", "llm"), ("127.0.0.1:9",)),
    ],
)
def test_what_cannot_be_done_is_said_in_one_breath(
    arguments: tuple[str, ...], words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = enginebay(*arguments)
    assert done.returncode == 1
    assert done.stderr.startswith("enginebay: ")
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_recipe_is_named_with_those_there_are(exported: Path, tmp_path: Path) -> None:
    done = enginebay("build", str(exported), str(tmp_path / "engine"), "--quant", "int3")
    assert done.returncode == 1
    assert "int3" in done.stderr
    assert "int4" in done.stderr
    assert not (tmp_path / "engine").exists()


@pytest.mark.parametrize("target", ["ort-cuda", "tensorrt", "tensorrt-rtx"])
def test_a_target_of_the_plan_says_why_not_yet(exported: Path, tmp_path: Path, target: str) -> None:
    done = enginebay("build", str(exported), str(tmp_path / "engine"), "--target", target)
    assert done.returncode == 1
    assert target in done.stderr
    assert "ort-cpu" in done.stderr


def test_doctor_says_what_is_missing_and_how_to_mend_it(tmp_path: Path) -> None:
    healthy = enginebay("doctor", "--json")
    assert healthy.returncode == 0, healthy.stdout
    found = {finding["name"]: finding for finding in json.loads(healthy.stdout)["findings"]}
    assert found["plugin library"]["ok"]
    without = enginebay("doctor", ENGINEBAY_PLUGIN_LIBRARY=str(tmp_path / "absent.so"))
    assert without.returncode == 1
    assert "absent.so" in without.stdout
    assert "make plugins" in without.stdout


def test_a_wrong_isa_is_said_at_load_and_by_doctor(engine: Path) -> None:
    words = "ENGINEBAY_ISA=nonsense is not one of baseline, avx2"
    generate = enginebay("generate", str(engine), "hello", ENGINEBAY_ISA="nonsense")
    assert generate.returncode == 1
    assert generate.stderr.startswith(f"enginebay: {words}")
    doctor = enginebay("doctor", "--json", ENGINEBAY_ISA="nonsense")
    assert doctor.returncode == 1
    findings = {finding["name"]: finding for finding in json.loads(doctor.stdout)["findings"]}
    assert findings["plugin library"]["detail"].startswith(words)
    assert findings["plugin library"]["fix"] == "unset ENGINEBAY_ISA"
