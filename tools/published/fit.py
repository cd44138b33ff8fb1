"""Fits the constants of the step time to published runs; each constant stays near its prior.

Least squares of log(predicted / measured) by Gauss-Newton with a numerical Jacobian. A constant is its prior times
factors, whose logarithms are pulled towards 0: one factor for all chips, and one more for each architecture for the
rates of products and attention. Every source has the same total weight, however many runs it has.
"""

import dataclasses
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from published.rows import Row

from megatron_fanformer.errors import InputError
from megatron_fanformer.plan.machines import Machine, known_machines

ROW_DEVIATION = 0.05  # standard deviation of log(predicted / measured) of a run
RUNS_A_SOURCE = 4  # a source weighs as so many independent runs, since its runs share software and assumptions
STEP, LARGEST_STEP, CONVERGED = 1e-3, 0.3, 1e-3  # in the logarithms
ITERATIONS = 20


class Factor(NamedTuple):
    """A constant to be fitted."""

    field: str
    """The field of `Machine`, or of one of its links, such as `domain.efficiency`."""
    deviation: float
    """Standard deviation of the factor's logarithm, before any run is seen."""
    machines: tuple[str, ...] = ()
    """The machines to which the factor applies; by default all."""


AMPERE, HOPPER, BLACKWELL, ULTRA = ("a100",), ("h100", "h200"), ("b200", "gb200", "gb300"), ("gb300",)
ARCHITECTURES = {
    **dict.fromkeys(AMPERE, "A100"),
    **dict.fromkeys(HOPPER, "Hopper"),
    **dict.fromkeys(BLACKWELL, "Blackwell"),
    **dict.fromkeys(ULTRA, "Blackwell Ultra"),
}

FACTORS = (
    Factor("product_efficiency", 0.10),
    *(Factor("product_efficiency", 0.10, names) for names in (AMPERE, HOPPER, BLACKWELL)),
    *(Factor("fp8_product_efficiency", 0.15, names) for names in (HOPPER, BLACKWELL, ULTRA)),
    Factor("attention_efficiency", 0.20),
    *(Factor("attention_efficiency", 0.20, names) for names in (BLACKWELL, ULTRA)),
    Factor("memory_efficiency", 0.10),
    Factor("domain.efficiency", 0.15),
    Factor("network.efficiency", 0.20),
    Factor("overlap", 0.20),
    Factor("layer_seconds", 0.40),
    Factor("collective_seconds", 0.40),
    Factor("step_seconds", 0.40),
)

# What is known beforehand. Products: for the A100 between the best shape's 0.86 (ml-engineering's table of maximum
# achievable matmul FLOPS) and the 0.74 of a model's shapes on the card with a lower power limit (SimuMax,
# a100_pcie.json); for the H100 0.70 (SimuMax, h100_nvlink.json; best shape 0.80); for the B200 0.50 (SimuMax measured
# the shapes of such models, b200_bf16_ceperm.json; best shape 0.78). FP8: between 0.60 and 0.65 (the same files).
# Attention: of causal FLOPs, half of what SimuMax's B200 file has of all, backward included. Memory and NVLink: SimuMax
# has 0.67 to 0.85, and 0.60 to 0.74. Collective: 22 to 26 us on the B200 there.
COMMON = {
    "layer_seconds": 3e-3,
    "step_seconds": 10e-3,
    "collective_seconds": 20e-6,
    "overlap": 0.8,
    "network.efficiency": 0.8,
}
RATES = ("product_efficiency", "attention_efficiency", "memory_efficiency", "domain.efficiency")
H100 = dict(zip((*RATES, "fp8_product_efficiency"), (0.70, 0.45, 0.80, 0.75, 0.60), strict=True))
B200 = dict(zip((*RATES, "fp8_product_efficiency"), (0.50, 0.38, 0.70, 0.70, 0.45), strict=True))
A100 = dict(zip(RATES, (0.80, 0.55, 0.80, 0.75), strict=True))
PRIORS = {"a100": A100, "h100": H100, "h200": H100, "b200": B200, "gb200": B200, "gb300": B200}


