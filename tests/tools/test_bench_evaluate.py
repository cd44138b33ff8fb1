"""The benchmark of evaluation on a model of a few thousand weights."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.evaluation.made_up import made_up_tasks, write_made_up
from tests.small_runs import SEQ_LENGTH, VOCAB_SIZE, small_run, write_config


@pytest.mark.full
def test_the_rates_are_of_the_requests_own_tokens(
    run_tool: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path / "run.yaml", small_run("none", tmp_path / "run"))
    tasks = made_up_tasks(VOCAB_SIZE, SEQ_LENGTH + 1, documents=4)
    requests = write_made_up(tmp_path / "some.requests", tasks, tokenizer_sha256="0" * 64, context_length=SEQ_LENGTH)
    report = tmp_path / "report.json"
    options = ["--requests", requests, "--tasks", "copa", "hellaswag", "--config", str(config), "--rounds", "2"]
    assert run_tool("bench_evaluate", *options, "--device", "cpu", "--json", str(report)) == 0
    found = json.loads(report.read_text())
    asked = [tasks["copa"], tasks["hellaswag"], tasks["hellaswag"].unconditional]
    assert found["requests"] == 4 * (2 + 4 + 4)
    assert found["tokens"] == sum(len(task.ids) - len(task) for task in asked if task is not None)
    assert len(found["rounds"]) == 2
    for each in found["rounds"]:
        assert each["scored_tokens_per_second"] > 0 and each["forward_tokens_per_second"] > 0
    assert f"{found['ratio']:.1%}" in capsys.readouterr().out
