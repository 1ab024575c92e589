"""Runs a server and leaves no process of it behind: `python supervise.py PID_FILE PROGRAM ARGUMENT...`

Whoever started this holds the other end of standard input. When that closes, however its holder ended, the
server and its workers are killed; when the server ends, its workers are. If this process itself is killed the
kernel kills the server. Exit status: the server's, or 128 and the signal's number.

Run by path in a bare interpreter (-I -S), so the standard library only. Linux.
"""

import contextlib
import ctypes
import os
import resource
import select
import signal
import sys
import types

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36
_POLL = 0.2
# Triton 2.51 copies an HTTP body of JSON to its thread's stack, about twice its size, and dies where that is
# too small: at the usual limit of 8 MiB, 4 MiB of JSON do it. Its threads take their size from the limit.
_STACK = 128 << 20


def _control_process(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def _start(command: list[str]) -> int:
    """The server's process id, which is its group's too: its workers stay in that group."""
    supervisor = os.getpid()
    child = os.fork()
    if child:
        return child
    try:
        os.setpgid(0, 0)
        _control_process(_PR_SET_PDEATHSIG, signal.SIGKILL)
        _, most = resource.getrlimit(resource.RLIMIT_STACK)
        stack = _STACK if most == resource.RLIM_INFINITY else min(_STACK, most)
        resource.setrlimit(resource.RLIMIT_STACK, (stack, most))
        if os.getppid() == supervisor:  # or it died before the request was made
            null = os.open(os.devnull, os.O_RDONLY)
            os.dup2(null, 0)
            os.execv(command[0], command)  # noqa: S606 (no shell is the point)
    except OSError as error:
        print(f"error: {command[0]}: {error}", file=sys.stderr, flush=True)
    os._exit(127)


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _supervise(pid_file: str, command: list[str]) -> int:
    _control_process(_PR_SET_CHILD_SUBREAPER, 1)  # so that workers without a server are reaped here
    server = _start(command)

    def pass_on(number: int, _frame: types.FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(server, number)

    signal.signal(signal.SIGTERM, pass_on)
    signal.signal(signal.SIGINT, pass_on)
    with open(pid_file + ".new", "w") as file:
        file.write(str(server))
    os.rename(pid_file + ".new", pid_file)
    status = None
    held = True
    while True:
        if held and select.select([0], [], [], _POLL)[0]:
            held = bool(os.read(0, 64))
            if not held:
                _kill_group(server)
        elif not held:
            select.select([], [], [], _POLL / 10)
        try:
            pid, result = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:  # all reaped
            assert status is not None
            return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)
        if pid == server:
            status = result
            held = False
            _kill_group(server)


if __name__ == "__main__":
    sys.exit(_supervise(sys.argv[1], sys.argv[2:]))
