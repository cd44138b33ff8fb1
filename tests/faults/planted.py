"""Planted faults: each list in `planted/` names faults of one room, and the tests that must notice each.

`python -m tests.faults.planted [ROOM …]` (`make faults`) plants one after the other, each in a copy of the
sources, runs its tests as `make test` would, and prints what noticed it. It fails where one is not noticed whose list
does not say why (`survives`), or where fewer than 95% are.

A fault's tests run in a fork of this process, which has imported what the tests import from elsewhere and nothing of
this package: a start takes a second instead of three. Commands that tests start import the copy, by PYTHONPATH.
"""

import argparse
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest
import yaml

REPOSITORY = Path(__file__).parents[2]
LISTS = Path(__file__).parent / "planted"
IMPORTED = ("torch", "pyarrow", "safetensors.torch", "sentencepiece", "tokenizers", "transformers.models.auto")
LEAST_KILLED = 0.95
# Before tests count as hanging: far beyond what they take on the unchanged copy, whatever else the machine does.
LEAST_SECONDS, TIMES_AS_LONG = 120.0, 10.0
POLL_SECONDS = 0.05
NO_TESTS = 5  # pytest's exit code
MOST_SHOWN = 60  # characters of a change
BESIDE = 2  # words beside it


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A change of one file that users could be hurt by."""

    room: str
    number: int
    """From 1, in its list."""
    file: str
    """Relative to the repository."""
    before: str
    """What stands in the file, once."""
    after: str
    tests: tuple[str, ...]
    """Files, or FILE::TEST, that cover it."""
    survives: str | None = None
    """Why no test notices it."""

    @property
    def name(self) -> str:
        return f"{self.room}-{self.number}"

    def planted(self, repository: Path) -> str:
        """Return the file's text with the fault.

        Raises:
            ValueError: `before` does not stand there once, or nothing changes.
            SyntaxError: the changed file is not Python.
        """
        text = (repository / self.file).read_text()
        if (found := text.count(self.before)) != 1:
            raise ValueError(f"{self.name}: `before` stands {found} times in {self.file}, not once")
        changed = text.replace(self.before, self.after)
        if changed == text:
            raise ValueError(f"{self.name}: `after` is `before`")
        if self.file.endswith(".py"):
            compile(changed, f"{self.file}, with {self.name}", "exec")
        return changed

    def plant(self, repository: Path) -> None:
        path = repository / self.file
        path.write_text(self.planted(repository))
        # Bytecode goes by the second of a file's time and by its size, and both may be the same.
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
            compiled.unlink()

    def what(self) -> str:
        """What it changes, on one line: the words that were there and those that are, with those beside them."""
        old, new = self.before.split(), self.after.split()
        begin, end = _same(old, new), _same(old[::-1], new[::-1])
        end = min(end, len(old) - begin, len(new) - begin)
        texts = (" ".join(words[max(0, begin - BESIDE) : len(words) - max(0, end - BESIDE)]) for words in (old, new))
        return " → ".join(text if len(text) <= MOST_SHOWN else text[:MOST_SHOWN] + "…" for text in texts)


def _same(old: list[str], new: list[str]) -> int:
    """With how many words two lists begin alike."""
    shorter = min(len(old), len(new))
    return next((place for place in range(shorter) if old[place] != new[place]), shorter)


def rooms() -> list[str]:
    return sorted(file.stem for file in LISTS.glob("*.yaml"))


def faults_of(room: str) -> list[Fault]:
    listed = yaml.safe_load((LISTS / f"{room}.yaml").read_text())
    return [
        Fault(room=room, number=number, **{**values, "tests": tuple(values["tests"])})
        for number, values in enumerate(listed, start=1)
    ]


# -- a copy, and its tests


def copy_sources(destination: Path) -> None:
    """Copy what git has or would add, and link the environment."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        check=True,
        capture_output=True,
        text=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (source := REPOSITORY / name).is_file():  # not what was removed, nor a linked environment
            (destination / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, destination / name)
    for environment in REPOSITORY.glob(".venv*"):
        if not (destination / environment.name).exists():
            (destination / environment.name).symlink_to(environment.resolve())


