"""Ports, scratch folders, logs, the supervisor: the parts of a server's life that need no Triton."""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from enginebay.triton_repo import install, scratch, serverlog, supervise
from enginebay.triton_repo.install import ServerNotFoundError, find_server
from enginebay.triton_repo.ports import PortBusyError, check_free, free_ports
from enginebay.triton_repo.scratch import Scratch
from enginebay.triton_repo.server import ServerOptions


def test_free_ports_are_free_and_different() -> None:
    ports = free_ports("127.0.0.1", 5)
    assert len(set(ports)) == 5
    for port in ports:
        check_free("127.0.0.1", port, "HTTP", "--http-port")


def test_a_busy_port_names_holder_and_option() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        with pytest.raises(
            PortBusyError, match=rf"HTTP port {port} of 127\.0\.0\.1: .*process {os.getpid()} .*--http-port"
        ):
            check_free("127.0.0.1", port, "HTTP", "--http-port")


@pytest.mark.parametrize("port", [-1, 65536, 10**30])
@pytest.mark.parametrize("name", ["http", "grpc", "metrics"])
def test_ports_that_do_not_exist_are_refused_by_name(name: str, port: int) -> None:
    with pytest.raises(ValueError, match=rf"(?i){name} port {port} is out of range; --{name}-port .*65535"):
        ServerOptions(**{f"{name}_port": port})
    assert ServerOptions(**{f"{name}_port": 65535}).ports


@pytest.mark.parametrize("seconds", [-1.0, math.nan, math.inf, 1e300])
@pytest.mark.parametrize("name", ["drain_timeout", "ready_timeout"])
def test_times_that_nobody_can_wait_are_refused_by_name(name: str, seconds: float) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: .* out of range"):
        ServerOptions(**{name: seconds})


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(scratch.tempfile, "gettempdir", lambda: str(tmp_path))
    return tmp_path / f"enginebay-{os.getuid()}"


def region(owner: Scratch) -> Path:
    made = Path("/dev/shm") / f"{owner.shared_memory_prefix}test"
    made.write_bytes(b"x")
    return made


def test_scratch_of_a_dead_server_is_swept_with_its_shared_memory(base: Path) -> None:
    dead, living = Scratch.create(), Scratch.create()
    lost, kept = region(dead), region(living)
    os.close(dead.lock)  # as the kernel does for the killed
    new = Scratch.create()
    assert not dead.folder.exists()
    assert not lost.exists()
    assert living.folder.exists()
    assert kept.exists()
    for owner in (living, new):
        owner.release()
    assert not kept.exists()
    assert list(base.iterdir()) == []


def test_scratch_is_kept_while_a_child_holds_the_lock(base: Path) -> None:
    owner = Scratch.create()
    child = subprocess.Popen(["sleep", "60"], pass_fds=(owner.lock,))
    owner.release(timeout=0.1)
    assert owner.folder.exists()
    child.kill()
    child.wait()
    Scratch.create().release()
    assert not owner.folder.exists()


def test_a_sweep_that_was_cut_short_is_finished_by_the_next(base: Path) -> None:
    dead = Scratch.create()
    (dead.folder / "backends").mkdir()
    os.close(dead.lock)
    for item in dead.folder.iterdir():
        item.rmdir()  # as far as the killed sweep got
    Scratch.create().release()
    assert list(base.iterdir()) == []


def test_scratch_refuses_a_folder_by_another_hand(base: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    base.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="belongs to another user"):
        Scratch.create()


