"""Rotary positions beyond the length that a model was trained on, as transformers' `rope_scaling` has them.

`linear` divides every frequency by `factor`. `yarn` (Peng et al. 2023, "YaRN: Efficient Context Window Extension of
Large Language Models") divides those that turn less than `beta_slow` times in the original length, keeps those that
turn more than `beta_fast` times, goes over linearly between them, and multiplies cos and sin by an attention factor.

Queries and keys both carry that factor, and their products its square: here that is in the softmax's scale. So a
rotation stays one, whichever kernel computes it, and keys are cached without the factor.
"""

import math
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Literal

from megatron_fanformer.errors import broken_fields

if TYPE_CHECKING:  # torch takes seconds to import, and a configuration is checked before
    from torch import Tensor

SECTION = "model.rope_scaling"


@dataclass(frozen=True, kw_only=True)
class RopeScalingConfig:
    """Rotary positions beyond the length of the first training; names and meaning are transformers'.

    A run that starts from a checkpoint (`checkpoint.load`) may state it anew: it has no weights.
    """

    rope_type: Literal["default", "linear", "yarn"] = "default"
    """`default`: as they are; `linear`: divided by `factor`; `yarn`: by frequency, with an attention factor."""
    factor: float | None = None
    """How many times the original length; at least 1."""
    original_max_position_embeddings: int | None = None
    """With `yarn`: the length that the model was trained on before, in tokens."""
    beta_fast: float = 32.0
    """With `yarn`: frequencies with more turns than this in the original length are kept."""
    beta_slow: float = 1.0
    """With `yarn`: those with fewer are divided by `factor`."""
    attention_factor: float | None = None
    """With `yarn`: the factor of cos and sin; null: from `factor` and the next two."""
    mscale: float | None = None
    """With `yarn`, if both are given: the attention factor is the ratio of 0.1 m ln `factor` + 1 for this m and for
    `mscale_all_dim`; else it is 0.1 ln `factor` + 1."""
    mscale_all_dim: float | None = None
    """See `mscale`."""
    truncate: bool = True
    """With `yarn`: round the bounds between the frequencies to whole ones."""

    @property
    def is_scaled(self) -> bool:
        """Return whether positions differ from a plain model's."""
        return self.rope_type != "default"

    @property
    def cos_and_sin_factor(self) -> float:
        """Return the factor of cos and sin: 1 but with `yarn`."""
        if self.rope_type != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._growth(self.mscale) / self._growth(self.mscale_all_dim)
        return self._growth(1.0)

    def _growth(self, mscale: float) -> float:
        factor = self.factor or 1.0
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    def softmax_scale(self, size: int) -> float | None:
        """Return the scale of the scores of heads of that size; None: attention's own, 1 / sqrt(size)."""
        factor = self.cos_and_sin_factor
        return None if factor == 1 else factor**2 / math.sqrt(size)

    def frequencies(self, base: float, size: int) -> "Tensor":
        """Return the scaled angle per position of each pair of a head, [size / 2] in float32, as transformers does.

        Args:
            base: of the rotary positions.
            size: of a head.
        """
        import torch

        powers = base ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
        assert self.factor is not None, "problems() demands it of scaled positions"
        if self.rope_type == "linear":
            return 1.0 / powers / self.factor
        low, high = self._bounds(base, size)
        pairs = torch.arange(size // 2, dtype=torch.float32)
        kept = 1 - torch.clamp((pairs - low) / (high - low), 0, 1)
        return 1.0 / (self.factor * powers) * (1 - kept) + 1.0 / powers * kept

    def _bounds(self, base: float, size: int) -> tuple[float, float]:
        """Return the pair up to which frequencies are kept, and the one from which on they are divided."""
        length = self.original_max_position_embeddings
        assert length is not None, "problems() demands it"

        def pair_that_turns(times: float) -> float:
            return size * math.log(length / (times * 2 * math.pi)) / (2 * math.log(base))

        low, high = pair_that_turns(self.beta_fast), pair_that_turns(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, size - 1)
        return low, high + 0.001 if low == high else high

    def problems(self) -> list[str]:
        """Return the rules that this configuration breaks, one line each."""
        stated = [field.name for field in fields(self)[1:] if getattr(self, field.name) != field.default]
        needed = {"default": [], "linear": ["factor"], "yarn": ["factor", "original_max_position_embeddings"]}
        needs = needed[self.rope_type]
        broken = partial(broken_fields, SECTION, self)
        return [
            *(
                f"{SECTION}.{name} is {getattr(self, name)}, but rope_type {self.rope_type} has no use for it; set "
                "another rope_type, or leave it out"
                for name in stated
                if self.rope_type != "yarn" and name not in needs
            ),
            *(
                f"{SECTION}.{name} is missing, which rope_type {self.rope_type} needs; state it"
                for name in needs
                if getattr(self, name) is None
            ),
            *broken("be at least 1", lambda value: value < 1, "factor", "original_max_position_embeddings"),
            *broken("be above 0", lambda value: value <= 0, "attention_factor", "beta_slow"),
            *broken("not be negative", lambda value: value < 0, "mscale", "mscale_all_dim"),
            *broken("be above beta_slow", lambda value: value <= self.beta_slow, "beta_fast"),
        ]
