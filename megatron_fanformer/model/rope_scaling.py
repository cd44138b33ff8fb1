"""Rotary positions beyond the length that a model was trained on, as in transformers' `rope_scaling`.

`linear` divides every frequency by `factor`. `yarn` (Peng et al. 2023, "YaRN: Efficient Context Window Extension of
Large Language Models") divides frequencies that turn less than `beta_slow` times in the original length, keeps those
that turn more than `beta_fast` times, interpolates linearly between, and multiplies cos and sin by an attention factor.

Queries and keys would both carry that factor, and their products its square. Here the softmax's scale has the square:
rotations stay rotations, whichever kernel computes them, and cached keys do not have the factor.
"""

import math
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Literal

from megatron_fanformer.errors import broken_fields

if TYPE_CHECKING:  # torch takes seconds to import, and configurations are checked first
    from torch import Tensor

SECTION = "model.rope_scaling"


@dataclass(frozen=True, kw_only=True)
class RopeScalingConfig:
    """Rotary positions beyond the length of the first training; names and meaning are transformers'.

    A run that starts from a checkpoint (`checkpoint.load`) may change these fields, since no weight depends on them.
    """

    rope_type: Literal["default", "linear", "yarn"] = "default"
    """Frequencies: `default` keeps all, `linear` divides all by `factor`, `yarn` the low ones, and scales attention."""
    factor: float | None = None
    """Ratio of the new length to the original; at least 1."""
    original_max_position_embeddings: int | None = None
    """With `yarn`: the length that the model was trained on before, in tokens."""
    beta_fast: float = 32.0
    """With `yarn`: frequencies with more turns than this in the original length are kept."""
    beta_slow: float = 1.0
    """With `yarn`: frequencies with fewer turns than this are divided by `factor`."""
    attention_factor: float | None = None
    """With `yarn`: the factor of cos and sin; null: computed from `factor`, `mscale` and `mscale_all_dim`."""
    mscale: float | None = None
    """With `yarn`, if both are given: the attention factor is the ratio of 0.1 m ln `factor` + 1 for this m and for
    `mscale_all_dim`; else it is 0.1 ln `factor` + 1."""
    mscale_all_dim: float | None = None
    """See `mscale`."""
    truncate: bool = True
    """With `yarn`: round the two bounds, which are numbers of frequencies, to integers."""

    @property
    def is_scaled(self) -> bool:
        """Return whether positions differ from a plain model's."""
        return self.rope_type != "default"

    @property
    def cos_and_sin_factor(self) -> float:
        """Return the factor of cos and sin; 1 except with `yarn`."""
        if self.rope_type != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._attention_factor(self.mscale) / self._attention_factor(self.mscale_all_dim)
        return self._attention_factor(1.0)

    def _attention_factor(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(max(1.0, self.factor or 1.0)) + 1.0  # transformers' formula

    def softmax_scale(self, head_size: int) -> float | None:
        """Return the factor of attention's scores; None for the default, 1 / sqrt(head_size)."""
        factor = self.cos_and_sin_factor
        return None if factor == 1 else factor**2 / math.sqrt(head_size)

    def frequencies(self, base: float, head_size: int) -> "Tensor":
        """Return the scaled angle by which each pair of a head turns per position, [head_size / 2] in float32."""
        import torch

        powers = base ** (torch.arange(0, head_size, 2, dtype=torch.float32) / head_size)  # 1 / unscaled angle
        assert self.factor is not None, "problems() demands it of scaled positions"
        if self.rope_type == "linear":
            return 1.0 / powers / self.factor
        low, high = self._bounds(base, head_size)
        pairs = torch.arange(head_size // 2, dtype=torch.float32)
        kept_share = 1 - torch.clamp((pairs - low) / (high - low), 0, 1)
        return 1.0 / (self.factor * powers) * (1 - kept_share) + 1.0 / powers * kept_share

    def _bounds(self, base: float, head_size: int) -> tuple[float, float]:
        """Return the last pair whose frequency `yarn` keeps, and the first pair whose frequency it divides."""
        length = self.original_max_position_embeddings
        assert length is not None, "problems() demands it"

        def pair_with_turns(turns: float) -> float:
            """Return the pair, a fraction, that turns so many times in the original length."""
            return head_size * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

        low, high = pair_with_turns(self.beta_fast), pair_with_turns(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_size - 1)  # the limits of transformers
        return low, high + (0.001 if low == high else 0)  # their difference is a divisor

    def problems(self) -> list[str]:
        """Return the rules that this configuration breaks, one line each."""
        needs_by_type = {"default": [], "linear": ["factor"], "yarn": ["factor", "original_max_position_embeddings"]}
        needs = needs_by_type[self.rope_type]
        may_state = [field.name for field in fields(self)] if self.rope_type == "yarn" else ["rope_type", *needs]
        broken = partial(broken_fields, SECTION, self)
        return [
            *(
                f"{SECTION}.{field.name} is {getattr(self, field.name)}, but rope_type {self.rope_type} has no use for "
                "it; set another rope_type, or leave it out"
                for field in fields(self)
                if field.name not in may_state and getattr(self, field.name) != field.default
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
