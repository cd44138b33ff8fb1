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
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def end_with_owner() -> None:
    """`end_with_parent` for a process that `multiprocessing` spawned; it ends, too, if its owner has ended already."""
    end_with_parent()
    owner = multiprocessing.parent_process()
    if owner is None or owner.pid != os.getppid():
        os._exit(1)