def prior_machines() -> dict[str, Machine]:
    """Return the known machines with the priors of their constants."""
    machines = {}
    for name, priors in PRIORS.items():
        machine = known_machines()[name]
        for field, value in {**COMMON, **priors}.items():
            machine = _with(machine, field, value)
        machines[name] = machine
    return machines


def fit(rows: Sequence[Row]) -> dict[str, Machine]:
    """Return the machines with their constants fitted to the runs."""
    return _scaled(prior_machines(), fitted_logs(rows, np.zeros(len(FACTORS))))


def leave_one_out(rows: Sequence[Row]) -> dict[str, dict[str, Machine]]:
    """Return, for each family, the machines fitted to the runs of all other families."""
    families = dict.fromkeys(row.family for row in rows)
    if len(families) == 1:
        raise InputError(f"all runs are of {rows[0].family}; to leave it out, another source is needed")
    priors, start = prior_machines(), fitted_logs(rows, np.zeros(len(FACTORS)))
    return {
        family: _scaled(priors, fitted_logs([row for row in rows if row.family != family], start))
        for family in families
    }


def fitted_logs(rows: Sequence[Row], start: np.ndarray) -> np.ndarray:
    """Return the logarithms of the fitted factors.

    Args:
        start: the logarithms from which to iterate, such as the solution for nearly the same runs.
    """
    priors = prior_machines()
    counts = Counter(row.family for row in rows)
    weights = np.array([math.sqrt(RUNS_A_SOURCE / counts[row.family]) / ROW_DEVIATION for row in rows])
    pull = np.array([1 / factor.deviation for factor in FACTORS])
    logs = start

    def residuals(at: np.ndarray) -> np.ndarray:
        machines = _scaled(priors, at)
        return weights * np.array([math.log(row.predict(machines[row.gpu]) / row.step_seconds) for row in rows])

    for _ in range(ITERATIONS):
        now = residuals(logs)
        columns = [(residuals(logs + STEP * unit) - now) / STEP for unit in np.eye(len(FACTORS))]
        jacobian = np.vstack([np.column_stack(columns), np.diag(pull)])
        step, *_ = np.linalg.lstsq(jacobian, -np.concatenate([now, pull * logs]), rcond=None)
        logs = logs + np.clip(step, -LARGEST_STEP, LARGEST_STEP)
        if np.abs(step).max() < CONVERGED:
            break
    return logs


def constant_utilization(rows: Sequence[Row], row: Row) -> float:
    """Return the seconds of a run's step at the mean share of the peak that other runs reach.

    The other runs are those of the same chip and number format, or all if there are none.
    """
    alike = [other for other in rows if other.format == row.format] or rows
    share = statistics.mean(math.log(other.flops_per_gpu / other.step_seconds / _peak(other)) for other in alike)
    return row.flops_per_gpu / (_peak(row) * math.exp(share))


def _peak(row: Row) -> float:
    return known_machines()[row.gpu].flops_per_second(row.format[1])


def _scaled(machines: Mapping[str, Machine], logs: np.ndarray) -> dict[str, Machine]:
    """Return the machines with each factor applied."""
    scaled = dict(machines)
    for factor, log in zip(FACTORS, logs, strict=True):
        for name in factor.machines or machines:
            owner, _, field = factor.field.rpartition(".")
            now = getattr(getattr(scaled[name], owner) if owner else scaled[name], field)
            scaled[name] = _with(scaled[name], factor.field, now * math.exp(log))
    return scaled


def _with(machine: Machine, field: str, value: float) -> Machine:
    """Return a machine with a constant replaced; a share is limited to 1."""
    owner, _, name = field.rpartition(".")
    value = value if name.endswith("seconds") else min(1.0, value)
    if not owner:
        return dataclasses.replace(machine, **{name: value})  # type: ignore[arg-type]
    return dataclasses.replace(machine, **{owner: dataclasses.replace(getattr(machine, owner), **{name: value})})
