"""What the trainings of a report say of one another: losses by seed, and each one against that in bf16."""

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from fp8_study.trainings import BASES, Arm

LAST_STEPS = 50  # whose mean is the training loss that is compared

Report = dict[str, Any]


class Differences(NamedTuple):
    """A loss of a training minus that of its base with the same seed: the same initial weights and samples."""

    by_seed: list[float]

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return statistics.fmean(self.by_seed)

    @property
    def standard_error(self) -> float:
        """Of the mean; NaN for one seed."""
        return deviation(self.by_seed) / len(self.by_seed) ** 0.5


def trainings(report: Report, arm: Arm, recipe: str | None = None) -> list[dict[str, Any]]:
    """An arm's trainings, in the order of their seeds; those in FP8 by the report's own recipe if none is named."""
    wanted = (recipe or report["recipe"]) if arm.fp8 else None
    found = [each for each in report["trainings"] if (each["arm"], each["recipe"]) == (arm.name, wanted)]
    return sorted(found, key=lambda training: training["seed"])


def last_loss(training: dict[str, Any]) -> float:
    """The mean training loss of the last steps."""
    return statistics.fmean(training["losses"][-LAST_STEPS:])


def validation_loss(training: dict[str, Any]) -> float:
    """At the end."""
    return training["validation"]


def differences(report: Report, arm: Arm, loss: Any, recipe: str | None = None) -> Differences:
    """Of an arm from its base, by a loss: `last_loss` or `validation_loss`."""
    base = {training["seed"]: loss(training) for training in trainings(report, BASES[arm])}
    return Differences([loss(training) - base[training["seed"]] for training in trainings(report, arm, recipe)])


def deviation(values: Sequence[float]) -> float:
    """The standard deviation of a sample; NaN for one number."""
    return statistics.stdev(values) if len(values) > 1 else float("nan")