class _Recorder:
    """A plugin of pytest: the tests that fail, as they do."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and report.nodeid not in self.failed:
            self.failed.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed.append(f"{report.nodeid} (as it is imported)")


@dataclass
class Run:
    """Tests that run on a copy, in a fork of this process."""

    folder: Path
    """Of the copy, and of what the tests write."""
    options: list[str]
    """Of pytest."""
    limit_seconds: float
    process: int = 0
    began: float = 0.0
    seconds: float = 0.0
    failed: tuple[str, ...] = ()
    """The tests that failed; what ended the process, where that was not their end."""
    code: int | None = None
    """pytest's."""

    @property
    def copy(self) -> Path:
        return self.folder / "copy"

    def start(self) -> None:
        self.began = time.monotonic()
        sys.stdout.flush()
        self.process = os.fork()
        if not self.process:
            self._run()

    def _run(self) -> NoReturn:
        """Be the tests' process."""
        try:
            os.setsid()
            os.chdir(self.copy)
            (self.folder / "tmp").mkdir()
            output = os.open(self.folder / "output", os.O_WRONLY | os.O_CREAT)
            for stream in (1, 2):
                os.dup2(output, stream)
            os.environ |= {"PYTHONPATH": str(self.copy), "TMPDIR": str(self.folder / "tmp")}
            tempfile.tempdir = None
            _leave_this_module(self.copy)
            sys.argv = ["pytest", *self.options]
            recorder = _Recorder()
            code = int(pytest.main([*self.options, "-p", "no:cacheprovider"], plugins=[recorder]))
            (self.folder / "result").write_text(json.dumps({"code": code, "failed": recorder.failed}))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(0)

    def has_ended(self) -> bool:
        ended, status = os.waitpid(self.process, os.WNOHANG)
        self.seconds = time.monotonic() - self.began
        is_late = self.seconds > self.limit_seconds
        if not ended and not is_late:
            return False
        if not ended:
            os.kill(self.process, signal.SIGKILL)
            os.waitpid(self.process, 0)
        self._end_others()
        if ended and (result := self.folder / "result").exists():
            found = json.loads(result.read_text())
            self.code, self.failed = found["code"], tuple(found["failed"])
        elif is_late:
            self.failed = ("hang",)
        else:
            self.failed = (f"the end of the tests' process (status {os.waitstatus_to_exitcode(status)})",)
        return True

    def _end_others(self) -> None:
        """End what tests started and left: nothing of one fault is to work beside the next."""
        with suppress(ProcessLookupError):
            os.killpg(self.process, signal.SIGKILL)
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if process.environ().get("PYTHONPATH") == str(self.copy):
                    process.kill()

    def last_lines(self) -> str:
        return "\n".join((self.folder / "output").read_text(errors="replace").splitlines()[-30:])


