"""Tables and progress; a command whose output nobody reads any more, or has no place."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_fanformer import terminal
from megatron_fanformer.train.metrics import read_metrics
from tests.small_runs import ROOT, small_run, write_config, write_tokens

COMMAND = f"{sys.executable} -m megatron_fanformer"


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


def bash(line: str) -> "subprocess.CompletedProcess[str]":
    """Run a line of the shell's, and exit as its first command did."""
    line = f"cd {ROOT}; {line}; exit ${{PIPESTATUS[0]}}"
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, env={"PATH": "/bin:/usr/bin"})


@pytest.mark.parametrize(
    ("redirected", "stream", "reason"),
    [
        ("2>&1 | head -2", "standard output", "Broken pipe"),
        pytest.param("2>/dev/full >/dev/full", "standard output", "No space left on device", marks=pytest.mark.full),
    ],
)
def test_a_run_goes_on_unread(tmp_path: Path, redirected: str, stream: str, reason: str) -> None:
    """To its end, with its checkpoint; its log file says once that nothing is printed."""
    run = tmp_path / "run"
    values = small_run(
        write_tokens(tmp_path / "tokens"),
        run,
        logging={"log_interval": 1, "folder": str(tmp_path / "logs")},
    )
    done = bash(f"{COMMAND} train --config {write_config(tmp_path / 'config.yaml', values)} {redirected}")
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == (2 if "head" in redirected else 0)
    assert [entry["step"] for entry in read_metrics(run)] == list(range(1, 21))
    assert (run / "checkpoints" / "latest").read_text() == "step-00000020\n"
    log = (tmp_path / "logs" / "rank-00000.log").read_text()
    message = re.findall(
        r"WARNING rank 0 \S+: (standard \w+) cannot be written \((.*)\); further output is dropped", log
    )
    assert message[:1] == [(stream, reason)] and len(message) == len(set(message))


@pytest.mark.parametrize("options", ["--resolved --config examples/tiny-cpu.yaml", "--help"])
def test_a_command_ends_quietly_where_nobody_reads(options: str) -> None:
    done = bash(f"{COMMAND} config {options} | true")
    assert (done.returncode, done.stderr) == (128 + 13, "")  # SIGPIPE, as bash has it


def test_a_result_that_cannot_be_kept_is_an_error() -> None:
    done = bash(f"{COMMAND} config --resolved --config examples/tiny-cpu.yaml > /dev/full")
    assert done.returncode == 1
    assert done.stderr == (
        "megatron-fanformer: standard output cannot be used (No space left on device); free what ran out, or repair "
        "the disk, and start again\n"
    )
