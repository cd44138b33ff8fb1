"""What is printed, in terminals of several widths and in a pipe: nothing too wide, nothing broken, nothing lost."""

import fcntl
import os
import pty
import random
import re
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_fanformer import cli, terminal
from megatron_fanformer.errors import Interrupted
from megatron_fanformer.preparation import progress
from megatron_fanformer.preparation.pipeline import PrepareProgress
from megatron_fanformer.processes import NOTHING_LOST
from megatron_fanformer.runtime.launch import print_end
from megatron_fanformer.training.last_lines import COMMAND
from tests.small_runs import ROOT, small_run, write_config, write_tokens

WIDTHS = (40, 80, 200)
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
COLOUR = re.compile(r"\x1b\[([0-9;]*;)?(3|4|9|10)\d[0-9;]*m")


class Screen:
    """A pseudo-terminal of some columns, and what is written to it."""

    def __init__(self, columns: int) -> None:
        self._master, self.file = pty.openpty()
        fcntl.ioctl(self.file, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))
        self._bytes = bytearray()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        try:
            while read := os.read(self._master, 4096):
                self._bytes += read
        except OSError:  # how Linux ends it
            pass
        os.close(self._master)

    def text(self) -> str:
        """All of it, once whoever writes has closed the file."""
        self._reader.join()
        return self._bytes.decode()


def words(text: str) -> set[str]:
    """Without the colon that a column's name has in front of a cell."""
    return {word.removesuffix(":") for word in text.split()}


def too_wide(lines: list[str], columns: int) -> list[str]:
    return [line for line in lines if len(line) > columns and len(line.split()) > 1]


# -- the layout


def random_table(chance: random.Random) -> tuple[list[str], list[list[str]], str]:
    texts, numbers = chance.randint(1, 3), chance.randint(0, 5)
    align = "".join(chance.sample("l" * texts + "r" * numbers, texts + numbers))

    def text() -> str:
        return " ".join("x" * chance.randint(1, 30) + str(chance.random())[2:5] for _ in range(chance.randint(1, 9)))

    def cell(letter: str) -> str:
        return "" if chance.random() < 0.1 else text() if letter == "l" else f"{chance.randint(0, 10**9):,}"

    first = align.index("l")
    rows = [[text() if n == first else cell(letter) for n, letter in enumerate(align)] for _ in range(4)]
    return [f"column{n}" for n in range(len(align))], rows, align


def test_a_table_fits_and_loses_nothing() -> None:
    chance = random.Random(0)
    for _ in range(60):
        columns, rows, align = random_table(chance)
        cells = words(" ".join(cell for row in rows for cell in row))
        whole = terminal.table(columns, rows, align=align, width=None)
        assert len(whole) == 1 + len(rows) and words(" ".join(whole)) == cells | set(columns)
        for width in (30, 60, 90, 140, 3000):
            lines = terminal.table(columns, rows, align=align, width=width)
            assert too_wide(lines, width) == [] and cells <= words(" ".join(lines))
        assert lines == whole


def test_the_three_forms_of_a_table() -> None:
    columns, align = ("layout", "ranks", "loss", "verdict"), "lrrl"
    rows = [("tp=2,sp=true", "2", "1.2e-07", "same"), ("pp=2", "12", "3.0e-08", "differs in the gradient")]
    assert terminal.table(columns, rows, align=align, width=60) == [
        "layout        ranks     loss  verdict",
        "tp=2,sp=true      2  1.2e-07  same",
        "pp=2             12  3.0e-08  differs in the gradient",
    ]
    assert terminal.table(columns, rows, align=align, width=40) == [
        "layout",
        "  ranks     loss",
        "tp=2,sp=true",
        "      2  1.2e-07",
        "  verdict: same",
        "pp=2",
        "     12  3.0e-08",
        "  verdict: differs in the gradient",
    ]
    assert terminal.table(columns, rows[:1], align=align, width=15) == [
        "layout:",
        "  tp=2,sp=true",
        "  ranks: 2",
        "  loss: 1.2e-07",
        "  verdict: same",
    ]


def test_the_widest_text_wraps_first() -> None:
    rows = [
        ("a name of some forty columns, or thereabout", "and a text that is one third longer than the name before it")
    ]
    assert terminal.table(("name", "text"), rows, align="ll", width=90) == [
        "name                                         text",
        "a name of some forty columns, or thereabout  and a text that is one third longer than the",
        "                                             name before it",
    ]


def test_labels_stand_beside_their_texts_or_above_them() -> None:
    rows = [("files", "of so many words that it wraps"), ("a path", "/x/" + "y" * 28)]
    whole = ["  files   of so many words that it wraps", f"  a path  /x/{'y' * 28}"]
    assert list(terminal.labelled(rows, None)) == list(terminal.labelled(rows, 41)) == whole
    assert list(terminal.labelled(rows, 36)) == [
        "  files   of so many words that it",
        "          wraps",
        "  a path",
        f"    /x/{'y' * 28}",
    ]


# -- screens


Printed = Callable[[list[str], int | None], str]


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Printed:
    """What a command of this process prints and says, to a terminal of some columns, or to a pipe."""

    def run(arguments: list[str], columns: int | None) -> str:
        if columns is None:
            cli.main(arguments)
            return "".join(capsys.readouterr())
        screen = Screen(columns)
        with open(screen.file, "w", encoding="utf-8") as file, monkeypatch.context() as patch:
            patch.delenv("COLUMNS", raising=False)
            for name in ("stdout", "stderr", "__stdout__"):  # the last is whose size is asked for
                patch.setattr(sys, name, file)
            cli.main(arguments)
        return screen.text()

    return run


