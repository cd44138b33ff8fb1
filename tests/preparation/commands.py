"""The real command line in processes of its own: started, watched and killed."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.small_runs import start_command

# VmHWM is a peak that the kernel keeps, so that only a process's last moments can be missed.
LOOK_SECONDS = 0.02


def kill_all(process: "subprocess.Popen[str]") -> None:
    """SIGKILL for the whole run, its workers too."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


@dataclass
class Ended:
    """What a run said and took."""

    code: int
    output: str
    errors: str
    seconds: float
    peaks: dict[int, int] = field(default_factory=dict)
    """Peak resident bytes of each process, by its id; where it was watched."""
    peak_together: int = 0
    """The largest sum of resident bytes seen at one moment."""


def run(arguments: Sequence[str], *, watched: bool = False) -> Ended:
    """Run it to its end; `watched`: see what memory it takes, for which a quarter of a core looks at all processes."""
    began = time.monotonic()
    process = start_command("prepare", *arguments)
    ended = Ended(0, "", "", 0.0)
    watch = threading.Thread(target=_watch, args=(process, ended))
    if watched:
        watch.start()
    ended.output, ended.errors = process.communicate()
    if watched:
        watch.join()
    ended.code, ended.seconds = process.returncode, time.monotonic() - began
    return ended


def _watch(process: "subprocess.Popen[str]", ended: Ended) -> None:
    while process.poll() is None:
        together = 0
        for member in session_members(process.pid):
            peak, present = _resident(member)
            ended.peaks[member] = max(ended.peaks.get(member, 0), peak)
            together += present
        ended.peak_together = max(ended.peak_together, together)
        time.sleep(LOOK_SECONDS)


def session_members(session: int) -> list[int]:
    """The processes of a session that live."""
    members = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()  # state, parent, group, session, …
            if int(fields[3]) == session and fields[0] != "Z":
                members.append(int(folder.name))
    return members


def _resident(process: int) -> tuple[int, int]:
    """Peak and present resident bytes of a process."""
    found = {"VmHWM": 0, "VmRSS": 0}
    with suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            name, _, rest = line.partition(":")
            if name in found:
                found[name] = int(rest.split()[0]) * 1024
    return found["VmHWM"], found["VmRSS"]
