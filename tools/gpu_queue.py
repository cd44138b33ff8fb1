"""Run the checks and measurements for a GPU, part by part in order of importance, each within a time limit.

    python tools/gpu_queue.py --list
    python tools/gpu_queue.py --site SITE --minutes 25        # on a machine with a GPU; again to go on
    python tools/gpu_queue.py --only machine tests            # these, and what they need
    python tools/gpu_queue.py --rehearse                      # on a CPU: small sizes, a stand-in for Transformer Engine

The output folder has report.md (figures, goals, whether they are met, seconds) and a folder for each part with
`part.json`, logs and files. A part that is done is not run again; one for which too little time is left is skipped. At
its limit, a command and all processes of its session get SIGTERM, and SIGKILL after 40 s. The exit code is 1 if a part
failed, and 5 after a signal, which ends the running part; the report is still written. docs/gpu.md has more.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path

# Before an installed one: the queue measures this checkout.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from queueing.parts import PARTS, ROOT, Command, Part, Setting, rule_of

from megatron_fanformer import markdown
from megatron_fanformer.durable_files import write_atomically
from megatron_fanformer.errors import Interrupted
from megatron_fanformer.processes import STOP_SIGNALS, signals_to, usable_cores

PATIENCE = 10  # factor of the limits in a rehearsal
STAND_IN = (Path(sys.prefix) / "engine", ROOT / "tests" / "engine_on_cpu" / "site")
RESULT, REPORT = "part.json", "report.md"
DONE, GOES_ON, INTERRUPTED = "done", "goes on in the next call", "interrupted"
GRACE_SECONDS = 40
POLL_SECONDS = 0.05


@dataclass(kw_only=True)
class Result:
    """The status of a part, and its figures: name, value, rule, verdict."""

    status: str
    seconds: float = 0.0
    """The sum over all calls in which the part ran."""
    ended: str = ""
    """The time of the end in UTC, and the commit."""
    rehearsed: bool = False
    figures: list[list[str]] = field(default_factory=list)

    @property
    def has_failed(self) -> bool:
        """Return whether the part failed; a goal that is not met is no failure."""
        return self.status.startswith("FAILED")


def main(arguments: Sequence[str] | None = None, parts: Sequence[Part] = PARTS) -> int:
    """Run the parts; return the exit code."""
    options = _options(arguments, parts)
    if options.list:
        print("\n".join(_listed(part) for part in parts))
        return 0
    output = options.output or ROOT / ("runs/gpu-queue-rehearsal" if options.rehearse else "runs/gpu-queue")
    output.mkdir(parents=True, exist_ok=True)
    signals: list[signal.Signals] = []
    queue = Queue(parts, options, output.resolve(), signals)
    with signals_to(lambda number: signals.append(number) if number in STOP_SIGNALS else None):
        for part in queue.chosen:
            if not signals:
                queue.take(part)
    print(f"\n{queue.page()}\n{output / REPORT}")
    if signals:
        return Interrupted.exit_code
    return 1 if any(result.has_failed for result in queue.taken.values()) else 0


def _options(arguments: Sequence[str] | None, parts: Sequence[Part]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="list the parts, and end")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[part.name for part in parts])
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, with small sizes")
    parser.add_argument("--minutes", type=float, metavar="N", help="leave out what does not end within them")
    parser.add_argument("--site", type=_folder, action="append", metavar="FOLDER", help="of unpacked packages")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="(runs/gpu-queue, or -rehearsal)")
    parser.add_argument("--again", action="store_true", help="run also what is done; with --only, of these")
    return parser.parse_args(arguments)


def _folder(text: str) -> Path:
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text} is no folder; name unpacked packages")
    return Path(text).resolve()


def _listed(part: Part) -> str:
    lines = [f"{part.name}  ({part.minutes:g} minutes at most)", f"    {part.decides}"]
    lines += [f"    - {goal['name']}: {rule_of(goal)}" for goal in part.goals]
    return "\n".join(lines + ([f"    needs {', '.join(part.needs)}"] if part.needs else []))


class Queue:
    """The parts of one call, and their results.

    Args:
        signals: filled by the handlers of this process.
    """

    def __init__(
        self, parts: Sequence[Part], options: argparse.Namespace, output: Path, signals: list[signal.Signals]
    ) -> None:
        self._parts = {part.name: part for part in parts}
        self._options, self._output, self._signals = options, output, signals
        self._until = time.monotonic() + 60 * options.minutes if options.minutes else float("inf")
        self.taken: dict[str, Result] = {}

    @property
    def chosen(self) -> list[Part]:
        """Return the requested parts and all parts that they need, in the order of the table."""
        wanted = set(self._options.only or self._parts)
        for part in reversed(self._parts.values()):  # parts follow those that they need
            if part.name in wanted:
                wanted.update(part.needs)
        return [part for part in self._parts.values() if part.name in wanted]

    def take(self, part: Part) -> None:
        """Run a part and print its result, unless it is done, lacks time, or needs a part that is not done."""
        is_again = self._options.again and part.name in (self._options.only or self._parts)
        earlier = None if is_again else self._earlier(part)
        before = earlier.seconds if earlier and earlier.status == GOES_ON else 0.0
        limit = 60 * part.minutes * (PATIENCE if self._options.rehearse else 1) - before
        left = self._until - time.monotonic()
        unmet = [name for name in part.needs if name not in self.taken or self.taken[name].status != DONE]
        if earlier and not part.is_repeated and (earlier.status == DONE or limit <= 0):
            self._keep(part, earlier, "kept")
        elif unmet:
            self._leave_out(part, earlier, f"it needs {', '.join(unmet)}")
        elif left < (60 if part.goes_on else limit):
            self._leave_out(part, earlier, f"it takes {limit / 60:.1f} minutes, and {max(0, left) / 60:.1f} are left")
        else:
            seconds = min(limit, left)
            print(f"{part.name}: {part.decides}; at most {seconds:.0f} s", flush=True)
            result = self._run(part, seconds, before)
            self._keep(part, result, f"{result.seconds:.0f} s, {result.status}")

    def page(self) -> str:
        """Return the report on all parts that have a result, from this call or an earlier one."""
        lines = ["# Results of the queue", ""]
        lines += ["A rehearsal: no figure of speed is judged.", ""] if self._options.rehearse else []
        if (machine := self._output / "machine" / "machine.json").is_file():
            text = ", ".join(f"{name} {value}" for name, value in json.loads(machine.read_text()).items())
            lines += [markdown.as_text(text), ""]
        rows = []
        for part in self._parts.values():
            if (result := self.taken.get(part.name) or self._earlier(part)) is None:
                continue
            decides, ended = markdown.as_text(part.decides), f"{result.seconds:.0f} s, {result.ended}".rstrip(", ")
            rows.append([part.name, decides, markdown.as_text(result.status), "", "", ended])
            rows += [
                [part.name, "", *map(markdown.as_text, (f"{name}: {value}", rule, verdict)), ""]
                for name, value, rule, verdict in result.figures
            ]
        return "\n".join([*lines, markdown.table(["part", "decides", "figure", "goal", "met", "ended"], rows), ""])

    def _leave_out(self, part: Part, earlier: Result | None, reason: str) -> None:
        self._keep(part, earlier or Result(status=f"left out: {reason}"), reason)

    def _keep(self, part: Part, result: Result, how: str) -> None:
        self.taken[part.name] = result
        print(f"{part.name}: {how}", flush=True)
        for name, value, rule, verdict in result.figures:
            print(f"    {name}: {value} ({rule}: {verdict})", flush=True)
        write_atomically(self._output / REPORT, self.page())

    def _earlier(self, part: Part) -> Result | None:
        """Return a part's result of an earlier call, if that was a rehearsal just as this call is, or None."""
        try:
            result = Result(**json.loads((self._output / part.name / RESULT).read_text()))
        except (OSError, ValueError, TypeError):
            return None
        return result if result.rehearsed == self._options.rehearse else None

    def _run(self, part: Part, seconds: float, before: float) -> Result:
        """Run a part until its end, its limit or a signal; write and return the result."""
        setting = Setting(self._output / part.name, self._options.rehearse)
        if not before:
            shutil.rmtree(setting.folder, ignore_errors=True)
        setting.folder.mkdir(parents=True, exist_ok=True)
        started = time.monotonic()
        status = self._run_commands(part, setting, started + seconds)
        for path in (ROOT / setting.resolve(name) for name in part.kept):
            if path.is_file():
                shutil.copy2(path, setting.folder / path.name)
        result = Result(
            status=status,
            seconds=before + time.monotonic() - started,
            ended=f"{datetime.now(timezone.utc):%Y-%m-%dT%H:%MZ} at {_commit()}",
            rehearsed=setting.rehearses,
            figures=part.judged(setting),
        )
        write_atomically(setting.folder / RESULT, json.dumps(asdict(result), indent=1) + "\n")
        return result

    def _run_commands(self, part: Part, setting: Setting, deadline: float) -> str:
        """Run a part's commands, and return the status. Tests run side by side, others in turn until one fails."""
        waiting, running = part.made(setting), dict[str, subprocess.Popen[bytes]]()
        environment, most = self._environment(part), usable_cores() if part.tests else 1
        failures: list[str] = []
        while waiting or running:
            if self._signals or time.monotonic() > deadline:
                _end(list(running.values()))
                late = GOES_ON if part.goes_on else "FAILED: ended at its limit"
                return INTERRUPTED if self._signals else late
            while waiting and len(running) < most:
                command = waiting.pop(0)
                running[command.name] = _start(command, part.output, setting.folder, environment)
            for name, process in list(running.items()):
                if (code := process.poll()) is not None:
                    _signal(process, signal.SIGKILL)  # ends processes that the command left behind
                    del running[name]
                    failures += [f"{name} ended with exit code {code}"] if code else []
            if failures and not part.tests:
                break
            time.sleep(POLL_SECONDS)
        return f"FAILED: {'; '.join(failures)}" if failures else DONE

    def _environment(self, part: Part) -> dict[str, str]:
        """Return the environment for commands, with this checkout and the unpacked packages first on PYTHONPATH."""
        over_engine = not self._options.rehearse or part.on_stand_in
        sites = (self._options.site or (STAND_IN if self._options.rehearse else ())) if over_engine else ()
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        paths = [str(ROOT), *map(str, sites), *filter(None, [os.environ.get("PYTHONPATH")])]
        variables |= {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
        variables |= {"OMP_NUM_THREADS": "2"} if part.tests else {}
        # Transformer Engine finds CUDA's libraries where pip put them beside torch.
        folders = {path for entry in [*map(str, sites), *sys.path] for path in Path(entry or ".").glob("nvidia/*/lib")}
        libraries = [*sorted(map(str, folders)), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
        variables |= {"LD_LIBRARY_PATH": os.pathsep.join(libraries)} if libraries else {}
        if self._options.rehearse:
            variables["CUDA_VISIBLE_DEVICES"] = "0" if over_engine else ""
        return variables


def _commit() -> str:
    if shutil.which("git") is None:
        return "unknown"
    command = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def _start(
    command: Command, output: str | None, folder: Path, environment: dict[str, str]
) -> "subprocess.Popen[bytes]":
    with (
        (folder / f"{command.name}.log").open("ab") as log,
        (folder / (output or f"{command.name}.log")).open("ab") as out,
    ):
        return subprocess.Popen(
            [sys.executable, *command.arguments],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=log,
            start_new_session=True,
        )


def _end(processes: Sequence["subprocess.Popen[bytes]"]) -> None:
    """Send SIGTERM to the sessions of processes, and SIGKILL to those that have not ended after GRACE_SECONDS."""
    for process in processes:
        _signal(process, signal.SIGTERM)
    until = time.monotonic() + GRACE_SECONDS
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, until - time.monotonic()))
        _signal(process, signal.SIGKILL)
        process.wait()


def _signal(process: "subprocess.Popen[bytes]", number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # no process of the session is left
        os.killpg(process.pid, number)


if __name__ == "__main__":
    sys.exit(main())
