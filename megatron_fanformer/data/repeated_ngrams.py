"""Samples in which the same few tokens stand over and over, which are left out of the loss.

The rule is OLMo-core's: a run of 1 to 13 tokens that is repeated 32 times or more (its `InstanceFilterConfig`). Such
samples, of rulers, tables of zeros and the like, cause spikes of the loss.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

LONGEST_PERIOD = 13
LEAST_TIMES = 32


def is_repetitive(tokens: np.ndarray, *, longest_period: int = LONGEST_PERIOD, least_times: int = LEAST_TIMES) -> bool:
    """Return whether up to `longest_period` tokens stand `least_times` times in a row somewhere in `tokens` [n]."""
    for period in range(1, longest_period + 1):
        needed = period * (least_times - 1)  # tokens in a row, each as the one a period before it
        is_same = tokens[period:] == tokens[:-period]
        if np.count_nonzero(is_same) < needed:
            continue
        breaks = np.flatnonzero(~is_same)
        if np.diff(breaks, prepend=-1, append=len(is_same)).max() > needed:
            return True
    return False


@dataclass(frozen=True)
class UnrepeatedSamples:
    """A dataset's samples, in its order; those that are repetitive have no loss."""

    samples: Any

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return the sample's own tensors, with a `loss_mask` of zeros where its tokens are repetitive."""
        item: dict[str, Tensor] = {**self.samples[index]}
        if is_repetitive(item["tokens"].numpy()):
            item["loss_mask"] = item["loss_mask"] * 0
        return item
