"""Planted faults: each list in `planted/` names faults of one room, and the tests that must notice each.

`python -m tests.faults.planted [ROOM …]` (`make faults`) plants one after the other, each in a copy of the
sources, runs its tests, and prints the test that noticed it. It fails where one is not noticed whose list does not say
why (`survives`).
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import yaml

REPOSITORY = Path(__file__).parents[2]
LISTS = Path(__file__).parent / "planted"
MOST_SECONDS = 1200.0  # of a fault's tests, before they count as hanging


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
        if (count := text.count(self.before)) != 1:
            raise ValueError(f"{self.name}: `before` stands {count} times in {self.file}, not once")
        changed = text.replace(self.before, self.after)
        if changed == text:
            raise ValueError(f"{self.name}: `after` is `before`")
        if self.file.endswith(".py"):
            compile(changed, f"{self.file}, with {self.name}", "exec")
        return changed


def rooms() -> list[str]:
    return sorted(file.stem for file in LISTS.glob("*.yaml"))


def faults_of(room: str) -> list[Fault]:
    listed = yaml.safe_load((LISTS / f"{room}.yaml").read_text())
    return [
        Fault(room=room, number=number, **{**values, "tests": tuple(values["tests"])})
        for number, values in enumerate(listed, start=1)
    ]


def copy_sources(destination: Path) -> None:
    """Copy what git has or would add, and link the environments."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (source := REPOSITORY / name).is_file():  # not what was removed, nor a linked environment
            (destination / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, destination / name)
    for environment in REPOSITORY.glob(".venv*"):
        if not (destination / environment.name).exists():
            (destination / environment.name).symlink_to(environment.resolve())


def notice(fault: Fault) -> str | None:
    """Plant a fault in a copy, and run its tests; returns what noticed it, None where nothing did."""
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        copy = Path(folder)
        copy_sources(copy)
        (copy / fault.file).write_text(fault.planted(copy))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *fault.tests]
        environment = {**os.environ, "PYTHONPATH": folder, "OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run(
                command, cwd=copy, env=environment, capture_output=True, text=True, timeout=MOST_SECONDS
            )
        except subprocess.TimeoutExpired:
            return "hang"
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0] if failed else f"pytest's exit code {done.returncode}" if done.returncode else None


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.planted", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("rooms", nargs="*", metavar="ROOM", help="rooms of the package, or ground (all)")
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="these numbers of each room's list")
    parser.add_argument("--jobs", type=int, default=min(4, len(os.sched_getaffinity(0))), metavar="N")
    options = parser.parse_args()
    if unknown := sorted(set(options.rooms) - set(rooms())):
        parser.error(f"there is no list of {unknown[0]}; there are {', '.join(rooms())}")
    listed = [fault for room in options.rooms or rooms() for fault in faults_of(room)]
    faults = [fault for fault in listed if not options.only or fault.number in options.only]
    for fault in faults:
        fault.planted(REPOSITORY)  # raises, before hours of work, where a list is out of date
    survivors = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for fault, by in zip(faults, pool.map(notice, faults), strict=True):
            print(f"{fault.name:18} {fault.file.removeprefix('megatron_fanformer/'):36} {by or 'SURVIVED'}", flush=True)
            if by is None and not fault.survives:
                survivors.append(fault.name)
    print(f"{len(faults)} faults; survived without a reason in their list: {', '.join(survivors) or 'none'}")
    sys.exit(bool(survivors))


if __name__ == "__main__":
    main()
