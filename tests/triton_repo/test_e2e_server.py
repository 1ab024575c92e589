"""A server's life: starting, refusing to start, draining, dying."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from asking import Stream, eventually, expected, generate, grpc, idle, post, prompt_tensors
from served_model import SETTINGS

from enginebay.triton_repo import server as server_module
from enginebay.triton_repo.backend.control import ENVIRONMENT
from enginebay.triton_repo.backend.settings import ServingSettings
from enginebay.triton_repo.client import ClientError, generate_http
from enginebay.triton_repo.package import PackageConfig, package_repo
from enginebay.triton_repo.ports import free_ports
from enginebay.triton_repo.runtime.llm import LLM
from enginebay.triton_repo.scratch import Scratch
from enginebay.triton_repo.server import PortBusyError, ServerError, ServerOptions, TritonServer

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

SLOW = {"temperature": 0, "max_tokens": 4000, "ignore_eos": True}
SERVE = """
import sys
from pathlib import Path
from enginebay.triton_repo.server import ServerOptions, TritonServer
options = ServerOptions(drain_timeout=float(sys.argv[2]), ready_timeout=60)
with TritonServer(Path(sys.argv[1]), options) as server:
    urls = (server.http_url, server.grpc_url, server.metrics_url)
    print(server.pid, *server.worker_pids(), *urls, flush=True)
    server.run_until_signal()
