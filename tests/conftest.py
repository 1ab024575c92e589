"""What every test may rely on."""

from __future__ import annotations

import signal

# A process started by nohup or in a script's background ignores SIGHUP or SIGINT, and so would every program
# that a test starts to see how it ends.
for _number, _usual in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGTERM, signal.SIG_DFL),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, _usual)
