"""From next-token logits to a token: greedy, temperature, top-k and top-p, from a random generator of its own.

Shapes: v vocabulary.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_fanformer.errors import DivergenceError
from megatron_fanformer.runtime.seeding import generator_for

SEED_LIMIT = 2**63


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How the next token is chosen."""

    temperature: float = 0.0
    """Divides the logits; 0 takes the most likely token, and the fields below have no effect."""
    top_k: int = 0
    """Only the k most likely tokens; 0 for all."""
    top_p: float = 1.0
    """Only the most likely tokens that together have this probability, in (0, 1]; at least one."""
    seed: int = 0
    """Of the draws: equal seeds and settings give equal text."""
    num_samples: int = 1
    """Texts for each prompt; several need a temperature above 0."""

    def problems(self) -> list[str]:
        """Rules of single fields that this configuration breaks, one line each."""
        found = []
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            found.append(
                f"temperature is {self.temperature}; it must be finite and not negative (0 takes the most likely token)"
            )
        if self.top_k < 0:
            found.append(f"top_k is {self.top_k}; it must not be negative (0 samples from all tokens)")
        if not 0 < self.top_p <= 1:
            found.append(f"top_p is {self.top_p}; it must lie in (0, 1] (1 samples from all tokens)")
        if not 0 <= self.seed < SEED_LIMIT:
            found.append(f"seed is {self.seed}; it must lie in [0, 2**63)")
        if self.num_samples < 1:
            found.append(f"num_samples is {self.num_samples}; it must be at least 1")
        if self.num_samples > 1 and self.temperature == 0:
            found.append(
                f"num_samples is {self.num_samples}, but temperature 0 takes the most likely tokens each time; set a "
                "temperature above 0, or num_samples to 1"
            )
        return found


def token_probabilities(logits_v: Tensor, config: SamplingConfig) -> Tensor:
    """Return the distribution [v] that is drawn from at a temperature above 0: float64, zero where a token is cut off.

    Temperature comes first, then top-k, then top-p on what that leaves. Of equal logits the lower id ranks first.
    """
    # Shifted to a maximum of 0, so that no temperature, however low, makes the most likely token's logit infinite.
    scaled_v = (logits_v.double() - logits_v.max()) / config.temperature
    ranked, ids = scaled_v.sort(descending=True, stable=True)
    if config.top_k:
        ranked, ids = ranked[: config.top_k], ids[: config.top_k]
    ranked = ranked.softmax(0)
    mass_before = ranked.cumsum(0) - ranked
    ranked = ranked * (mass_before < config.top_p)
    return torch.zeros_like(scaled_v).scatter(0, ids, ranked / ranked.sum())


class Sampler:
    """Chooses one token after another; its draws depend on the seed and its name, not on torch's global state."""

    def __init__(self, config: SamplingConfig, name: str = "") -> None:
        self._config = config
        self._generator = generator_for(config.seed, name)

    def __call__(self, logits_v: Tensor) -> int:
        """The next token's id from logits [v] on any device; drawn on the CPU, so that all devices draw the same.

        Raises:
            DivergenceError: a logit is not finite.
        """
        logits_v = logits_v.float().cpu()
        if not logits_v.isfinite().all():
            raise DivergenceError(
                "the model's logits are not all finite, so its weights have diverged; use an earlier checkpoint"
            )
        if self._config.temperature == 0:
            return int(logits_v.argmax())
        probabilities_v = token_probabilities(logits_v, self._config)
        return int(torch.multinomial(probabilities_v, 1, generator=self._generator))
