"""Tables and progress, on terminals and in pipes."""

import os
import pty
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_fanformer import terminal
from megatron_fanformer.prepare import progress
from megatron_fanformer.prepare.progress import PrepareProgress
from tests.small_runs import ROOT, small_run, write_config, write_tokens

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
COLOR = re.compile(r"\x1b\[([0-9;]*;)?(3|4|9|10)\d[0-9;]*m")


def test_text_stands_left_and_numbers_right() -> None:
    columns, align = ("layout", "ranks", "loss", "verdict"), "lrrl"
    rows = [("tp=2,sp=true", "2", "1.2e-07", "same"), ("pp=2", "12", "3.0e-08", "differs in the gradient")]
    assert terminal.table(columns, rows, align=align) == [
        "layout        ranks     loss  verdict",
        "tp=2,sp=true      2  1.2e-07  same",
        "pp=2             12  3.0e-08  differs in the gradient",
    ]
    assert terminal.labelled([("files", "of many words"), ("a path", "/x/y"), ("", "more")]) == [
        "  files   of many words",
        "  a path  /x/y",
        "          more",
    ]


def test_progress_of_prepare_in_a_pipe_is_a_line_a_minute(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter(range(0, 10_000, 20))
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    with progress.progress_line("preparing") as show:
        for done in range(5):
            show(PrepareProgress(documents=done, text_bytes=0, input_bytes=done, input_bytes_total=5))
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(",")[0] for line in lines] == ["preparing: 2 documents", "preparing: 4 documents"]


def in_terminal(arguments: list[str]) -> str:
    """What a process of the command writes to a terminal."""
    master, terminal_file = pty.openpty()
    written = bytearray()

    def read() -> None:
        try:
            while content := os.read(master, 4096):
                written.extend(content)
        except OSError:  # how Linux ends it
            pass

    reader = threading.Thread(target=read)
    reader.start()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1", "TERM": "xterm-256color"}
    command = [sys.executable, "-m", "megatron_fanformer", *arguments]
    files = {"stdin": subprocess.DEVNULL, "stdout": terminal_file, "stderr": terminal_file}
    done = subprocess.run(command, cwd=ROOT, env=environment, check=False, **files)
    os.close(terminal_file)
    reader.join()
    os.close(master)
    assert done.returncode == 0, written.decode()
    return written.decode()


@pytest.mark.full  # processes that import torch and megatron-core
def test_a_run_in_a_terminal_and_in_a_pipe(tmp_path: Path) -> None:
    """The same lines, without colors where NO_COLOR is set, and without control characters in a pipe."""
    config = str(write_config(tmp_path / "config.yaml", small_run(write_tokens(tmp_path / "tokens"), tmp_path / "run")))
    shown = in_terminal(["train", "--config", config, "--training.run_dir", str(tmp_path / "shown")])
    assert COLOR.search(shown) is None and "saved" in ESCAPES.sub("", shown)
    command = [sys.executable, "-m", "megatron_fanformer", "train", "--config", config]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    piped = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert "step 20/20" in piped.stdout
    assert re.search(r"[\r\x1b]", piped.stdout + piped.stderr) is None
