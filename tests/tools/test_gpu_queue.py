"""The queue for a machine with a GPU: what becomes of parts, with stand-ins of them; and rehearsed, as it is."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_fanformer.markdown import as_text
from tests.faults.lives import is_running
from tests.patience import PATIENCE_SECONDS, wait_until
from tests.small_runs import ROOT

TOOL = ROOT / "tools" / "gpu_queue.py"
# Why a test may be skipped where the GPU is the stand-in of a Hopper.
REASONS = ("the GPU is the stand-in", "it needs 10.x", "megatron.training comes with")
CHECKED = ("machine", "tests", "step", "fp8", "fan-activation", "loss-head")
"""The parts that check a machine."""
WAITS = "import time; open('begun', 'w').close(); time.sleep(600)"


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Its modules; they are no package's."""
    monkeypatch.syspath_prepend(str(TOOL.parent))
    import gpu_queue
    from queueing import figures, record

    gpu_queue.Part, gpu_queue.Command, gpu_queue.Goal = record.Part, record.Command, record.Goal
    gpu_queue.of_json, gpu_queue.not_passed, gpu_queue.cases = figures.of_json, figures.not_passed, figures.cases
    yield gpu_queue


@pytest.fixture
def make(queue: Any) -> Callable[..., Any]:
    """A stand-in of a part, which runs lines of Python in its folder."""

    def part(name: str, *lines: str, minutes: float = 1.0, **fields: Any) -> Any:
        def commands(setting: Any) -> list[Any]:
            begin = f"import os; os.chdir({str(setting.folder)!r})\n"
            return [
                queue.Command(arguments=["-S", "-c", begin + line], name=str(number))
                for number, line in enumerate(lines)
            ]

        fields = {"needs": (), "writes": (), "decides": f"what {name} decides", **fields}
        return queue.Part(name=name, minutes=minutes, commands=commands, **fields)

    return part


def writes(**values: object) -> str:
    return f"open('found.json', 'w').write({json.dumps(json.dumps(values))})"


def rows(output: Path) -> dict[str, list[str]]:
    """Of the report by their parts, the first of each."""
    found: dict[str, list[str]] = {}
    for line in (output / "report.md").read_text().splitlines():
        if line.startswith("| ") and not line.startswith("| part"):
            cells = [cell.strip() for cell in line.strip("|").split(" |")]
            found.setdefault(cells[0], cells)
    return found