@pytest.mark.parametrize("name", ["with space", "accentué", "$(quoted)"])
def test_scratch_keeps_away_from_paths_that_triton_cannot_handle(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = tmp_path / name
    odd.mkdir()
    monkeypatch.setattr(scratch.tempfile, "gettempdir", lambda: str(odd))
    monkeypatch.setattr(scratch, "_FALLBACK", str(tmp_path))
    made = Scratch.create()
    assert made.folder.parent == tmp_path / f"enginebay-{os.getuid()}"
    made.release()
    assert list(odd.iterdir()) == []


LOG = "\n".join(
    [
        'I1130 10:00:00.000000 1 model_lifecycle.cc:472] "loading: llm:1"',
        "E1130 10:00:01.000000 1 model_lifecycle.cc:642] \"failed to load 'llm' version 1: Internal: "
        r'ManifestError: a.json: wrong\nb.bin: cut short\n\nAt:\n  /x/manifest.py(261): check\n"',
        "I1130 10:00:01.000001 1 model_lifecycle.cc:777] \"failed to load 'llm'\"",
        "E1130 10:00:01.000002 1 model_repository_manager.cc:1460] \"Poll failed for model directory 'odd': "
        'Invalid model name"',
        "error: creating server: Internal - failed to load all models",
        "",
    ]
)


def test_a_log_is_boiled_down_to_what_the_models_said() -> None:
    assert serverlog.summary(LOG) == (
        "model 'llm' failed to load: a.json: wrong\nb.bin: cut short\n"
        "model 'odd' failed to load: Invalid model name"
    )
    assert serverlog.summary("E0101 something broke\nI0101 fine\n") == "E0101 something broke"
    assert serverlog.summary("one\ntwo\n") == "one\ntwo"
    assert serverlog.summary("") == "(it wrote no log)"


def test_a_missing_server_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ServerNotFoundError, match="no such executable"):
        find_server(tmp_path / "tritonserver")
    binary = tmp_path / "bin" / "tritonserver"
    binary.parent.mkdir()
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o755)
    with pytest.raises(ServerNotFoundError, match=r"Python backend .* is missing"):
        find_server(binary)
    stub = tmp_path / "backends" / "python" / "triton_python_backend_stub"
    stub.parent.mkdir(parents=True)
    stub.touch()
    monkeypatch.setenv("PATH", str(binary.parent))
    assert find_server().binary == find_server(binary).binary == binary
    assert find_server().backend_folder(tmp_path / "unused") == tmp_path / "backends"
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(install.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ServerNotFoundError, match=r"pip install 'enginebay\[triton\]'"):
        find_server()


# A server that starts a worker, tells both process ids and then does as it is told.
FAMILY = """
import os, sys, time
if os.fork() == 0:
    time.sleep(60)
print(os.getpid(), flush=True)
exec(sys.argv[1])
"""


class Family:
    def __init__(self, folder: Path, behaviour: str) -> None:
        command = [sys.executable, "-I", "-S", supervise.__file__, str(folder / "pid")]
        self.supervisor = subprocess.Popen(
            [*command, sys.executable, "-c", FAMILY, behaviour],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.supervisor.stdout is not None
        self.server = int(self.supervisor.stdout.readline())
        assert int((folder / "pid").read_text()) == self.server

    def left(self) -> list[int]:
        """Processes of the server's group, dead ones that nobody reaped included."""
        found = []
        for entry in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = entry.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[2]) == self.server:
                found.append(int(entry.parent.name))
        return found


def test_the_supervisor_passes_the_status_on_and_ends_the_workers(tmp_path: Path) -> None:
    family = Family(tmp_path, "sys.exit(7)")
    assert family.supervisor.wait(10) == 7
    assert family.left() == []


def test_the_supervisor_ends_all_when_its_holder_goes(tmp_path: Path) -> None:
    family = Family(tmp_path, "time.sleep(60)")
    assert len(family.left()) == 2
    assert family.supervisor.stdin is not None
    family.supervisor.stdin.close()
    assert family.supervisor.wait(10) == 128 + signal.SIGKILL
    assert family.left() == []


def test_the_supervisor_passes_sigterm_on(tmp_path: Path) -> None:
    family = Family(tmp_path, "import signal; signal.signal(15, lambda *_: sys.exit(3)); time.sleep(60)")
    time.sleep(0.3)
    family.supervisor.terminate()
    assert family.supervisor.wait(10) == 3
    assert family.left() == []


def test_the_server_dies_with_its_supervisor(tmp_path: Path) -> None:
    family = Family(tmp_path, "time.sleep(60)")
    time.sleep(0.3)
    (worker,) = set(family.left()) - {family.server}
    family.supervisor.kill()
    family.supervisor.wait()
    deadline = time.monotonic() + 10
    while family.server in family.left() and time.monotonic() < deadline:
        state = Path(f"/proc/{family.server}/stat").read_text().rpartition(")")[2].split()[0]
        if state == "Z":
            break
        time.sleep(0.05)
    else:
        assert family.server not in family.left()
    os.kill(worker, signal.SIGKILL)  # a worker of ours notices by itself (backend/control.py); sleep does not


def test_a_program_that_cannot_start_says_so(tmp_path: Path) -> None:
    command = [sys.executable, "-I", "-S", supervise.__file__, str(tmp_path / "pid"), "/no/such/program"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert "/no/such/program" in process.stderr.read()
    assert process.wait(20) == 127
