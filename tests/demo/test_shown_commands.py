"""Every command and block of Python that the documentation shows, and that needs no more than this machine, runs.

Those of a page run one after the other in a folder in which the demo has run, with `examples/` and `docs/` beside it,
as a reader has them. Where a test writes to a terminal (`pytest -s` or not), each command is listed with its exit code
and seconds.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from megatron_fanformer.options import PROGRAM
from tests.shown_commands import TO_RUN
from tests.small_runs import ROOT, write_program

pytestmark = [pytest.mark.full, pytest.mark.timeout(3600)]

DEMO = f"{PROGRAM} demo --output runs/demo"
LONGEST_SECONDS = 900  # of a command, where others share the cores; what takes longer is not for a test
QUESTION = "[y/N]"  # by which transformers asks whether to run a folder's code; here nobody answers
TOLD_CHARACTERS = 2000  # the end of what a command that failed has printed


class Ran(NamedTuple):
    text: str
    code: int
    seconds: float
    output: str

    def __str__(self) -> str:
        return f"exit {self.code}  {self.seconds:6.1f} s  {self.text}"


def run(text: str, folder: Path, *, is_python: bool = False) -> Ran:
    """Run a line of the shell, or a block of Python, in a folder; whatever it has started ends with it."""
    environment = {
        **os.environ,
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HF_MODULES_CACHE": str(folder / "modules"),
    }
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-c", text] if is_python else ["bash", "-o", "pipefail", "-c", text],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LONGEST_SECONDS)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return Ran(text, process.returncode, time.monotonic() - began, output)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ran]:
    """A reader's folder after the demo, and the demo's own command."""
    folder = tmp_path_factory.mktemp("reader")
    for name in ("examples", "docs", "README.md"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "bin").mkdir()
    for name, words in ((PROGRAM, "-m megatron_fanformer"), ("python", "")):
        write_program(folder / "bin" / name, f'exec "{sys.executable}" {words} "$@"')
    return folder, run(DEMO, folder)


@pytest.mark.parametrize("page", dict.fromkeys(command.page for command in TO_RUN))
def test_the_commands_of_a_page_run(
    page: str, demo: tuple[Path, Ran], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    after_demo, first = demo
    here = Path(shutil.copytree(after_demo, tmp_path / "here", symlinks=True))
    shown = [each for each in TO_RUN if each.page == page]
    ran = [first if each.text == DEMO else run(each.text, here, is_python=each.is_python) for each in shown]
    with capsys.disabled():
        print(f"\n{page}", *ran, sep="\n")
    assert [f"{each}\n{each.output[-TOLD_CHARACTERS:]}" for each in ran if each.code] == []
    assert [each.text for each in ran if QUESTION in each.output] == []
    ours = [each for each, text in zip(ran, shown, strict=True) if not text.is_python]
    assert [each.text for each in ours if {"\r", "\x1b"} & set(each.output)] == []  # into a pipe: lines, no colour