PLAN = ["plan", "--config", str(ROOT / "examples" / "fanformer-7b.yaml"), "--gpus", "256", "--gpu", "h100"]
SCREENS = {
    "fields": ["config"],
    "token files": ["inspect", "TOKENS"],
    "a list": ["experiment"],
    "a sweep": ["sweep", str(ROOT / "examples" / "sweeps" / "variants.yaml"), "dry-run"],
    "a plan": [*PLAN, "--layouts", "tp=8,pp=2,sp=true", "tp=2,sp=true,fan=sequence,mbs=1", "tp=3", "pp=4,vpp=3"],
    "errors": ["train", "--config", "CONFIG", "--training.global_batch_size", "5", "--checkpoint.load", "none"],
}
"""A command for each kind of screen that needs no torch."""


@pytest.mark.parametrize("screen", SCREENS)
def test_a_screen_is_as_wide_as_the_terminal_and_whole(printed: Printed, tmp_path: Path, screen: str) -> None:
    tokens = write_tokens(tmp_path / "tokens")
    config = str(write_config(tmp_path / "config.yaml", small_run(tokens, tmp_path / "run")))
    arguments = [{"TOKENS": tokens, "CONFIG": config}.get(word, word) for word in SCREENS[screen]]
    piped = printed(arguments, None)
    assert max(map(len, piped.splitlines())) > min(WIDTHS)  # else this showed nothing
    for columns in WIDTHS:
        shown = printed(arguments, columns)
        assert too_wide(shown.splitlines(), columns) == []
        assert words(piped) <= words(shown)
        assert "\x1b" not in shown


def test_the_line_of_a_signal_is_no_wider_than_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen(80)
    with open(screen.file, "w", encoding="utf-8") as file, monkeypatch.context() as patch:
        patch.delenv("COLUMNS", raising=False)
        for name in ("stderr", "__stdout__"):
            patch.setattr(sys, name, file)
        print_end(Interrupted(f"stopped on SIGTERM {NOTHING_LOST}"))
    lines = screen.text().splitlines()
    assert too_wide(lines, 80) == []
    assert " ".join(map(str.strip, lines)) == f"{cli.PROGRAM}: stopped on SIGTERM {NOTHING_LOST}"


def test_progress_of_prepare_in_a_pipe_is_a_line_a_minute(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter(range(0, 10_000, 20))
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    with progress.progress_line("preparing") as show:
        for done in range(5):
            show(PrepareProgress(documents=done, text_bytes=0, input_bytes=done, input_bytes_total=5))
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(",")[0] for line in lines] == [
        "preparing: 2 documents",
        "preparing: 4 documents",
        "preparing: 4 documents",
    ]


# -- whole processes


def in_terminal(arguments: list[str], columns: int) -> str:
    """What a process of the command writes to a terminal."""
    screen = Screen(columns)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1", "TERM": "xterm-256color"}
    environment.pop("COLUMNS", None)
    command = [sys.executable, "-m", "megatron_fanformer", *arguments]
    files = {"stdin": subprocess.DEVNULL, "stdout": screen.file, "stderr": screen.file}
    done = subprocess.run(command, cwd=ROOT, env=environment, check=False, **files)
    os.close(screen.file)
    text = screen.text()
    assert done.returncode == 0, text
    return text


def in_pipe(arguments: list[str]) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "megatron_fanformer", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"[\r\x1b]", done.stdout + done.stderr) is None
    return done


@pytest.mark.full  # thirty processes, each of which imports torch and megatron-core
@pytest.mark.timeout(1800)
def test_the_screens_of_a_run(tmp_path: Path) -> None:
    tokens = write_tokens(tmp_path / "tokens")
    config = str(write_config(tmp_path / "config.yaml", small_run(tokens, tmp_path / "run")))
    run, export = str(tmp_path / "run"), str(tmp_path / "export")

    trained = in_pipe(["train", "--config", config]).stdout
    assert "step 20/20" in trained
    for columns in WIDTHS:
        shown = in_terminal(["train", "--config", config, "--training.run_dir", str(tmp_path / str(columns))], columns)
        assert COLOUR.search(shown) is None and "saved" in shown
        lines = [ESCAPES.sub("", line) for line in re.split(r"[\r\n]+", shown)]
        assert too_wide([line for line in lines if not line.startswith(COMMAND)], columns) == []
        assert sum(line.startswith(COMMAND) for line in lines) == 2  # whole, to be copied

    for columns in WIDTHS:
        shown = in_terminal(["convert", run, f"{export}-{columns}", "--to", "hf"], columns)
        assert too_wide(shown.splitlines(), columns) == []
        assert {"names", "round", "logits", "greedy"} <= words(shown)

    for arguments in (
        ["inspect", run],
        ["inspect", f"{export}-80"],
        ["inspect", run, "--step", "3"],
        ["evaluate", run, "--perplexity", f"own={tokens}", "--device", "cpu"],
        ["parity", "--config", config, "--layouts", "tp=2", "dp=2,distributed_optimizer=true", "--steps", "2"],
    ):
        piped = in_pipe(arguments)
        for columns in WIDTHS:
            shown = ESCAPES.sub("", in_terminal(arguments, columns)).replace("\r\n", "\n")
            assert too_wide([part for line in shown.splitlines() for part in line.split("\r")], columns) == []
            assert words(piped.stdout) <= words(shown)
    message = [line.split(": ")[1] for line in piped.stderr.splitlines()]  # of parity, a line a run
    assert message[0] == "one process" and message[-2:] == ["tp=2", "dp=2,distributed_optimizer=true"]
