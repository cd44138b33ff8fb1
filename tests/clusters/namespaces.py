"""A machine inside this one: mounts, processes, network and host name of its own; all ends with its first process.

Needs root, and util-linux and iproute2.
"""

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from tests.patience import PATIENCE_SECONDS

KINDS = ("--mount", "--pid", "--net", "--uts")
READY = "ready"


def missing() -> str | None:
    """Why there can be no such machine here; None if there can."""
    if os.geteuid() != 0:
        return "namespaces need root"
    for program in ("unshare", "nsenter", "ip"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    tried = subprocess.run(["unshare", *KINDS, "--fork", "true"], capture_output=True, text=True, check=False)
    return None if tried.returncode == 0 else f"unshare fails here ({tried.stderr.strip()})"


class Namespaces:
    """Such a machine, while the block lasts.

    Args:
        setup: shell commands that its first process runs; it is there when they are done.
        environment: of that process, and of all that is run.
    """

    def __init__(self, setup: str, environment: dict[str, str]) -> None:
        self.environment = {**os.environ, **environment}
        script = f"set -e\nmount --make-rprivate /\n{setup}\necho {READY}\nexec sleep infinity"
        self._outer = subprocess.Popen(
            ["unshare", *KINDS, "--fork", "--kill-child", "--mount-proc", "bash", "-c", script],
            env=self.environment,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def __enter__(self) -> "Namespaces":
        assert self._outer.stdout is not None
        while (line := self._outer.stdout.readline().strip()) != READY:
            assert line or self._outer.poll() is None, "the machine was not set up"
        children = Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children")
        self._first = children.read_text().split()[0]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._outer.kill()  # --kill-child: the first process ends too, and with it all others
        self._outer.wait()

    def start(self, *command: str, environment: dict[str, str] | None = None) -> "subprocess.Popen[str]":
        """Start a program there, its output captured."""
        return subprocess.Popen(
            ["nsenter", f"--target={self._first}", *KINDS, f"--wd={Path.cwd()}", *command],
            env={**self.environment, **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *command: str) -> str:
        """What a program there prints."""
        process = self.start(*command)
        printed, errors = process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode == 0, (command, printed, errors)
        return printed.strip()

    def processes(self, words: Sequence[str]) -> list[int]:
        """Those there with all of some words in their command line or their environment, by their numbers outside."""
        found = []
        inside = os.readlink(f"/proc/{self._first}/ns/pid")
        for entry in Path("/proc").iterdir():
            try:
                if not entry.name.isdecimal() or os.readlink(entry / "ns/pid") != inside:
                    continue
                parts = [
                    *(entry / "cmdline").read_bytes().split(b"\0"),
                    *(entry / "environ").read_bytes().split(b"\0"),
                ]
            except OSError:  # it has just ended
                continue
            if all(word.encode() in parts for word in words):
                found.append(int(entry.name))
        return found
