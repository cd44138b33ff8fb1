"""Processes of this program's own: which signals stop them, and that none outlives the one that started it."""

import ctypes
import multiprocessing
import os
import signal
import sys

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""What asks a run to save and to end."""
PR_SET_PDEATHSIG = 1  # prctl(2)


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, however that ends; to be called by the child.

    (The parent is the thread that started it: workers are started by a thread that lives as long as they work.)
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid != os.getppid():  # it ended before the kernel was told
        os.kill(os.getpid(), signal.SIGKILL)
