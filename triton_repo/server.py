"""Runs a real Triton server over a model repository: starts it, waits until it is ready, stops it cleanly."""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from enginebay.triton_repo import serverlog
from enginebay.triton_repo.backend.control import DRAIN, DRAINED, ENVIRONMENT
from enginebay.triton_repo.install import ServerInstall, ServerNotFoundError, find_server
from enginebay.triton_repo.ports import PortBusyError, check_free, check_range, free_ports
from enginebay.triton_repo.scratch import Scratch

__all__ = [
    "PortBusyError",
    "ServerError",
    "ServerNotFoundError",
    "ServerOptions",
    "TritonServer",
    "find_server",
]

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SUPERVISOR = Path(__file__).with_name("supervise.py")
_EXIT_GRACE = 8.0  # seconds that Triton gets for its own shutdown, beside the draining
_IDLE_GRACE = 4.0  # when nothing is in flight; it takes some 3, and never ends while a gRPC stream is open
_MOST_SECONDS = 7 * 24 * 3600
_POLL = 0.1
_WATCH = 0.5
_LOOKS = 20
_ATTEMPTS = 3
_PORT_TAKEN = "already in use"


class ServerError(RuntimeError):
    """The server did not start or did not stay up. The message has its own words."""


@dataclass(frozen=True)
class ServerOptions:
    """How to run the server. A port of 0 takes a free one.

    ready_timeout  seconds to load the models in
    drain_timeout  seconds that requests in flight get to finish in when the server is stopped
    exit_on_error  False: stay up, not ready, where a model does not load
    log            where the server's output goes; None: a scratch file, quoted in errors
    """

    address: str = "127.0.0.1"
    http_port: int = 0
    grpc_port: int = 0
    metrics_port: int = 0
    ready_timeout: float = 300.0
    drain_timeout: float = 30.0
    exit_on_error: bool = True
    log: Path | None = None
    arguments: tuple[str, ...] = ()  # more of Triton's own

    def __post_init__(self) -> None:
        for port, purpose, option in self.ports:
            check_range(port, purpose, option)
        for name, seconds in (("ready_timeout", self.ready_timeout), ("drain_timeout", self.drain_timeout)):
            if not 0 <= seconds <= _MOST_SECONDS:
                raise ValueError(
                    f"{name}: {seconds} is out of range; it must be between 0 and {_MOST_SECONDS} seconds"
                )

    @property
    def ports(self) -> tuple[tuple[int, str, str], ...]:
        """Port, what it is for, and the option that chooses it."""
        return (
            (self.http_port, "HTTP", "--http-port"),
            (self.grpc_port, "gRPC", "--grpc-port"),
            (self.metrics_port, "metrics", "--metrics-port"),
        )


