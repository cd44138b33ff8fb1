"""What a run costs beyond its steps: checkpoints on the disk, and the share of its time that failures leave it."""

import math

from megatron_fanformer.planning.gradient_buffers import Chunk, state_bytes, weights
from megatron_fanformer.planning.job import Job
from megatron_fanformer.planning.memory import MAIN_WEIGHT_BYTES
from megatron_fanformer.runtime.layout import ParallelConfig
from megatron_fanformer.sizing.estimate import SECONDS_PER_HOUR, Estimate
from megatron_fanformer.sizing.request import PlanRequest


def checkpoint_bytes(job: Job) -> int:
    """Return the bytes of a checkpoint's tensors: weights, main weights and the optimizer's states, each once."""
    whole = Chunk(number=0, layers=job.model.num_layers, has_embedding=True, has_head=True)
    held = weights(job.model, ParallelConfig(), whole)
    elements = [weight.elements for weight in held]
    main = 0 if job.precision.dtype == "fp32" else MAIN_WEIGHT_BYTES
    return sum(elements) * (job.element_bytes + main) + state_bytes(held, elements, job.optimizer)


def storage(estimate: Estimate, steps: int) -> dict[str, int]:
    """Return the bytes of a checkpoint, how many are saved and kept, and the disk at its fullest, one being written."""
    checkpoint, size = estimate.config.checkpoint, checkpoint_bytes(estimate.job)
    saves = -(-steps // (checkpoint.save_interval or steps))  # the last step is saved anyhow
    kept = min(saves, checkpoint.keep or saves)
    return {"checkpoint_bytes": size, "saves": saves, "kept": kept, "disk_bytes": size * min(saves, kept + 1)}


def goodput(estimate: Estimate, request: PlanRequest, held: dict[str, int]) -> dict[str, float] | None:
    """Return a save's seconds, the steps between saves that cost least (Young and Daly), and the share of the time that
    trains, with failures at a constant rate (Daly 2006, equation 13); None where no rate of saves is known.

    Saves in the background are counted as free; the cheapest interval is then the least in which one is written.
    """
    if not request.save_bytes_per_second:
        return None
    step, is_async = estimate.time.seconds, estimate.config.checkpoint.async_save
    writing = held["checkpoint_bytes"] / request.save_bytes_per_second
    trained, waiting = request.steps * step / held["saves"], 0.0 if is_async else writing
    between = request.failure_hours * SECONDS_PER_HOUR / estimate.job.world_size  # two failures of the whole run
    restart = 60 * request.restart_minutes + writing
    best = writing if is_async else math.sqrt(2 * writing * between) - writing
    lasts = (trained + waiting) / between
    share = trained / between * math.exp(-lasts - restart / between) / -math.expm1(-lasts)
    return {"save_seconds": writing, "best_interval_steps": max(1, math.ceil(best / step)), "share": share}
