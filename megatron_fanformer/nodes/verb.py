"""The verb `check-node`, and its options; imports nothing that is slow."""

import math
from dataclasses import dataclass
from pathlib import Path

from megatron_fanformer.errors import InputError
from megatron_fanformer.options import Verb, option
from megatron_fanformer.runtime import device

LONGEST_SECONDS = 86400.0  # that a node may take


@dataclass(frozen=True, kw_only=True)
class CheckConfig:
    """Options of `check-node`."""

    folder: Path | None = None
    """A folder of the file system that all nodes share, such as the run's; it is written to."""
    minimum_bandwidth: float | None = option(None, metavar="GB/S")
    """The least bandwidth between two nodes, in each direction and for each GPU (default: half of what its
    adapters carry, and of the nodes' median)"""
    tolerance: float = 0.85
    """The least share of the median over all nodes that a matrix rate or a clock may be."""
    gpus: int | None = option(None, metavar="N")
    """GPUs that a node must show (default: as many as most nodes do)"""
    time_limit: float = option(180.0, metavar="SECONDS")
    """The time in which a node must have checked itself, and the others after it."""
    output: Path | None = option(None, metavar="FILE")
    """Write the names of the healthy nodes into this file, one a line."""
    json: bool = False
    """Print one JSON object."""

    def __post_init__(self) -> None:
        """Refuse what is no option's value.

        Raises:
            InputError: one line for each.
        """
        found = []
        if not 0 < self.tolerance <= 1:
            found.append(f"--tolerance is {self.tolerance:g}; it must be above 0, and at most 1")
        if self.minimum_bandwidth is not None and not 0 < self.minimum_bandwidth < math.inf:
            found.append(
                f"--minimum-bandwidth is {self.minimum_bandwidth:g}; it must be above 0 GB/s, or be left out for what "
                "the adapters carry"
            )
        if self.gpus is not None and self.gpus < 0:
            found.append(f"--gpus is {self.gpus}; it must be 0 or more")
        if not 0 < self.time_limit <= LONGEST_SECONDS:
            limit = f"{LONGEST_SECONDS:,.0f}"
            found.append(
                f"--time-limit is {self.time_limit:g}; it must be above 0 seconds, and at most {limit} (a day)"
            )
        if found:
            raise InputError("\n".join(found))


def _check_node(options: CheckConfig) -> None:
    from megatron_fanformer.nodes.check import check_nodes

    device.prepare_libraries()
    device.enable_collective_timeouts()
    check_nodes(options)


CHECK_NODE = Verb(
    name="check-node",
    help="Check the nodes that a run is about to start on.",
    options=CheckConfig,
    run=_check_node,
    examples=("check-node --folder runs", "check-node --gpus 8 --output healthy-nodes.txt"),
)
