"""What the trainings of a report say of one another: losses by seed, and each FP8 one against its own bf16."""

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from fp8_study.trainings import IN_BF16, Arm

LAST_STEPS = 50  # whose mean is the training loss that is compared

Report = dict[str, Any]


class Differences(NamedTuple):
    """A loss of an FP8 training minus that of the bf16 one with the same seed, and how much seeds change the latter."""

    by_seed: list[float]
    seed_deviation: float
    """Of the bf16 trainings' losses, over the seeds; NaN for one seed."""

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return statistics.fmean(self.by_seed)

    @property
    def standard_error(self) -> float:
        """Of the mean; NaN for one seed."""
        return deviation(self.by_seed) / len(self.by_seed) ** 0.5


def trainings(report: Report, arm: Arm, recipe: str | None = None) -> list[dict[str, Any]]:
    """An arm's trainings, in the order of their seeds; by the report's own recipe if none is named."""
    found = [
        training
        for training in report["trainings"]
        if training["arm"] == arm.name and training["recipe"] == (recipe or report["recipe"])
    ]
    return sorted(found, key=lambda training: training["seed"])


def last_loss(training: dict[str, Any]) -> float:
    """The mean training loss of the last steps."""
    return statistics.fmean(training["losses"][-LAST_STEPS:])


def validation_loss(training: dict[str, Any]) -> float:
    """At the end."""
    return training["validation"]


def differences(report: Report, arm: Arm, loss: Any, recipe: str | None = None) -> Differences:
    """Of an FP8 arm from its bf16 one, by a loss: `last_loss` or `validation_loss`."""
    in_bf16 = {training["seed"]: loss(training) for training in trainings(report, IN_BF16[arm])}
    by_seed = [loss(training) - in_bf16[training["seed"]] for training in trainings(report, arm, recipe)]
    return Differences(by_seed, deviation(list(in_bf16.values())))


def deviation(values: Sequence[float]) -> float:
    """The standard deviation of a sample; NaN for one number."""
    return statistics.stdev(values) if len(values) > 1 else float("nan")
