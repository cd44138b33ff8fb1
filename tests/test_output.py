"""What becomes of a command whose output nobody reads any more, or has no place."""

import io
import os
import re
import select
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_fanformer.output import guarded
from megatron_fanformer.training.metrics import read_metrics
from tests.small_runs import ROOT, small_run, write_config, write_tokens

COMMAND = f"{sys.executable} -m megatron_fanformer"


def bash(line: str) -> "subprocess.CompletedProcess[str]":
    """Run a line of the shell's, and exit as its first command did."""
    line = f"cd {ROOT}; {line}; exit ${{PIPESTATUS[0]}}"
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, env={"PATH": "/bin:/usr/bin"})


@pytest.mark.parametrize(
    ("redirected", "stream", "reason"),
    [
        ("2>&1 | head -2", "standard output", "Broken pipe"),
        pytest.param("2>/dev/full >/dev/full", "standard output", "No space left on device", marks=pytest.mark.full),
        pytest.param(">&- 2>&-", None, None, marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_run_goes_on_unread(
    tmp_path: Path, redirected: str, stream: str | None, reason: str | None, ranks: int
) -> None:
    """To its end, with its checkpoint; its log file says once that nothing is printed."""
    run = tmp_path / "run"
    values = small_run(
        write_tokens(tmp_path / "tokens"),
        run,
        parallel={"tensor_model_parallel_size": ranks},
        logging={"log_interval": 1, "folder": str(tmp_path / "logs")},
    )
    done = bash(f"{COMMAND} train --config {write_config(tmp_path / 'config.yaml', values)} {redirected}")
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == (2 if "head" in redirected else 0)
    assert [entry["step"] for entry in read_metrics(run)] == list(range(1, 21))
    assert (run / "checkpoints" / "latest").read_text() == "step-00000020\n"
    log = (tmp_path / "logs" / "rank-00000.log").read_text()
    message = re.findall(
        r"WARNING rank 0 \S+: (standard \w+) cannot be written \((.*)\); what is printed is dropped", log
    )
    assert message[:1] == ([(stream, reason)] if stream else []) and len(message) == len(set(message))


def test_input_that_was_closed_is_empty() -> None:
    code = "import sys; from megatron_fanformer.output import guard_output; guard_output(); print([*sys.stdin.buffer])"
    done = bash(f"{sys.executable} -c {shlex.quote(code)} <&-")
    assert (done.stdout, done.stderr) == ("[]\n", "")


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


def test_output_that_is_full_and_does_not_block_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As whoever shares the terminal or the pipe may have set it."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    read, wait = [], select.select

    def reading(*arguments: Any) -> Any:
        read.append(os.read(reader, 1 << 20))
        return wait(*arguments)

    monkeypatch.setattr(select, "select", reading)
    stream, text = guarded(None, writer), "a line\n" * 100_000  # ten times what a pipe holds
    print(text, end="", file=stream, flush=True)
    stream.close()
    os.close(writer)
    with open(reader, "rb") as rest:
        assert b"".join([*read, rest.read()]).decode() == text and len(read) > 1


def test_without_buffers_each_line_is_written_at_once() -> None:
    """As ranks are started, by `python -u`, whose streams do without."""
    reader, writer = os.pipe()
    with open(os.devnull, "wb", buffering=0) as file, open(reader, "rb", buffering=0) as output:
        unbuffered = io.TextIOWrapper(file, write_through=True)  # as Python makes them
        stream = guarded(unbuffered, writer)
        print("a line", file=stream)
        assert select.select([output], [], [], 0)[0] and output.read(100) == b"a line\n"
    stream.close()
    os.close(writer)