"""


CLI = "import sys; from enginebay.cli.main import main; sys.exit(main())"
FREE_PORTS = ("--http-port=0", "--grpc-port=0", "--metrics-port=0")


class Served:
    """A server run by another process, as `enginebay serve` does."""

    def __init__(self, repository: Path, drain: float = 30) -> None:
        command = [sys.executable, "-c", SERVE, str(repository), str(drain)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline().split()
        assert len(line) == 5, self.process.communicate()[1]
        self.pid, self.worker = int(line[0]), int(line[1])
        self.http_url, self.grpc_url, self.metrics_url = line[2:]

    def gone(self) -> bool:
        return not (alive(self.pid) or alive(self.worker))

    def kill(self) -> None:
        for pid in (self.process.pid, self.pid, self.worker):
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.communicate()


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_sigterm_lets_requests_finish_and_refuses_new_ones(repository: Path, oracle: LLM) -> None:
    served = Served(repository)
    try:
        text = expected(oracle, "last words", 4000, ignore_eos=True)
        stream = Stream(served, prompt_tensors("last words", SLOW, stream=True))  # type: ignore[arg-type]
        pieces = [stream.next()]
        served.process.send_signal(signal.SIGTERM)
        time.sleep(1.0)
        with pytest.raises(ClientError):
            list(generate_http(served.http_url, "late", {"max_tokens": 2}))
        late = grpc(served, prompt_tensors("late"))  # type: ignore[arg-type]
        assert late[-1].error is not None
        while not pieces[-1].final:
            pieces.append(stream.next())
        assert "".join(piece.text for piece in pieces) == text
        stream.cancel()
        assert served.process.wait(30) == 0
        assert eventually(served.gone, 2)
    finally:
        served.kill()


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_during_start_up_leaves_nothing(
    repository: Path, tmp_path: Path, ending: signal.Signals
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", CLI, "serve", str(repository), *FREE_PORTS],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
    )
    base = tmp_path / f"enginebay-{os.getuid()}"
    assert eventually(lambda: any(base.glob("*/pid")), 20)
    (pid_file,) = base.glob("*/pid")
    server = int(pid_file.read_text())
    process.send_signal(ending)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 128 + ending
    assert ending.name in said
    assert not alive(server)
    assert list(base.iterdir()) == []


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGHUP])
def test_draining_has_a_limit_and_other_signals_end_it_as_well(
    repository: Path, ending: signal.Signals
) -> None:
    served = Served(repository, drain=1)
    try:
        stream = Stream(served, prompt_tensors("Go on", {**SLOW, "max_tokens": 8000}, stream=True))  # type: ignore[arg-type]
        stream.next()
        began = time.monotonic()
        served.process.send_signal(ending)
        while (response := stream.next(10)).error is None:
            assert not response.final
        assert response.error == "the server is stopping"
        assert served.process.wait(30) == 0
        assert time.monotonic() - began < 20
        assert eventually(served.gone, 2)
        stream.cancel()
    finally:
        served.kill()


def test_killing_the_parent_leaves_nothing(repository: Path) -> None:
    served = Served(repository)
    try:
        stream = Stream(served, prompt_tensors("Go on", SLOW, stream=True))  # type: ignore[arg-type]
        stream.next()
        environment = Path(f"/proc/{served.worker}/environ").read_text().split("\0")
        owner = Path(next(line for line in environment if line.startswith(ENVIRONMENT))).name
        served.process.kill()
        assert eventually(served.gone, 5)
        stream.cancel()

        def swept() -> bool:
            scratch = Scratch.create()  # what the next start does first
            scratch.release()
            names = {path.stem for path in scratch.folder.parent.iterdir()}
            names |= {path.name.split("_")[1] for path in Path("/dev/shm").glob("enginebay_*")}
            return owner not in names

        assert eventually(swept, 5)
    finally:
        served.kill()


def test_killing_the_server_ends_its_worker(repository: Path) -> None:
    served = Served(repository)
    try:
        os.kill(served.pid, signal.SIGKILL)
        assert served.process.wait(20) != 0
        assert eventually(served.gone, 5)
        assert "the Triton server ended" in served.process.communicate()[1]
    finally:
        served.kill()


def test_a_dead_worker_ends_the_server(repository: Path) -> None:
    with TritonServer(repository) as server:
        stream = Stream(server, prompt_tensors("Go on", SLOW, stream=True))
        stream.next()
        os.kill(server.worker_pids()[0], signal.SIGKILL)
        assert server.wait(10)
        while (response := stream.next(10)).error is None:
            pass
        assert response.error  # and not silence for ever
        stream.cancel()


def test_a_moved_repository_works_and_holds_its_own_code(
    served_engine: Path, oracle: LLM, tmp_path: Path
) -> None:
    engine = shutil.copytree(served_engine, tmp_path / "engine")
    package_repo(engine, tmp_path / "repo", PackageConfig(name="other", settings=SETTINGS, link=False))
    shutil.rmtree(engine)
    moved = (tmp_path / "repo").rename(tmp_path / "movéd here")
    modules = moved / "other" / "1" / "lib" / "enginebay" / "triton_repo" / "backend" / "surface.py"
    modules.write_text(modules.read_text().replace("text_input: missing", "packaged code speaking"))
    with TritonServer(moved) as server:
        answer = generate_http(server.http_url, "Hello", {**SLOW, "max_tokens": 20}, model="other")
        assert "".join(answer) == expected(oracle, "Hello", 20, ignore_eos=True)
        stream = Stream(server, prompt_tensors("x", stream=True)[1:], model="other")
        assert "packaged code speaking" in (stream.next().error or "")
        stream.cancel()


def test_a_broken_engine_is_not_ready_and_says_why(served_engine: Path, tmp_path: Path) -> None:
    package_repo(served_engine, tmp_path / "repo", PackageConfig(settings=SETTINGS, link=False))
    weights = tmp_path / "repo" / "llm" / "1" / "engine" / "weights.bin"
    weights.write_bytes(weights.read_bytes()[:-4096])
    with pytest.raises(ServerError, match=r"model 'llm' failed to load: .*weights\.bin: cut short"):
        TritonServer(tmp_path / "repo").start()
    with TritonServer(tmp_path / "repo", ServerOptions(exit_on_error=False)) as server:
        assert not server.ready()
        state, reason = server.model_states()["llm"]
        assert state == "UNAVAILABLE"
        assert "weights.bin: cut short" in reason


def test_a_bad_setting_is_named(served_engine: Path, tmp_path: Path) -> None:
    package_repo(served_engine, tmp_path / "repo", PackageConfig(settings=SETTINGS))
    config = tmp_path / "repo" / "llm" / "config.pbtxt"
    config.write_text(config.read_text().replace('string_value: "1024"', 'string_value: "many"'))
    with pytest.raises(ServerError) as caught:
        TritonServer(tmp_path / "repo").start()
    assert str(caught.value).endswith("parameter 'max_waiting': 'many' is not a whole number")


def test_a_busy_port_is_named_with_its_holder(repository: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        with pytest.raises(PortBusyError, match=rf"gRPC port {port} .*process {os.getpid()} .*--grpc-port"):
            TritonServer(repository, ServerOptions(grpc_port=port)).start()


def test_a_port_taken_at_the_last_moment_is_replaced(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        offers = [[held.getsockname()[1], *server_module.free_ports("127.0.0.1", 2)]]

        def free(address: str, count: int) -> list[int]:
            return offers.pop() if offers else free_ports(address, count)

        monkeypatch.setattr(server_module, "free_ports", free)
        with TritonServer(repository) as server:
            assert offers == []
            assert server.ready()


def test_requests_nobody_waits_for_are_given_up(served_engine: Path, tmp_path: Path) -> None:
    settings = ServingSettings(
        threads=1, num_blocks=1024, max_waiting=2, max_batch=2, unary_timeout_seconds=1
    )
    package_repo(served_engine, tmp_path / "repo", PackageConfig(settings=settings))
    with TritonServer(tmp_path / "repo") as server:
        answers: list[tuple[int, str]] = []
        body = {"text_input": "Go on", **SLOW, "max_tokens": 8000}

        def ask() -> None:
            answers.append(post(server, "generate", body))

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        late = [text for status, text in answers if "no answer within 1 s" in text]
        refused = [text for status, text in answers if "at most 4 may" in text]
        assert (len(late), len(refused)) == (4, 4), answers
        assert eventually(lambda: idle(server))
        assert generate(server, "Hello", max_tokens=2)["text_output"].startswith("Hello")
