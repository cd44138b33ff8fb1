"""This program's own processes: which signals stop them, and how none outlives the one that started it."""

import ctypes
import multiprocessing
import os
import signal
import sys

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""The signals that ask a run to save and stop."""
PR_SET_PDEATHSIG = 1  # prctl(2)


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, however that ends; to be called by the child.

    (The parent is the thread that started it: workers are started by a thread that lives as long as they work.)
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def end_with_owner() -> None:
    """`end_with_parent` for a process that `multiprocessing` spawned; it also ends if its owner has already ended."""
    end_with_parent()
    owner = multiprocessing.parent_process()
    if owner is None or owner.pid != os.getppid():
        os._exit(1)