def test_a_part_that_fails_does_not_keep_the_next_from_running(
    queue: Any, make: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    goal = queue.Goal(name="share", read=queue.of_json("found.json", "share"), at_least=0.58, unit="%", scale=100)
    over = queue.Goal(name="ratio", read=queue.of_json("found.json", "ratio"), at_most=1.03)
    parts = [
        make("first", writes(share=0.5, ratio=1.02), goals=(goal, over)),
        make("second", writes(share=0.6), "raise SystemExit(3)", goals=(goal, over)),
        make("third", "pass", needs=("second",)),
    ]
    assert queue.main(["--output", str(tmp_path)], parts) == 1
    message = capsys.readouterr().out
    page = (tmp_path / "report.md").read_text()
    assert "| first | what first decides | share: 50% | at least 58% | no |" in page
    assert "| first | | ratio: 1.02 | at most 1.03 | yes |" in page
    assert as_text("FAILED: 1 ended with exit code 3") in page
    assert "| second | | share: 60% | at least 58% | yes |" in page  # what there was before it failed
    assert "| second | | ratio: none | at most 1.03 | not judged |" in page
    assert "left out: it needs second" in rows(tmp_path)["third"][2]
    assert page in message


def test_of_commands_side_by_side_each_is_run(queue: Any, make: Callable[..., Any], tmp_path: Path) -> None:
    part = make("tests", "raise SystemExit(1)", "open('ran', 'w').close()", "raise SystemExit(2)", at_once=True)
    assert queue.main(["--output", str(tmp_path)], [part]) == 1
    assert (tmp_path / "tests" / "ran").exists()
    status = json.loads((tmp_path / "tests" / "part.json").read_text())["status"]
    assert "0 ended with exit code 1" in status and "2 ended with exit code 2" in status


@pytest.mark.full  # it waits for limits
def test_a_part_past_its_limit_is_ended_with_all_that_it_started_and_keeps_its_result(
    queue: Any, make: Callable[..., Any], tmp_path: Path
) -> None:
    child = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-S', '-c', {WAITS!r}]); "
    keeps = f"open('child', 'w').write(str(p.pid)); {writes(share=1)}; p.wait()"
    goal = queue.Goal(name="share", read=queue.of_json("found.json", "share"), at_least=1)
    assert queue.main(["--output", str(tmp_path)], [make("long", child + keeps, minutes=1 / 6, goals=(goal,))]) == 1
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
    assert rows(tmp_path).keys() == {"done", "failing", "other"}  # of earlier calls too
    assert counted("--only", "done", "--again") == 1
    assert counted("--again") == 3
    assert counted("--rehearse") == 3  # what was done in earnest is no rehearsal's


def test_what_does_not_fit_into_the_minutes_is_left_out_in_order_of_worth(
    queue: Any, make: Callable[..., Any], tmp_path: Path
) -> None:
    parts = [make("first", "pass", minutes=2), make("second", "pass", minutes=9), make("third", "pass", minutes=2)]
    assert queue.main(["--minutes", "4", "--output", str(tmp_path)], parts) == 0
    found = rows(tmp_path)
    assert "left out: it takes 9.0 minutes, and " in found["second"][2]
    assert found["first"][2] == found["third"][2] == "done"


def test_a_part_that_goes_on_has_its_limit_for_all_calls_together_and_a_closing_each_time(
    queue: Any, make: Callable[..., Any], tmp_path: Path
) -> None:
    def closing(setting: Any) -> list[Any]:
        report = f"open({str(setting.folder / 'reports')!r}, 'a').write('x')"
        return [queue.Command(arguments=["-S", "-c", report], name="report")]

    def called() -> dict[str, Any]:
        assert queue.main(["--output", str(tmp_path)], [part]) == 0
        return json.loads((tmp_path / "claim" / "part.json").read_text())

    # So much of the limit is the closing's that there is none for the rest.
    part = make("claim", WAITS, minutes=2, least_minutes=1, closing=closing, closing_seconds=PATIENCE_SECONDS)
    before, after = called(), called()
    assert before["status"] == "goes on in the next call"
    assert before["seconds"] < after["seconds"]
    assert (tmp_path / "claim" / "reports").read_text() == "xx"
    (tmp_path / "claim" / "part.json").write_text(json.dumps({**after, "seconds": 61}))
    assert called()["seconds"] == 61  # too little is left to begin
    assert (tmp_path / "claim" / "reports").read_text() == "xx"


def test_a_file_that_a_part_requires(queue: Any, make: Callable[..., Any], tmp_path: Path) -> None:
    part = make("claim", "pass", requires=lambda _: [ROOT / "examples" / "none.yaml"])
    assert queue.main(["--output", str(tmp_path)], [part]) == 0
    assert as_text("left out: examples/none.yaml is not there") in rows(tmp_path)["claim"][2]


def test_a_signal_ends_the_part_and_the_report_is_written(tmp_path: Path) -> None:
    script = f"""
import sys
sys.path.insert(0, {str(TOOL.parent)!r})
import gpu_queue
from queueing.record import Command, Part
def commands(setting):
    return [Command(arguments=["-S", "-c", "import os; os.chdir(%r); " % str(setting.folder) + {WAITS!r}], name="0")]
parts = [Part(name=n, decides=n, minutes=9, commands=commands, writes=(), needs=()) for n in ("one", "two")]
sys.exit(gpu_queue.main(["--output", {str(tmp_path)!r}], parts))
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (tmp_path / "one" / "begun").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    message, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 5
    assert rows(tmp_path)["one"][2] == "interrupted"
    assert not (tmp_path / "two").exists() and "report.md" in message


def test_the_parts_are_in_order_state_rules_and_come_after_what_they_need(queue: Any) -> None:
    known: list[str] = []
    for part in queue.PARTS:
        assert set(part.needs) <= set(known)
        assert part.figures is not None or part.goals
        assert all(re.fullmatch(r"(at least|at most) .+", goal.rule) for goal in part.goals)
        known.append(part.name)
    assert known[:6] == ["machine", "new-tests", "step", "micro-batches", "fp8", "text"]


@pytest.mark.parametrize(
    ("last", "has_failed"),
    [
        ("==== 2 passed, 16 deselected, 33 warnings in 44.53s ====", False),
        ("==== 12 passed in 63.21s (0:01:03) ====", False),
        ("==== 2 skipped in 3.21s ====", False),
        ("==== 1 failed, 3 passed in 3.21s ====", True),
        ("==== 3 passed, 1 error in 3.21s ====", True),
        ("collected 3 items", True),  # ended before it was done
    ],
)
def test_what_a_log_of_tests_says(queue: Any, tmp_path: Path, last: str, has_failed: bool) -> None:
    (tmp_path / "tests.log").write_text(f"==== test session starts ====\n{last}\n")
    setting = queue.Setting(folder=tmp_path)
    assert queue.not_passed("tests.log")(setting) == has_failed


def test_a_case_is_reported(queue: Any, tmp_path: Path) -> None:
    case = {"case": "F", "step_seconds": 0.25, "model_flops_per_second": 5.1e14, "peak_memory_bytes": 45.5e9}
    (tmp_path / "step.json").write_text(json.dumps({"cases": [case]}))
    [figure] = queue.cases(queue.Setting(folder=tmp_path))
    assert figure.shown == "0.2500 s, 510.0 TFLOP/s, 45.5 GB" and figure.verdict == ""


def test_the_page_has_the_limit_of_the_check_of_a_machine(queue: Any) -> None:
    page = (ROOT / "docs" / "gpu.md").read_text()
    minutes = sum(part.minutes for part in queue.PARTS if part.name in CHECKED)
    assert f"--only {' '.join(name for name in CHECKED if name != 'machine')}\n" in page  # which the others need
    assert f"The last line is the check of a machine, in at most {math.ceil(minutes)} minutes." in page


def test_arguments_that_are_wrong(queue: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["--site", str(tmp_path / "none")], "is no folder"),
        (["--only", "none"], "invalid choice"),
    ):
        with pytest.raises(SystemExit) as refused:
            queue.main(arguments)
        assert refused.value.code == 2
        assert message in capsys.readouterr().err


@pytest.mark.full
def test_what_the_site_folder_lacks_is_named(tmp_path: Path) -> None:
    done = _run("--only", "machine", "--site", str(tmp_path), "--output", str(tmp_path / "queue"))
    assert done.returncode == 1
    message = (tmp_path / "queue" / "machine" / "machine.log").read_text()
    assert "add to the site folder: transformer_engine.pytorch" in message


@pytest.mark.full
@pytest.mark.timeout(3600)  # a dozen minutes on two idle cores
def test_the_check_of_a_machine_rehearsed(tmp_path: Path) -> None:
    done = _run("--rehearse", "--only", *CHECKED, "--output", str(tmp_path))
    files = [file.stem for file in (ROOT / "tests" / "gpu").glob("test_*.py")]
    logs = {file: (tmp_path / "tests" / f"{file}.log").read_text() for file in files}
    assert done.returncode == 0, f"{done.stdout}\n{''.join(logs.values())[-20_000:]}"
    statuses = {name: json.loads((tmp_path / name / "part.json").read_text())["status"] for name in CHECKED}
    assert statuses == dict.fromkeys(CHECKED, "done")
    assert json.loads((tmp_path / "machine" / "machine.json").read_text())["gpu"] == "stand-in"
    skipped = [line for log in logs.values() for line in re.findall(r"^SKIPPED \[\d+\] (.*)$", log, re.MULTILINE)]
    assert [line for line in skipped if not any(reason in line for reason in REASONS)] == []
    for part in ("step", "fp8"):
        found = json.loads((tmp_path / part / "step.json").read_text())
        assert found["failed"] == [] and len(found["cases"]) >= 4
    for file in ("fan-activation/fan.jsonl", "loss-head/head.jsonl"):
        assert [json.loads(line) for line in (tmp_path / file).read_text().splitlines()]


def _run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    # Test processes hide GPUs, this one too.
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "0"}
    command = [sys.executable, str(TOOL), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
