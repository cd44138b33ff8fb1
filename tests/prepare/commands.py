"""The real command line in processes of its own: started and killed."""

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tests.small_runs import start_command


def kill_all(process: "subprocess.Popen[str]") -> None:
    """SIGKILL for the whole run, its workers too."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


class Ended(NamedTuple):
    """What a run said."""

    code: int
    output: str
    errors: str


def run(arguments: Sequence[str]) -> Ended:
    """Run it to its end."""
    process = start_command("prepare", *arguments)
    output, errors = process.communicate()
    return Ended(process.returncode, output, errors)


def session_members(session: int) -> list[int]:
    """The processes of a session that live."""
    members = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()  # state, parent, group, session, …
            if int(fields[3]) == session and fields[0] != "Z":
                members.append(int(folder.name))
    return members
