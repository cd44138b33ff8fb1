"""Tables and progress; a command whose output nobody reads any more."""

import subprocess
import sys
from pathlib import Path

from megatron_fanformer import terminal
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


def bash(line: str) -> "subprocess.CompletedProcess[str]":
    """Run a line of the shell's, and exit as its first command did."""
    line = f"cd {ROOT}; {line}; exit ${{PIPESTATUS[0]}}"
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, env={"PATH": "/bin:/usr/bin"})


def test_a_run_goes_on_unread(tmp_path: Path) -> None:
    run = tmp_path / "run"
    values = small_run(write_tokens(tmp_path / "tokens"), run, logging={"log_interval": 1})
    done = bash(f"{COMMAND} train --config {write_config(tmp_path / 'config.yaml', values)} | head -2")
    assert (len(done.stdout.splitlines()), done.returncode, done.stderr) == (2, 0, "")
    assert (run / "checkpoints" / "latest").read_text() == "step-00000020\n"


def test_a_command_ends_quietly_where_nobody_reads() -> None:
    done = bash(f"{COMMAND} config --resolved --config examples/tiny-cpu.yaml | true")
    assert (done.returncode, done.stderr) == (128 + 13, "")
