"""From next-token logits to a token: greedy, temperature, top-k and top-p, from a random generator of its own.

Shapes: v vocabulary.
"""

import torch
from torch import Tensor

from megatron_fanformer.errors import DivergenceError
from megatron_fanformer.generate.config import SamplingConfig
from megatron_fanformer.runtime.seeding import generator_for


def token_probabilities(logits_v: Tensor, config: SamplingConfig) -> Tensor:
    """Return the distribution [v] that is drawn from at a temperature above 0: float64, zero where a token is cut off.

    Temperature comes first, then top-k, then top-p on what that leaves. Among equal logits the lower id ranks first.
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
        """Return the next token's id from logits [v] on any device; drawn on the CPU, so that all devices draw the
        same.

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
