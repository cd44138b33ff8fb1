"""What a run costs, from the time of a step."""

from dataclasses import dataclass

from megatron_fanformer.sizing.estimate import Estimate

SECONDS_PER_HOUR, HOURS_PER_DAY = 3600, 24


@dataclass(frozen=True, kw_only=True)
class Cost:
    """A run over a number of tokens, without evaluations, saves and restarts; as uncertain as a step's time."""

    tokens: int
    days: float
    gpu_hours: float
    price: float | None
    """In the currency of the price of a GPU hour; None without one."""


def cost(estimate: Estimate, tokens: int, price_per_gpu_hour: float | None) -> Cost:
    """What it costs to train on that many tokens."""
    hours = tokens / estimate.time.tokens_per_second / SECONDS_PER_HOUR
    gpu_hours = hours * estimate.job.world_size
    price = None if price_per_gpu_hour is None else gpu_hours * price_per_gpu_hour
    return Cost(tokens=tokens, days=hours / HOURS_PER_DAY, gpu_hours=gpu_hours, price=price)
