"""Every command and block of Python that the documentation shows, and that needs no more than this machine, runs.

Those of a page run one after the other in a folder in which the demo has run, with `examples/` and `docs/` beside it,
as a reader has them.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_fanformer.options import PROGRAM
from tests.shown_commands import TO_RUN
from tests.small_runs import ROOT, write_program

pytestmark = [pytest.mark.full, pytest.mark.timeout(3600)]

DEMO = f"{PROGRAM} demo --output runs/demo"
LONGEST_SECONDS = 900  # of a command, where others share the cores; what takes longer is not for a test
QUESTION = "[y/N]"  # by which transformers asks whether to run a folder's code; here nobody answers


def run(text: str, folder: Path, *, is_python: bool = False) -> str:
    """Run a line of the shell, or a block of Python, in a folder; returns its output."""
    environment = {
        **os.environ,
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HF_MODULES_CACHE": str(folder / "modules"),
    }
    command = [sys.executable, "-c", text] if is_python else ["bash", "-o", "pipefail", "-c", text]
    process = subprocess.run(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, timeout=LONGEST_SECONDS, capture_output=True
    )
    output = (process.stdout + process.stderr).decode()
    assert process.returncode == 0, f"{text}\n{output}"
    assert QUESTION not in output, text
    return output


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reader's folder after the demo."""
    folder = tmp_path_factory.mktemp("reader")
    for name in ("examples", "docs", "README.md"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "bin").mkdir()
    for name, words in ((PROGRAM, "-m megatron_fanformer"), ("python", "")):
        write_program(folder / "bin" / name, f'exec "{sys.executable}" {words} "$@"')
    run(DEMO, folder)
    return folder


@pytest.mark.parametrize("page", dict.fromkeys(command.page for command in TO_RUN))
def test_the_commands_of_a_page_run(page: str, demo: Path, tmp_path: Path) -> None:
    here = Path(shutil.copytree(demo, tmp_path / "here", symlinks=True))
    for command in TO_RUN:
        if command.page == page and command.text != DEMO:
            output = run(command.text, here, is_python=command.is_python)
            assert command.is_python or not {"\r", "\x1b"} & set(output), command.text  # into a pipe: no colour
