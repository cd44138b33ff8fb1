"""The queue for a machine with a GPU: statuses of parts, with stand-ins of them; and rehearsed, as it is."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_fanformer.markdown import as_text
from tests.patience import PATIENCE_SECONDS, is_running, wait_until
from tests.small_runs import ROOT

TOOL = ROOT / "tools" / "gpu_queue.py"
# Why a test may be skipped where the GPU is the stand-in of a Hopper.
REASONS = ("the GPU is the stand-in", "it needs 10.x", "megatron.training comes with")
CHECKED = ("machine", "tests", "step", "fp8", "fan-activation", "loss-head")  # parts that check a machine
WAITS = "import time; open('begun', 'w').close(); time.sleep(600)"


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(TOOL.parent))
    import gpu_queue

    yield gpu_queue


@pytest.fixture
def make(queue: Any) -> Callable[..., Any]:
    """Make a stand-in of a part, which runs lines of Python in its folder."""

    def part(name: str, *lines: str, minutes: float = 1.0, **fields: Any) -> Any:
        begin = "import os; os.chdir('FOLDER')\n"
        commands = {str(number): shlex.join(["-S", "-c", begin + line]) for number, line in enumerate(lines)}
        fields = {"needs": (), "decides": f"what {name} decides", "rehearsed": commands, **fields}
        return queue.Part(name=name, minutes=minutes, commands=commands, **fields)

    return part


def writes(**values: object) -> str:
    return f"open('found.json', 'w').write({json.dumps(json.dumps(values))})"


def statuses(output: Path) -> dict[str, str]:
    return {file.parent.name: json.loads(file.read_text())["status"] for file in output.glob("*/part.json")}


def test_a_part_that_fails_does_not_keep_the_next_from_running(
    queue: Any, make: Callable[..., Any], tmp_path: Path
) -> None:
    share, ratio = ["found.json", "share"], ["found.json", "ratio", {"of": 1}, "two"]
    goals = [
        {"name": "share", "figure": share, "at_least": 0.58},
        {"name": "ratio", "figure": ratio, "over": share, "at_most": 3},
    ]
    parts = [
        make("first", writes(share=0.5, ratio=[{"of": 1, "two": 1.0}, {"of": 2}]), goals=goals),
        make("second", writes(share=0.6), "raise SystemExit(3)", goals=goals),
        make("third", "pass", needs=("second",)),
    ]
    assert queue.main(["--output", str(tmp_path)], parts) == 1
    page = (tmp_path / "report.md").read_text()
    assert f"| first | | {as_text('share: 0.5')} | at least 0.58 | no |" in page
    assert "| first | | ratio: 2 | at most 3 | yes |" in page
    assert as_text("FAILED: 1 ended with exit code 3") in page
    assert "| second | | share: 0.6 | at least 0.58 | yes |" in page  # the figures of before it failed
    assert "| second | | ratio: none | at most 3 | not judged |" in page
    assert "left out: it needs second" in page


@pytest.mark.full  # it waits for limits
def test_a_part_past_its_limit_is_ended_with_all_that_it_started_and_keeps_its_result(
    queue: Any, make: Callable[..., Any], tmp_path: Path
) -> None:
    child = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-S', '-c', {WAITS!r}]); "
    keeps = f"open('child', 'w').write(str(p.pid)); {writes(share=1)}; p.wait()"
    goals = [{"name": "share", "figure": ["found.json", "share"], "at_least": 1}]
    assert queue.main(["--output", str(tmp_path)], [make("long", child + keeps, minutes=1 / 6, goals=goals)]) == 1
    page = (tmp_path / "report.md").read_text()
    assert "ended at its limit" in page and "| long | | share: 1 | at least 1 | yes |" in page
    child_pid = int((tmp_path / "long" / "child").read_text())
    wait_until(lambda: not is_running(child_pid))  # gone, or left for its new parent to reap


def test_parts_that_are_done_are_kept_unless_again(queue: Any, make: Callable[..., Any], tmp_path: Path) -> None:
    counts = "open('../count', 'a').write('x')"
    parts = [make("done", counts), make("failing", counts + "; raise SystemExit(1)"), make("other", counts)]

    def counted(*arguments: str) -> int:
        (tmp_path / "count").write_text("")
        queue.main([*arguments, "--output", str(tmp_path)], parts)
        return len((tmp_path / "count").read_text())

    assert counted() == 3
    assert counted() == 1  # the one that failed
    assert counted("--only", "done") == 0
    page = (tmp_path / "report.md").read_text()
    assert all(f"| {name} |" in page for name in ("done", "failing", "other"))  # of earlier calls too
    assert counted("--only", "done", "--again") == 1
    assert counted("--again") == 3
    assert counted("--rehearse") == 3  # what was done in earnest is no rehearsal's


def test_a_part_goes_on_in_the_next_call(queue: Any, make: Callable[..., Any], tmp_path: Path) -> None:
    counts = "open('count', 'a').write('x'); import time; time.sleep(60)"
    part = make("claim", counts, minutes=0.05, goes_on=True)
    assert queue.main(["--output", str(tmp_path)], [part]) == 0
    part = make("claim", counts, minutes=0.1, goes_on=True)
    assert queue.main(["--output", str(tmp_path)], [part]) == 0
    assert (tmp_path / "claim" / "count").read_text() == "xx"
    assert statuses(tmp_path) == {"claim": "goes on in the next call"}
    assert json.loads((tmp_path / "claim" / "part.json").read_text())["seconds"] >= 6
    assert queue.main(["--output", str(tmp_path)], [part]) == 0  # its limit is used up
    assert (tmp_path / "claim" / "count").read_text() == "xx"


def test_a_signal_ends_the_part_and_the_report_is_written(tmp_path: Path) -> None:
    script = f"""
