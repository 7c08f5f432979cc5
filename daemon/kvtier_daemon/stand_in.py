"""The service's main process while a disk hangs: `python -m kvtier_daemon.stand_in PID FD FD`.

A thread in an uninterruptible wait for a disk cannot be ended, and its process stays until the disk answers.
So the daemon names this process as its service's main one for that time. It passes signals on, and ends with
the daemon's exit status when the daemon sends it.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from typing import Final

from kvtier_daemon.notify import Notifier

PASSED_ON: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGABRT, signal.SIGQUIT)
LOOK_S: Final = 0.1
GIVE_BACK: Final = 255  # in place of an exit status: the daemon is the main process again


def main() -> None:
    daemon, told, _ = map(int, sys.argv[1:])
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    if os.fork():
        os._exit(0)  # so that the child belongs to the manager, which is notified of its end
    notifier = Notifier.from_environment()
    notifier.main_pid(os.getpid())
    while True:
        got = signal.sigtimedwait(PASSED_ON, LOOK_S)
        if got is not None:
            os.kill(daemon, got.si_signo)
        if select.select([told], [], [], 0)[0]:
            status = os.read(told, 1)
            if status and status[0] == GIVE_BACK:
                notifier.main_pid(daemon)
                os._exit(0)
            os._exit(status[0] if status else 1)


if __name__ == "__main__":
    main()