class TritonServer:
    """A server as a context manager: up and ready inside the `with`, gone after it.

    The server dies with this process, however that ends. `progress` hears what is being waited for.

        with TritonServer(repo) as server:
            requests.get(server.http_url + "/v2/models/llm")

    Starting raises ServerNotFoundError, PortBusyError, or ServerError with the lines of the log that say why.
    """

    def __init__(
        self,
        repository: Path,
        options: ServerOptions | None = None,
        *,
        install: ServerInstall | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        self.repository = repository
        self.options = options or ServerOptions()
        self._install = install
        self._progress = progress or (lambda _: None)
        self._scratch: Scratch | None = None
        self._process: subprocess.Popen[bytes] | None = None  # the supervisor
        self._pid = 0  # the server
        self._ended = threading.Event()
        self._reason = ""
        self._stopping = False
        self._loaded = False

    @property
    def http_url(self) -> str:
        return f"http://{self._host(self._ports[0])}"

    @property
    def grpc_url(self) -> str:
        """As gRPC clients want it: host:port."""
        return self._host(self._ports[1])

    @property
    def metrics_url(self) -> str:
        return f"http://{self._host(self._ports[2])}/metrics"

    @property
    def pid(self) -> int:
        assert self._pid, "the server has not been started"
        return self._pid

    @property
    def log_text(self) -> str:
        """What the server has said so far."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def worker_pids(self) -> list[int]:
        """The Python backend's workers: one for each model instance."""
        parents = {int(path.name): _stat(path / "stat")[1:2] for path in Path("/proc").glob("[0-9]*")}
        return sorted(pid for pid, parent in parents.items() if parent == [str(self.pid)])

    def start(self) -> Self:
        """Starts the server and returns once it is ready (or, without `exit_on_error`, once it has tried)."""
        if not self.repository.is_dir():
            raise ServerError(
                f"{self.repository}: no such folder; make a repository with 'enginebay package ENGINE REPO'"
            )
        install = self._install or find_server()
        free = any(port == 0 for port, _, _ in self.options.ports)
        for attempt in itertools.count(1):
            try:
                self._start(install)
            except ServerError as error:
                # Between our finding a port free and Triton's taking it somebody else may have.
                if not free or attempt == _ATTEMPTS or _PORT_TAKEN not in str(error):
                    raise
            else:
                break
        return self

    def _start(self, install: ServerInstall) -> None:
        self._ended = threading.Event()
        self._reason = ""
        self._stopping = False
        self._loaded = False
        self._ports = self._choose_ports()
        self._scratch = Scratch.create()
        self._log = self.options.log or self._scratch.folder / "server.log"
        try:
            self._spawn(install)
            self._wait_ready()
            self._loaded = True
        except BaseException:
            self.stop(drain=False)
            raise

    def stop(self, *, drain: bool = True) -> None:
        """Stops the server: new requests are refused, those in flight may finish (see `drain_timeout`).

        Returns when no process of it is left. Idempotent.
        """
        if self._scratch is None:
            return
        self._stopping = True
        process = self._process
        if process is not None:
            if drain and process.poll() is None:
                self._drain()
            self._kill()
            process.wait()
        self._scratch.release()
        self._scratch = None

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the server ends. False if it still runs after `timeout` seconds."""
        return self._ended.wait(timeout)

    def run_until_signal(self) -> None:
        """Blocks until SIGINT, SIGTERM or SIGHUP, then stops, draining; a second signal cuts that short.

        A SIGHUP that is ignored (nohup) stays ignored.

        ServerError if the server ends by itself. Main thread only.
        """
        signals = 0

        def note(_number: int, _frame: FrameType | None) -> None:
            nonlocal signals
            signals += 1
            if signals > 1:
                self._kill()

        heard = [
            number
            for number in _ENDING
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
        ]
        previous = {number: signal.signal(number, note) for number in heard}
        try:
            while not signals and not self._ended.wait(0.5):
                pass
            if not signals:
                raise ServerError(
                    f"the Triton server ended: {self._reason}\n{serverlog.summary(self.log_text)}"
                )
            self._progress("stopping: requests in flight may finish")
            self.stop()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def ready(self) -> bool:
        """Whether the server answers that it and all its models are ready."""
        return _get_status(f"{self.http_url}/v2/health/ready") == 200

    def model_states(self) -> dict[str, tuple[str, str]]:
        """Each model's state (READY, UNAVAILABLE, LOADING…) and the reason Triton gives for it."""
        url = f"{self.http_url}/v2/repository/index"
        request = urllib.request.Request(url, data=b"{}", method="POST")  # noqa: S310 (an http URL of ours)
        with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310
            index = json.load(answer)
        return {entry["name"]: (entry.get("state", ""), entry.get("reason", "")) for entry in index}

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _host(self, port: int) -> str:
        address = self.options.address
        reachable = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(address, address)  # noqa: S104 (compared only)
        return f"{reachable}:{port}"

    def _choose_ports(self) -> list[int]:
        wanted = self.options.ports
        for port, purpose, option in wanted:
            if port:
                check_free(self.options.address, port, purpose, option)
        free = iter(free_ports(self.options.address, len(wanted)))
        return [port or next(free) for port, _, _ in wanted]

    def _command(self, install: ServerInstall, scratch: Scratch) -> list[str]:
        options = self.options
        http, grpc, metrics = self._ports
        return [
            str(install.binary),
            f"--model-repository={self._link(scratch)}",
            f"--backend-directory={install.backend_folder(scratch.folder)}",
            f"--backend-config=python,shm-region-prefix-name={scratch.shared_memory_prefix}",
            *(f"--{kind}-address={options.address}" for kind in ("http", "grpc", "metrics")),
            f"--http-port={http}",
            f"--grpc-port={grpc}",
            f"--metrics-port={metrics}",
            "--allow-gpu-metrics=false",
            f"--exit-timeout-secs={math.ceil(options.drain_timeout + _EXIT_GRACE)}",
            f"--exit-on-error={str(options.exit_on_error).lower()}",
            *options.arguments,
        ]

    def _link(self, scratch: Scratch) -> Path:
        """The repository by a path without spaces and in ASCII: the Python backend does not quote it for its
        shell, and its interpreter knows no other characters (models/llm/1/model.py)."""
        link = scratch.folder / "repository"
        link.symlink_to(self.repository.resolve())
        return link

    def _spawn(self, install: ServerInstall) -> None:
        """Starts the server under a supervisor, which ends it when this process ends (supervise.py)."""
        assert self._scratch is not None
        scratch = self._scratch
        pid_file = scratch.folder / "pid"
        command = [sys.executable, "-I", "-S", str(_SUPERVISOR), str(pid_file)]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command + self._command(install, scratch),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**install.environment(), ENVIRONMENT: str(scratch.folder)},
                pass_fds=(scratch.lock,),
                start_new_session=True,
            )
        while not pid_file.exists():
            if self._process.poll() is not None:
                raise ServerError(f"{install.binary}: cannot be started: {self.log_text.strip()}")
            time.sleep(0.01)
        self._pid = int(pid_file.read_text())
        threading.Thread(target=self._watch, args=(self._process,), daemon=True).start()

    def _kill(self) -> None:
        """Ends the server at once, its workers too."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        """Follows the server to its end. A server whose worker died would leave its streams hanging for ever
        and still call itself ready, so it is ended too."""
        workers: list[int] = []
        dead: set[int] = set()
        for look in itertools.count():
            try:
                status = process.wait(_WATCH)
            except subprocess.TimeoutExpired:
                if not self._loaded or self._stopping:  # Triton starts and ends workers of its own accord
                    continue
                states = {pid: _stat(Path(f"/proc/{pid}/stat"))[:1] for pid in workers}
                if not all(states.values()) or not workers or look % _LOOKS == 0:
                    workers = self.worker_pids()  # looking through all of /proc takes a while
                # One that ended in order is dead for a moment, until Triton has taken note.
                found = {pid for pid, state in states.items() if state == ["Z"]}
                if found & dead:
                    self._reason = f"its Python worker, process {min(found & dead)}, died"
                    self._kill()
                dead = found
                continue
            self._reason = self._reason or f"exit status {status}"
            self._kill()
            self._ended.set()
            return

    def _wait_ready(self) -> None:
        began = time.monotonic()
        self._progress("starting the Triton server")
        while not self._ended.is_set():
            if self.ready():
                return
            if not self.options.exit_on_error and self._settled():
                return
            if time.monotonic() - began > self.options.ready_timeout:
                raise ServerError(
                    f"the Triton server was not ready after {self.options.ready_timeout:g} s\n"
                    + serverlog.summary(self.log_text)
                )
            time.sleep(_POLL)
            self._progress(f"loading the models, {time.monotonic() - began:.0f} s")
        raise ServerError(
            f"the Triton server did not start ({self._reason}):\n{serverlog.summary(self.log_text)}"
        )

    def _settled(self) -> bool:
        """Whether every model has been loaded or given up."""
        try:
            states = self.model_states()
        except OSError:
            return False
        return bool(states) and all(state in ("READY", "UNAVAILABLE") for state, _ in states.values())

    def _drain(self) -> None:
        """Triton's own shutdown lets requests finish but still takes new ones over gRPC, and may wait for
        streams that are idle. So the models are told too, and say when they are done (backend/control.py)."""
        assert self._scratch is not None
        folder = self._scratch.folder
        (folder / "asked").write_text(str(self.options.drain_timeout))
        (folder / "asked").rename(folder / DRAIN)
        os.kill(self._pid, signal.SIGTERM)
        deadline = time.monotonic() + self.options.drain_timeout + _EXIT_GRACE
        drained = False
        while time.monotonic() < deadline and not self._ended.wait(_POLL):
            if not drained and (folder / DRAINED).exists():
                drained = True
                deadline = min(deadline, time.monotonic() + _IDLE_GRACE)


def _stat(path: Path) -> list[str]:
    """The fields of a stat file after the process's name: state, parent, …; none where it is gone."""
    try:
        return path.read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _get_status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:  # noqa: S310 (an http URL of ours)
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0
