"""What a run costs beyond its steps: checkpoints on the disk, saves, failures, and the share of its time that trains.

Failures come at random, at a constant rate. Between two saves a run trains for T seconds, and then saves for S; a
failure takes R seconds until training goes on from the last checkpoint. With M seconds between two failures of the
whole run, Daly's exact expectation of all that (A higher order estimate of the optimum checkpoint interval for restart
dumps, 2006, equation 13) is

    M exp(R / M) (exp((T + S) / M) - 1)

which includes failures during saves and restarts. Without a rate at which checkpoints are written, S is not known, and
there are the sizes alone.
"""

import math
from dataclasses import dataclass

from megatron_fanformer.errors import InputError
from megatron_fanformer.planning.gradient_buffers import Chunk, state_bytes, weights
from megatron_fanformer.planning.job import Job
from megatron_fanformer.planning.memory import MAIN_WEIGHT_BYTES
from megatron_fanformer.runtime.layout import ParallelConfig
from megatron_fanformer.sizing.estimate import SECONDS_PER_HOUR, Estimate

SECONDS_PER_MINUTE, GB = 60, 10**9
ENDLESS_SECONDS = 1e15  # 30 million years


def checkpoint_bytes(job: Job) -> int:
    """Return the bytes of a checkpoint's tensors: weights, main weights and the optimizer's states, each once.

    Beside them are some kilobytes a rank of random states, and the table of tensors.
    """
    whole = Chunk(number=0, layers=job.model.num_layers, has_embedding=True, has_head=True)
    held = weights(job.model, ParallelConfig(), whole)
    elements = [weight.elements for weight in held]
    main = 0 if job.precision.dtype == "fp32" else MAIN_WEIGHT_BYTES
    return sum(elements) * (job.element_bytes + main) + state_bytes(held, elements, job.optimizer)


@dataclass(frozen=True, kw_only=True)
class Failures:
    """How often a run fails, and what it loses each time."""

    gpu_hours: float
    """Hours of one GPU between two failures, each of which ends the whole run."""
    restart_minutes: float
    """From a failure to the next step, without the time to load the checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Storage:
    """A run's checkpoints on its disk."""

    checkpoint_bytes: int
    """Bytes of one."""
    saves: int
    """Number of saves in the run."""
    kept: int
    """Number that is kept at its end."""
    disk_bytes: int
    """Bytes at the fullest: those that are kept, and one that is being written."""


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """The expected time of a run with its saves and failures, in seconds."""

    save_seconds: float
    """To write a checkpoint, or to read one."""
    failures: float
    """Number of failures."""
    steps_seconds: float
    """Steps, each counted once."""
    saves_seconds: float
    """Training waits for saves."""
    restarts_seconds: float
    """From failures to the next step."""
    lost_seconds: float
    """Steps and saves that failures undid."""
    best_interval_steps: int
    """Steps between saves that cost least, by Daly's first order; of saves in the background the fewest in which one is
    written."""

    @property
    def total_seconds(self) -> float:
        """Return the whole run's."""
        return self.steps_seconds + self.saves_seconds + self.restarts_seconds + self.lost_seconds

    @property
    def share(self) -> float:
        """Return the goodput: the share of the time in which steps are taken that count."""
        return self.steps_seconds / self.total_seconds


def storage(estimate: Estimate, steps: int) -> Storage:
    """Return what the checkpoints of so many steps take, by the section `checkpoint`."""
    checkpoint, size = estimate.config.checkpoint, checkpoint_bytes(estimate.job)
    saves = -(-steps // (checkpoint.save_interval or steps))  # the last step is saved anyhow
    kept = min(saves, checkpoint.keep or saves)
    return Storage(checkpoint_bytes=size, saves=saves, kept=kept, disk_bytes=size * min(saves, kept + 1))


def goodput(estimate: Estimate, steps: int, bytes_per_second: float, failures: Failures) -> Goodput:
    """Return the time of a run of so many steps with its saves and failures.

    A save in the background lets training go on, unless the next one is due before it is written; a failure before then
    goes back one checkpoint more.

    Args:
        bytes_per_second: at which all ranks together write checkpoints, and read them.

    Raises:
        InputError: the run would never end.
    """
    step, held = estimate.time.seconds, storage(estimate, steps)
    writing = held.checkpoint_bytes / bytes_per_second
    between_failures = failures.gpu_hours * SECONDS_PER_HOUR / estimate.job.world_size
    trained = steps * step / held.saves  # seconds between two saves
    waiting, undone = writing, 0.0
    best = math.sqrt(2 * writing * between_failures) - writing if writing < between_failures / 2 else between_failures
    if estimate.config.checkpoint.async_save:
        waiting, undone = max(0.0, writing - trained), min(writing, trained)
        best = writing
    restart = failures.restart_minutes * SECONDS_PER_MINUTE + writing
    begun_again = (restart + undone) / between_failures
    try:
        expected = between_failures * math.exp(begun_again) * math.expm1((trained + waiting) / between_failures)
    except OverflowError:
        expected = math.inf
    total = held.saves * expected
    if total > ENDLESS_SECONDS:
        raise InputError(_never_ends(trained, writing, between_failures, failures))
    after_failures = -total * math.expm1(-begun_again)  # a failure in the midst of it begins it anew
    restarting = after_failures * restart / (restart + undone)
    return Goodput(
        save_seconds=writing,
        failures=total / between_failures,
        steps_seconds=steps * step,
        saves_seconds=held.saves * waiting,
        restarts_seconds=restarting,
        lost_seconds=total - steps * step - held.saves * waiting - restarting,
        best_interval_steps=max(1, math.ceil(best / step)),
    )


def _never_ends(trained: float, writing: float, between_failures: float, failures: Failures) -> str:
    """Return the refusal of a run that fails, so many seconds apart, before it has trained, saved or begun again."""
    if writing > between_failures:
        return (
            f"a save takes {_duration(writing)}, and the run fails every {_duration(between_failures)}: it would never "
            "end; raise --save-rate or --failure-hours"
        )
    is_long = failures.restart_minutes * SECONDS_PER_MINUTE > between_failures
    shorter = f"--restart-minutes, which is {failures.restart_minutes:g}, and " if is_long else ""
    return (
        f"saves are {_duration(trained)} apart, and the run fails every {_duration(between_failures)}: it would never "
        f"end; lower {shorter}checkpoint.save_interval, or raise --failure-hours"
    )


def _duration(seconds: float) -> str:
    hours = seconds / SECONDS_PER_HOUR
    return f"{hours:,.1f} hours" if hours >= 0.1 else f"{seconds:,.3g} seconds"