import shlex, sys
sys.path.insert(0, {str(TOOL.parent)!r})
import gpu_queue
line = shlex.join(["-S", "-c", "import os; os.chdir('FOLDER'); " + {WAITS!r}])
parts = [gpu_queue.Part(name=n, decides=n, minutes=9, commands={{"0": line}}, needs=()) for n in ("one", "two")]
sys.exit(gpu_queue.main(["--output", {str(tmp_path)!r}], parts))
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    wait_until((tmp_path / "one" / "begun").exists, process)
    process.send_signal(signal.SIGTERM)
    message, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 5
    assert statuses(tmp_path) == {"one": "interrupted"} and "report.md" in message


def test_the_parts_come_after_what_they_need(queue: Any) -> None:
    known: list[str] = []
    for part in queue.PARTS:
        assert set(part.needs) <= set(known)
        assert part.commands or part.cases or part.tests
        assert all(re.fullmatch(r"(at least|at most) .+", queue.rule_of(goal)) for goal in part.goals)
        assert all({*goal.get("steps", ())} <= part.cases.keys() for goal in part.goals)
        known.append(part.name)
    assert f"--only {' '.join(name for name in CHECKED if name != 'machine')}\n" in (ROOT / "docs/gpu.md").read_text()


@pytest.mark.full
@pytest.mark.timeout(3600)  # a dozen minutes on two idle cores
def test_the_check_of_a_machine_rehearsed(tmp_path: Path) -> None:
    command = [sys.executable, str(TOOL), "--rehearse", "--only", *CHECKED, "--output", str(tmp_path)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "0"}  # test processes hide GPUs, this one too
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    files = [file.stem for file in (ROOT / "tests" / "gpu").glob("test_*.py")]
    logs = {file: (tmp_path / "tests" / f"{file}.log").read_text() for file in files}
    assert done.returncode == 0, f"{done.stdout}\n{''.join(logs.values())[-20_000:]}"
    assert statuses(tmp_path) == dict.fromkeys(CHECKED, "done")
    assert json.loads((tmp_path / "machine" / "machine.json").read_text())["gpu"] == "stand-in"
    skipped = [line for log in logs.values() for line in re.findall(r"^SKIPPED \[\d+\] (.*)$", log, re.MULTILINE)]
    assert [line for line in skipped if not any(reason in line for reason in REASONS)] == []
    for part in ("step", "fp8"):
        found = json.loads((tmp_path / part / "step.json").read_text())
        assert found["failed"] == [] and len(found["cases"]) >= 4
    for file in ("fan-activation/fan.jsonl", "loss-head/head.jsonl"):
        assert [json.loads(line) for line in (tmp_path / file).read_text().splitlines()]
