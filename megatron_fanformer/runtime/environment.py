"""Environment variables of libraries: the values that a run sets, and the reasons.

`SETTINGS` is the table; `prepare` applies it, before torch is imported. Values in the environment win, unless they
would make the run wrong.
"""

import importlib.util
import os
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from megatron_fanformer.errors import InputError
from megatron_fanformer.runtime.layout import ParallelConfig

OMP_THREADS = "OMP_NUM_THREADS"
SET_HERE = "FANFORMER_ENVIRONMENT"
"""Names of variables that this program has set: later runs and child processes must not take these for the user's."""


@dataclass(frozen=True, kw_only=True)
class RunShape:
    """Facts of a run that decide the settings of its processes."""

    parallel: ParallelConfig
    replicas: int  # ranks that hold the same weights: data times context parallel ones
    over_nccl: bool = True
    cuda_graphs: bool = False
    deterministic: bool = False
    is_after_hopper: bool = False  # whether this machine's GPUs are of the Blackwell architecture or later
    threads: int | None = None  # CPU threads of this rank; None: leave the number alone
    is_any: bool = False  # whether the process may run several layouts one after the other, as those of `parity` do

    @property
    def ranks(self) -> int:
        """Return the number of the run's ranks."""
        return self.replicas * self.parallel.tensor_model_parallel_size * self.parallel.pipeline_model_parallel_size

    @property
    def overlaps_norms(self) -> bool:
        """Return whether NCCL's kernels run beside norms: for sums over replicas, or interleaved stages."""
        overlaps_sums = any(self.parallel.resolved_overlaps(is_faster=self.replicas > 1))  # null: if it is faster
        return self.over_nccl and self.ranks > 1 and (overlaps_sums or self.parallel.virtual_stages > 1)


ANY_SHAPE = RunShape(parallel=ParallelConfig(), replicas=1, is_any=True)

Value = Callable[[RunShape], str | None]
"""Returns a variable's value for a process of a run; None: the variable is left alone."""


class Setting(NamedTuple):
    """A variable and its value."""

    variable: str
    value: Value
    other: str = ""  # another variable by which a user may have made the same setting
    is_required: bool = False  # whether a different value in the environment is refused: the run would be wrong


def _fixed(value: str, applies: Callable[[RunShape], bool] = lambda _: True) -> Value:
    """Return a function that returns `value` for runs to which it applies, and None for others."""
    return lambda shape: value if applies(shape) else None


def _connections(shape: RunShape) -> str:
    """Return the number of a GPU's queues: "1" launches kernels in order, with "32" streams do not share one."""
    # Before Blackwell, overlap of tensor or context parallel communication relies on the order of launches.
    has_shards = shape.parallel.tensor_model_parallel_size > 1 or shape.parallel.context_parallel_size > 1
    return "1" if shape.ranks == 1 or (has_shards and not shape.is_after_hopper) else "32"


def _cudnn_of_torch(_shape: RunShape) -> str | None:
    """Return the folder of the cuDNN that was installed with torch, or None."""
    nvidia = importlib.util.find_spec("nvidia")
    roots = (nvidia.submodule_search_locations or ()) if nvidia else ()
    folders = (Path(root, "cudnn") for root in roots)
    return next((str(folder) for folder in folders if (folder / "lib").is_dir()), None)


def _has_nccl_peers(shape: RunShape) -> bool:
    return shape.over_nccl and shape.ranks > 1


IS_DETERMINISTIC = attrgetter("deterministic")
MARGIN = _fixed("20", lambda shape: shape.overlaps_norms)
SETTINGS = (
    # One connection keeps kernels in the order of their launches; with more, streams do not wait in one queue.
    Setting("CUDA_DEVICE_MAX_CONNECTIONS", _connections),
    # Lets collectives overtake matrix products.
    Setting("TORCH_NCCL_HIGH_PRIORITY", _fixed("1", _has_nccl_peers)),
    # torch's flight recorder; the other name is that of earlier torches.
    Setting("TORCH_FR_BUFFER_SIZE", _fixed("2000", _has_nccl_peers), other="TORCH_NCCL_TRACE_BUFFER_SIZE"),
    # The Engine's norms occupy every multiprocessor, and would wait for NCCL's kernels (Megatron-Bridge).
    Setting("NVTE_FWD_LAYERNORM_SM_MARGIN", MARGIN),
    Setting("NVTE_BWD_LAYERNORM_SM_MARGIN", MARGIN),
    # Lets the allocator use free memory that is in pieces (PyTorch).
    Setting(
        "PYTORCH_ALLOC_CONF",
        _fixed("expandable_segments:True", lambda shape: not shape.is_any),
        other="PYTORCH_CUDA_ALLOC_CONF",
    ),
    # NCCL would register addresses that expandable segments do not keep: an illegal memory access (megatron-core).
    Setting("NCCL_GRAPH_REGISTER", _fixed("0", lambda shape: shape.cuda_graphs), is_required=True),
    # A rank's share of the cores: OpenMP would start a thread for every core in each rank.
    Setting(OMP_THREADS, lambda shape: None if shape.threads is None else str(shape.threads)),
    # Else attention's backward adds in any order, cuBLAS splits products by stream, and NCCL chooses by measuring.
    Setting("NVTE_ALLOW_NONDETERMINISTIC_ALGO", _fixed("0", IS_DETERMINISTIC), is_required=True),
    Setting("CUBLAS_WORKSPACE_CONFIG", _fixed(":4096:8", IS_DETERMINISTIC), is_required=True),
    Setting("NCCL_ALGO", _fixed("Ring", IS_DETERMINISTIC)),
    # With two cuDNNs the Engine silently falls back to an attention that stores all scores.
    Setting("CUDNN_HOME", _cudnn_of_torch, other="CUDNN_PATH"),
    # Huge pages for tensors on the CPU: the kernel would zero pages of 4 KiB one by one (PyTorch).
    Setting("THP_MEM_ALLOC_ENABLE", _fixed("1")),
)


def prepare(shape: RunShape = ANY_SHAPE, env: MutableMapping[str, str] = os.environ) -> list[str]:
    """Set the variables that the environment leaves open; call it before torch is imported and a GPU is used.

    Returns:
        A line for each value of the user that differs from this run's, except a number of threads.

    Raises:
        InputError: the environment has a value that would make the run wrong; nothing was set.
    """
    set_here = set(env.get(SET_HERE, "").split(","))
    kept, new_values = [], {}
    for setting in SETTINGS:
        value = setting.value(shape)
        user_names = [name for name in (setting.variable, setting.other) if name in env and name not in set_here]
        if not user_names:
            new_values[setting.variable] = value
        elif value not in (None, env[user_names[0]]):  # this run would set another value
            name, user_value = user_names[0], env[user_names[0]]
            if setting.is_required:
                raise InputError(f"{name} is {user_value} in the environment, but this run needs {value}; unset it")
            if setting.variable != OMP_THREADS:
                kept.append(f"{name} {user_value} (this run would set {value})")
    for name, value in new_values.items():
        if value is not None:
            env[name] = value
            set_here.add(name)
        else:
            env.pop(name, None)  # an earlier run of this process may have set it
    env[SET_HERE] = ",".join(sorted(set_here))
    return kept
