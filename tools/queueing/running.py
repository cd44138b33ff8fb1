"""Runs one part: its commands, within its limit, and until a signal comes; and keeps what came of it.

A part's folder has `part.json` once it has ended, however it ended. A command is asked to end by SIGTERM, with all
that it started in its session, and ended by SIGKILL after the part's grace.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from megatron_fanformer.durable_files import write_atomically
from megatron_fanformer.processes import usable_cores
from queueing.record import ROOT, Command, Figure, Part, Setting

RESULT = "part.json"
POLL_SECONDS = 0.05

DONE = "done"
GOES_ON = "goes on in the next call"
AT_LIMIT = "FAILED: ended at its limit"
INTERRUPTED = "interrupted"


@dataclass(kw_only=True)
class Result:
    """How a part ended, and its figures."""

    part: str
    decides: str
    status: str
    seconds: float = 0.0
    """Of all calls, where it goes on from one to the next."""
    ended: str = ""
    """UTC."""
    commit: str = ""
    rehearsed: bool = False
    figures: list[Figure] = field(default_factory=list)

    @property
    def has_failed(self) -> bool:
        """Whether it did not do what it should; a goal that is not met is a result."""
        return self.status.startswith("FAILED")


def read_result(folder: Path) -> Result | None:
    """What an earlier call has left in a part's folder."""
    try:
        values = json.loads((folder / RESULT).read_text())
    except (OSError, ValueError):
        return None
    values["figures"] = [Figure(**each) for each in values["figures"]]
    return Result(**values)


def write_result(folder: Path, result: Result) -> None:
    """Keep it, once it is on the disk."""
    write_atomically(folder / RESULT, json.dumps(asdict(result), indent=1) + "\n")


def run_part(
    part: Part,
    setting: Setting,
    environment: dict[str, str],
    *,
    seconds: float,
    before: float = 0.0,
    commit: str,
    stopped: Callable[[], bool],
) -> Result:
    """Run a part to its end, its limit or a signal, and keep its result.

    Args:
        environment: of its commands, without their own variables.
        seconds: its limit in this call.
        before: seconds that it has had in earlier calls.
        stopped: whether a signal has come.
    """
    folder = setting.folder
    if not before:
        for path in (folder, *(part.clears(setting) if part.clears else [])):
            shutil.rmtree(path, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    deadline = started + seconds - part.closing_seconds
    status = _run(part, part.commands(setting), folder, environment, deadline, stopped)
    if part.closing is not None:
        closed = _run(
            part, part.closing(setting), folder, environment, time.monotonic() + part.closing_seconds, lambda: False
        )
        status = status if status != DONE else closed
    for path in part.kept(setting) if part.kept else []:
        if path.is_file():
            shutil.copy2(path, folder / path.name)
    result = Result(
        part=part.name,
        decides=part.decides,
        status=GOES_ON if status == AT_LIMIT and part.least_minutes is not None else status,
        seconds=before + time.monotonic() - started,
        ended=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%MZ"),
        commit=commit,
        rehearsed=setting.rehearses,
        figures=part.outcome(setting),
    )
    write_result(folder, result)
    return result


def _run(
    part: Part,
    commands: Sequence[Command],
    folder: Path,
    environment: dict[str, str],
    deadline: float,
    stopped: Callable[[], bool],
) -> str:
    """Run commands one after the other, up to the first that fails, or all at once; returns how that ended."""
    waiting, running = list(commands), dict[str, subprocess.Popen[bytes]]()
    most = usable_cores() if part.at_once else 1
    failures: list[str] = []
    while waiting or running:
        if stopped() or time.monotonic() > deadline:
            _end(list(running.values()), part.grace_seconds)
            return INTERRUPTED if stopped() else AT_LIMIT
        while waiting and len(running) < most:
            command = waiting.pop(0)
            running[command.name] = _start(command, folder, environment)
        for name, process in list(running.items()):
            if (code := process.poll()) is not None:
                _kill(process)  # what it has left behind
                del running[name]
                failures += [f"{name} ended with exit code {code}"] if code else []
        if failures and not part.at_once:
            break
        time.sleep(POLL_SECONDS)
    return f"FAILED: {'; '.join(failures)}" if failures else DONE


def _start(command: Command, folder: Path, environment: dict[str, str]) -> "subprocess.Popen[bytes]":
    with (
        (folder / f"{command.name}.log").open("ab") as log,
        (folder / (command.output or f"{command.name}.log")).open("ab") as output,
    ):
        return subprocess.Popen(
            [sys.executable, *command.arguments],
            env={**environment, **command.variables},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=log,
            cwd=ROOT,
            start_new_session=True,
        )


def _end(processes: "list[subprocess.Popen[bytes]]", grace_seconds: float) -> None:
    for process in processes:
        _signal(process, signal.SIGTERM)
    until = time.monotonic() + grace_seconds
    while any(process.poll() is None for process in processes) and time.monotonic() < until:
        time.sleep(POLL_SECONDS)
    for process in processes:
        _kill(process)


def _kill(process: "subprocess.Popen[bytes]") -> None:
    _signal(process, signal.SIGKILL)
    process.wait()


def _signal(process: "subprocess.Popen[bytes]", number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # none of its session is left
        os.killpg(process.pid, number)


def environment_of(sites: Sequence[Path], *, hides_gpu: bool = False, stand_in: bool = False) -> dict[str, str]:
    """The environment of a part's commands: this checkout first, then the unpacked packages, then what there was."""
    found: dict[str, Any] = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    paths = [str(ROOT), *map(str, sites), *filter(None, [os.environ.get("PYTHONPATH")])]
    # Transformer Engine finds CUDA's libraries where pip put them beside torch.
    folders = {path for entry in [*map(str, sites), *sys.path] for path in Path(entry or ".").glob("nvidia/*/lib")}
    libraries = [*sorted(map(str, folders)), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    found |= {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    found |= {"LD_LIBRARY_PATH": os.pathsep.join(libraries)} if libraries else {}
    if hides_gpu:
        found["CUDA_VISIBLE_DEVICES"] = ""
    elif stand_in:
        found["CUDA_VISIBLE_DEVICES"] = "0"
    return found
