"""Becomes another program that dies with its parent: `python launch.py PARENT_PID PROGRAM ARGUMENT...`

Run by path in a bare interpreter (-I -S), so the standard library only. Linux.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h

if __name__ == "__main__":
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        sys.exit(f"prctl(PR_SET_PDEATHSIG): {os.strerror(error)}")
    if os.getppid() != int(sys.argv[1]):  # it died before the request was made
        sys.exit(1)
    os.execv(sys.argv[2], sys.argv[2:])  # noqa: S606 (no shell is the point)
