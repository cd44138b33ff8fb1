"""A logger of a file and an entry, in a run that is stopped, resumed, and goes back; and the metrics that it gets."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest

from megatron_fanformer.train.logger_kinds import Logger, Start
from megatron_fanformer.train.loggers import LOGGERS
from megatron_fanformer.train.metrics import METRIC_TABLE, metric_of, read_metrics
from tests.small_runs import small_run, write_tokens
from tests.train.test_recovery import Poison, train_poisoned

STEPS = 12


class LossFile(Logger):
    """A line a step: its loss, or why it has none."""

    files = ("losses.txt",)
    begun_after: ClassVar[list[int]] = []

    def __init__(self, start: Start) -> None:
        self.begun_after.append(start.step)
        file = start.run / "losses.txt"
        lines = file.read_text().splitlines() if file.exists() else []
        self._file = file.open("w")
        self._file.writelines(f"{line}\n" for line in lines if int(line.split()[0]) <= start.step)

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        print(step, metrics.get("loss", "skipped"), file=self._file)

    def close(self, *, failed: bool = False) -> None:
        self._file.close()


def train_with_it(values: dict[str, Any], bad: tuple[int, ...]) -> tuple[str | None, list[int]]:
    """Run a configuration with it and bad steps; what ended the run, if anything, and after which steps it began."""
    LossFile.begun_after.clear()
    with mock.patch.dict(LOGGERS, losses=LossFile):
        return train_poisoned(values, Poison(bad)), list(LossFile.begun_after)


@pytest.fixture(scope="module")
def run(run_on_ranks: Callable[..., list[Any]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stopped after step 4, resumed, sent back to step 5 by three bad steps, and complete."""
    folder = tmp_path_factory.mktemp("logged")
    tokens = write_tokens(folder / "random")
    values = small_run(
        tokens,
        folder / "run",
        parallel={"data_parallel_size": 2},
        data={"valid_data": {"held-out": [tokens]}},
        training={"train_iters": STEPS, "exit_interval": 4, "eval_interval": 4, "eval_iters": 1},
        checkpoint={"save_interval": 5},
        logging={"norm_interval": 1, "phase_interval": 1, "straggler_interval": 4},
    )
    assert run_on_ranks(2, train_with_it, values, ()) == [(None, [0]), (None, [])]
    values["training"]["exit_interval"] = None
    assert run_on_ranks(2, train_with_it, values, (7, 8, 9)) == [(None, [4, 5]), (None, [])]
    return folder / "run"


def test_it_has_every_step_once(run: Path) -> None:
    expected = [f"{entry['step']} {entry.get('loss', 'skipped')}" for entry in read_metrics(run)]
    assert (run / "losses.txt").read_text().splitlines() == expected
    assert [line.split()[0] for line in expected if "skipped" in line] == ["7", "8", "9"]
    assert len(expected) == STEPS


def test_every_metric_of_a_run_is_in_the_table(run: Path) -> None:
    """Tasks and perplexity sets: `test_evaluation.py`."""
    found = {name: metric_of(name) for entry in read_metrics(run) for name in entry}
    assert [name for name, metric in found.items() if metric is None] == []
    absent = {metric.name for metric in METRIC_TABLE} - {metric.name for metric in found.values() if metric}
    assert {name for name in absent if not name.startswith("eval/")} == {
        "model_flops_utilization",  # of no chip here
        "masked_share",  # `test_stages.py`
        "z_loss",  # `test_trainer.py`
    }