def _leave_this_module(copy: Path) -> None:
    """Have the process import the copy alone, and those that multiprocessing spawns import no `__main__`."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    sys.path[:] = [str(copy), *(entry for entry in sys.path if entry and Path(entry).resolve() != REPOSITORY)]
    sys.modules["__main__"] = types.ModuleType("__main__")
    assert not any(name.partition(".")[0] == "megatron_fanformer" for name in sys.modules)


def ended(runs: Iterable[Run], jobs: int) -> Iterator[Run]:
    """The runs as they end, so many at a time; what they wrote is removed after."""
    waiting, under_way = iter(runs), list[Run]()
    try:
        while True:
            while len(under_way) < jobs and (run := next(waiting, None)) is not None:
                run.start()
                under_way.append(run)
            if not under_way:
                return
            time.sleep(POLL_SECONDS)
            for run in [run for run in under_way if run.has_ended()]:
                under_way.remove(run)
                yield run
                shutil.rmtree(run.folder, ignore_errors=True)
    finally:  # Ctrl-C
        for run in under_way:
            run.limit_seconds = 0
            run.has_ended()


# -- the command


def _unchanged(faults: list[Fault], work: Path, jobs: int) -> tuple[dict[str, float], list[str]]:
    """Run all tests that faults name on an unchanged copy: the seconds of each file's, and those that fail.

    `work/sources` has been imported then: copies of it have its bytecode.
    """
    copy_sources(work / "sources")
    named: dict[str, set[str]] = {}
    for test in (test for fault in faults for test in fault.tests):
        named.setdefault(_file_of(test), set()).add(test)

    def runs() -> Iterator[Run]:
        for number, (file, tests) in enumerate(named.items()):
            folder = work / f"unchanged-{number}"
            folder.mkdir()
            (folder / "copy").symlink_to(work / "sources")
            yield Run(folder, [file] if file in tests else sorted(tests), limit_seconds=1800)

    seconds, failing = {}, list[str]()
    for run in ended(runs(), jobs):
        seconds[_file_of(run.options[0])] = run.seconds
        failing += run.failed
        if run.failed or run.code:
            print(f"fails without a fault, and notices none: {', '.join(run.failed)}", flush=True)
            print(run.last_lines(), flush=True)
        if run.code is None or run.code == NO_TESTS:
            raise SystemExit(f"{' '.join(run.options)}: no tests, or none that end; name others")
    print(f"{len(named)} files of tests without a fault: {sum(seconds.values()):.0f} s, {jobs} at a time\n", flush=True)
    return seconds, failing


def _file_of(test: str) -> str:
    return test.partition("::")[0]


def _planted(faults: list[Fault], work: Path, seconds: dict[str, float], failing: list[str]) -> Iterator[Run]:
    for fault in faults:
        folder = work / fault.name
        shutil.copytree(work / "sources", folder / "copy", symlinks=True)
        fault.plant(folder / "copy")
        files = {_file_of(test) for test in fault.tests}
        limit = max(LEAST_SECONDS, TIMES_AS_LONG * sum(seconds[file] for file in files))
        without = [option for test in failing for option in ("--deselect", test)]
        yield Run(folder, ["-x", *fault.tests, *without], limit)


def show(faults: list[Fault], runs: Iterator[Run]) -> dict[str, bool]:
    """Print a row for each fault as its tests end; whether each was noticed, by its name."""
    by_name = {fault.name: fault for fault in faults}
    killed = {}
    for run in runs:
        fault = by_name[run.folder.name]
        killed[fault.name] = bool(run.failed)
        by = run.failed[0] if run.failed else "SURVIVED"
        if fault.survives:
            by += ", though its list says that none notices" if run.failed else f", as known: {fault.survives}"
        file = fault.file.removeprefix("megatron_fanformer/")
        print(f"{fault.name:18} {file:36} {run.seconds:5.1f} s  {by}\n{'':18} {fault.what()}", flush=True)
    return killed


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.planted", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("rooms", nargs="*", metavar="ROOM", help="rooms of the package, or ground (all)")
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="these numbers of each room's list")
    parser.add_argument("--jobs", type=int, default=min(4, len(os.sched_getaffinity(0))), metavar="N")
    options = parser.parse_args()
    if unknown := sorted(set(options.rooms) - set(rooms())):
        parser.error(f"there is no list of {unknown[0]}; there are {', '.join(rooms())}")
    faults = [
        fault
        for room in options.rooms or rooms()
        for fault in faults_of(room)
        if not options.only or fault.number in options.only
    ]
    for fault in faults:
        fault.planted(REPOSITORY)  # raises, before hours of work, where a list is out of date
    os.environ["OMP_NUM_THREADS"] = "1"  # as the tests' own; and so that what is forked has one thread
    for module in IMPORTED:
        importlib.import_module(module)
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        work = Path(folder)
        seconds, failing = _unchanged(faults, work, options.jobs)
        killed = show(faults, ended(_planted(faults, work, seconds, failing), options.jobs))
    sys.exit(0 if _conclude(faults, killed) else 1)


def _conclude(faults: list[Fault], killed: dict[str, Any]) -> bool:
    """Print the rates; whether they suffice."""
    print()
    for room in dict.fromkeys(fault.room for fault in faults):
        those = [killed[fault.name] for fault in faults if fault.room == room]
        print(f"{room:18} {sum(those):3} of {len(those):3}")
    rate = sum(killed.values()) / len(killed)
    print(f"{'all':18} {sum(killed.values()):3} of {len(killed):3} were noticed ({rate:.1%})")
    unexplained = [fault.name for fault in faults if not killed[fault.name] and not fault.survives]
    if unexplained:
        print(f"survived without a reason in their list: {', '.join(unexplained)}")
    return not unexplained and rate >= LEAST_KILLED


if __name__ == "__main__":
    main()
