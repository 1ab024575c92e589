"""Output folders: what is never replaced, what happens when a run dies, and that nothing else is touched."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from enginebay.export.staging import obstacle, scratch_folder, staged


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "models" / "llama"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"years of work")
    return folder


@pytest.mark.parametrize(
    "out", ["models/llama", "models", ".", "/", "models/llama/..", "models/llama/../llama"]
)
def test_no_output_is_the_source_or_holds_it(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "which is read to make it" in str(obstacle(Path(out), source))
    assert "which is read to make it" in str(obstacle(Path(out), Path("models/llama")))


def test_no_output_is_the_current_folder(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    (here / "below").mkdir(parents=True)
    monkeypatch.chdir(here / "below")
    for out in (".", "..", "../../here"):
        assert "current folder" in str(obstacle(Path(out), source))


def test_no_output_is_a_link_or_a_file(source: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(source)
    assert f"is a link to {source}" in str(obstacle(tmp_path / "link", source))
    (tmp_path / "file").write_text("words")
    assert "is not a folder" in str(obstacle(tmp_path / "file", source))


def test_no_output_holds_what_the_source_links_to(source: Path, tmp_path: Path) -> None:
    """A cache of snapshots keeps the weights elsewhere and links to them."""
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    (source / "model.safetensors").rename(blobs / "abc")
    (source / "model.safetensors").symlink_to(blobs / "abc")
    assert "holds" in str(obstacle(blobs, source))


def test_folders_beside_and_below_the_source_are_outputs(source: Path, tmp_path: Path) -> None:
    (source / "exported").mkdir()
    for out in (tmp_path / "new", source / "exported", source.parent / "llama2"):
        assert obstacle(out, source) is None


def test_a_failed_block_leaves_what_stood_there(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "old").touch()

    def interrupted() -> None:
        with staged(out) as folder:
            (folder / "half").touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [path.name for path in out.iterdir()] == ["old"]
    with staged(out) as folder:
        (folder / "new").touch()
    assert [path.name for path in out.iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_leavings_of_a_killed_run_go_and_those_of_a_live_one_stay(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from enginebay.export.staging import staged\n"
        "with staged(Path(sys.argv[1])) as folder:\n"
        "    (folder / 'half').touch(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    out = tmp_path / "out"
    died = subprocess.run([sys.executable, "-c", code, str(out)], check=False)
    assert died.returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 1
    (tmp_path / ".out.partial-notes").mkdir()  # the user's
    with scratch_folder(tmp_path, ".out.partial-") as live:
        with staged(out):
            assert live.is_dir()
        assert live.is_dir()
    assert sorted(os.listdir(tmp_path)) == [".out.partial-notes", "out"]


def test_nobody_ever_finds_nothing_where_something_stood(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with staged(out) as folder:
        (folder / "number").write_text("-1")
    missing, done = [], threading.Event()

    def watch() -> None:
        while not done.is_set():
            if not out.exists():
                missing.append(out)

    watcher = threading.Thread(target=watch)
    watcher.start()
    for number in range(100):
        with staged(out) as folder:
            (folder / "number").write_text(str(number))
        assert (out / "number").read_text() == str(number)
    done.set()
    watcher.join()
    assert not missing
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    code = (
        "import numpy as np; from pathlib import Path; from enginebay.export.staging import staged\n"
        f"with staged(Path({str(tmp_path / 'out')!r})) as folder:\n"
        "    with (folder / 'weights').open('wb') as file: file.write(bytes(100_000))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, preexec_fn=limit
    )
    assert f"File too large: '{tmp_path / 'out'}'" in done.stderr
    assert not list(tmp_path.iterdir())
