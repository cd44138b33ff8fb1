"""Runs all that one GPU can settle, part by part in order of worth, each within its limit; every result is kept.

    python tools/gpu_queue.py --list
    python tools/gpu_queue.py --site SITE --minutes 25        # on a machine with a GPU; again to go on
    python tools/gpu_queue.py --only machine tests            # these, and what they need
    python tools/gpu_queue.py --rehearse                      # on a CPU: small sizes, a stand-in for Transformer Engine

The output folder has report.md (what each part decided, its figures, goals, whether they are met, seconds) and a folder
for each part with its result, logs and files. A part that is done is not run again; one whose time is not there is
left out, and the next one is tried. The exit code is 1 where a part failed, and 5 after a signal: that ends the part
that is running, and the report is still written. docs/gpu.md has more.
"""

import argparse
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

# Before an installed one: the queue measures this checkout.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from queueing import report
from queueing.parts import PARTS
from queueing.record import ROOT, Part, Setting
from queueing.running import DONE, Result, environment_of, read_result, run_part

from megatron_fanformer import markdown
from megatron_fanformer.durable_files import write_atomically
from megatron_fanformer.errors import Interrupted
from megatron_fanformer.processes import STOP_SIGNALS, signals_to

PATIENCE = 10  # a rehearsal's limits are so many times as long
STAND_IN = (Path(sys.prefix) / "engine", ROOT / "tests" / "engine_on_cpu" / "site")


def main(arguments: Sequence[str] | None = None, parts: Sequence[Part] = PARTS) -> int:
    """Run what is asked for; returns the exit code."""
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
    write_atomically(output / "report.md", queue.page())
    print(f"\n{queue.page()}\n{output / 'report.md'}")
    if signals:
        return Interrupted.exit_code
    return 1 if any(result.has_failed for result in queue.taken.values()) else 0


class Queue:
    """The parts of one call, and what has come of them.

    Args:
        signals: filled by the handlers of this process.
    """

    def __init__(
        self, parts: Sequence[Part], options: argparse.Namespace, output: Path, signals: list[signal.Signals]
    ) -> None:
        self._parts = {part.name: part for part in parts}
        self._options, self._output, self._signals = options, output, signals
        self._until = time.monotonic() + 60 * options.minutes if options.minutes else float("inf")
        self._factor = PATIENCE if options.rehearse else 1
        self.taken: dict[str, Result] = {}

    @property
    def chosen(self) -> list[Part]:
        """Those that were asked for and what they need, in the order of the table."""
        wanted = set(self._options.only or self._parts)
        for part in reversed(self._parts.values()):  # what a part needs comes before it
            if part.name in wanted:
                wanted.update(part.needs)
        return [part for part in self._parts.values() if part.name in wanted]

    def take(self, part: Part) -> None:
        """Run a part, unless it is done, or its time or what it needs is not there; says which."""
        setting = Setting(folder=self._output / part.name, rehearses=self._options.rehearse)
        earlier = None if self._is_again(part) else self._earlier(part)
        before = earlier.seconds if earlier and part.least_minutes and not earlier.has_failed else 0.0
        limit = 60 * part.minutes * self._factor - before
        seconds = min(limit, self._until - time.monotonic()) if part.least_minutes else limit
        is_used_up = part.least_minutes is not None and limit < 60 * part.least_minutes
        if earlier and (earlier.status == DONE or is_used_up):
            self._keep(part, earlier, "kept")
            return
        if reason := self._left_out(part, setting, seconds):
            self._keep(
                part, earlier or Result(part=part.name, decides=part.decides, status=f"left out: {reason}"), reason
            )
            return
        print(f"{part.name}: {part.decides}; at most {seconds:.0f} s", flush=True)
        over_engine = not self._options.rehearse or part.on_stand_in
        sites = self._options.site or (STAND_IN if self._options.rehearse else ())
        result = run_part(
            part,
            setting,
            environment_of(sites if over_engine else (), hides_gpu=not over_engine, stand_in=self._options.rehearse),
            seconds=seconds,
            before=before,
            commit=_commit(),
            stopped=lambda: bool(self._signals),
        )
        self._keep(part, result, f"{result.seconds:.0f} s, {result.status}")

    def page(self) -> str:
        """The report: of all parts that have a result, of earlier calls too."""
        known = (self.taken.get(part.name) or self._earlier(part) for part in self._parts.values())
        found = [result for result in known if result is not None]
        heading = ["A rehearsal: no figure of speed is judged."] if self._options.rehearse else []
        if (machine := self._output / "machine" / "machine.json").is_file():
            heading += [", ".join(f"{name} {value}" for name, value in json.loads(machine.read_text()).items())]
        return report.page(found, heading=markdown.as_text(" ".join(heading)))

    def _keep(self, part: Part, result: Result, how: str) -> None:
        self.taken[part.name] = result
        print(f"{part.name}: {how}", flush=True)
        for figure in result.figures:
            judged = f" ({figure.rule}: {figure.verdict})" if figure.rule else ""
            print(f"    {figure.name}: {figure.shown}{judged}", flush=True)
        write_atomically(self._output / "report.md", self.page())

    def _earlier(self, part: Part) -> Result | None:
        """What an earlier call of the same kind has left."""
        found = read_result(self._output / part.name)
        return found if found and found.rehearsed == self._options.rehearse else None

    def _left(self) -> float:
        return self._until - time.monotonic()

    def _is_again(self, part: Part) -> bool:
        return self._options.again and (not self._options.only or part.name in self._options.only)

    def _left_out(self, part: Part, setting: Setting, seconds: float) -> str | None:
        """Why a part is not run; None if it is."""
        missing = [
            str(path.relative_to(ROOT))
            for path in (part.requires(setting) if part.requires else [])
            if not path.is_file()
        ]
        if missing:
            return f"{', '.join(missing)} is not there"
        unmet = [name for name in part.needs if name not in self.taken or self.taken[name].status != DONE]
        if unmet:
            return f"it needs {', '.join(unmet)}"
        least = 60 * part.least_minutes if part.least_minutes else seconds
        if least > self._left() or least > seconds:
            return f"it takes {least / 60:.1f} minutes, and {max(0.0, self._left()) / 60:.1f} are left"
        return None


def _options(arguments: Sequence[str] | None, parts: Sequence[Part]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="say what the parts are, and end")
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
    goals = [f"{goal.name}: {goal.rule}" for goal in part.goals] or ["each comparison that its file states beforehand"]
    lines = [
        f"{part.name}  ({part.minutes:g} minutes at most)",
        f"    {part.decides}",
        *(f"    - {goal}" for goal in goals),
    ]
    lines += [f"    needs {', '.join(part.needs)}"] if part.needs else []
    return "\n".join([*lines, f"    writes {', '.join([*part.writes, 'logs'])}"])


def _commit() -> str:
    if shutil.which("git") is None:
        return "unknown"
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
