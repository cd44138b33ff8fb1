"""Environment variables that libraries read when they start: what a run sets, to what, and why.

`SETTINGS` is the table; `prepare` applies it, before torch is imported. What the environment says already wins, but
for what would make a run wrong. `config --environment` prints the table for a run, docs/gpu.md has it for all.
"""

import importlib.util
import os
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from megatron_fanformer.errors import InputError
from megatron_fanformer.runtime.layout import ParallelConfig

OMP_THREADS = "OMP_NUM_THREADS"
SET_HERE = "FANFORMER_ENVIRONMENT"
"""Names of the variables that this program has set: they are not the user's for its later runs and its children."""


@dataclass(frozen=True, kw_only=True)
class RunShape:
    """What the settings of a run's process depend on."""

    parallel: ParallelConfig
    replicas: int
    """Ranks that hold the same weights: data times context parallel ones."""
    over_nccl: bool = True
    cuda_graphs: bool = False
    deterministic: bool = False
    is_after_hopper: bool = False
    """Whether this machine's GPUs are of the Blackwell architecture or later."""
    threads: int | None = None
    """CPU threads of this rank, where nobody else has set them."""
    is_any: bool = False
    """Whether it is no run's process, and may take any layout, as those of `parity` do."""

    @property
    def ranks(self) -> int:
        """Ranks of the run."""
        parallel = self.parallel
        return self.replicas * parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size

    @property
    def orders_launches(self) -> bool:
        """Return whether tensor or context parallel communication overlaps with products, before Blackwell."""
        shards = self.parallel.tensor_model_parallel_size > 1 or self.parallel.context_parallel_size > 1
        return shards and not self.is_after_hopper

    @property
    def overlaps_norms(self) -> bool:
        """Return whether NCCL's kernels run beside a layer's norms: sums over replicas, interleaved stages."""
        sums = any(self.parallel.overlaps(pays=self.over_nccl and self.replicas > 1))
        return self.over_nccl and self.ranks > 1 and (sums or self.parallel.virtual_stages > 1)


ANY_SHAPE = RunShape(parallel=ParallelConfig(), replicas=1, is_any=True)


class Setting(NamedTuple):
    """A variable, and when a process sets it to what."""

    variable: str
    value: str | Callable[[RunShape], str | None]
    """The value, or a function of a run's shape; None: it is left alone."""
    when: str
    reason: str
    applies: Callable[[RunShape], bool] = lambda _shape: True
    other: str = ""
    """Another name of the same setting, by which a user may have made it."""
    is_required: bool = False
    """Whether another value in the environment would make the run wrong, and is refused."""

    def value_for(self, shape: RunShape) -> str | None:
        """Return the value for a process of a run; None: not set."""
        if not self.applies(shape):
            return None
        return self.value if isinstance(self.value, str) else self.value(shape)


def _cudnn_of_torch(_shape: RunShape) -> str | None:
    nvidia = importlib.util.find_spec("nvidia")
    folders = (Path(folder, "cudnn") for folder in (nvidia and nvidia.submodule_search_locations) or ())
    return next((str(folder) for folder in folders if (folder / "lib").is_dir()), None)


def _has_peers(shape: RunShape) -> bool:
    return shape.over_nccl and shape.ranks > 1


def _is_deterministic(shape: RunShape) -> bool:
    return shape.deterministic


MARGIN = (
    "20",  # Bridge's recipes have 20 multiprocessors, its guide 16
    "20 where sums over replicas or interleaved stages overlap with computation",
    "the Engine's norms occupy every multiprocessor: NCCL's kernels and a norm would wait for each other's end "
    "(Megatron-Bridge)",
    lambda shape: shape.overlaps_norms,
)
SETTINGS = (
    Setting(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        lambda shape: "1" if shape.ranks == 1 or shape.orders_launches else "32",
        "1 with tensor or context parallelism before Blackwell, and for one rank; else 32",
        "with one queue, kernels begin in the order of their launches, on which the overlap of tensor-parallel "
        "communication relies; else streams that share a queue wait for each other (Megatron-LM, Megatron-Bridge)",
    ),
    Setting(
        "TORCH_NCCL_HIGH_PRIORITY",
        "1",
        "1 with several ranks over NCCL",
        "a collective that others wait for is not queued behind products (Megatron-Bridge)",
        _has_peers,
    ),
    Setting(
        "TORCH_FR_BUFFER_SIZE",
        "2000",
        "2000 with several ranks over NCCL",
        "torch's flight recorder has what NCCL was last called for",
        _has_peers,
        other="TORCH_NCCL_TRACE_BUFFER_SIZE",
    ),
    Setting("NVTE_FWD_LAYERNORM_SM_MARGIN", *MARGIN),
    Setting("NVTE_BWD_LAYERNORM_SM_MARGIN", *MARGIN),
    Setting(
        "PYTORCH_ALLOC_CONF",
        "expandable_segments:True",
        "in every run",
        "a run does not end for lack of memory that is free, but in pieces (PyTorch, torchtitan)",
        lambda shape: not shape.is_any,
        other="PYTORCH_CUDA_ALLOC_CONF",
    ),
    Setting(
        "NCCL_GRAPH_REGISTER",
        "0",
        "0 with CUDA graphs",
        "NCCL would register the addresses of a graph's buffers, which segments that expand do not keep: an illegal "
        "memory access (megatron-core asserts it)",
        lambda shape: shape.cuda_graphs,
        is_required=True,
    ),
    Setting(
        OMP_THREADS,
        lambda shape: None if shape.threads is None else str(shape.threads),
        "a rank's share of the cores, where srun or another launcher started a rank for a GPU; local ranks always",
        "OpenMP would start a thread for every core in each of a node's ranks",
    ),
    Setting(
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
        "0",
        "0 with `runtime.deterministic_mode`",
        "attention's backward would add in any order; megatron-core checks it",
        _is_deterministic,
        is_required=True,
    ),
    Setting(
        "CUBLAS_WORKSPACE_CONFIG",
        ":4096:8",
        "`:4096:8` with `runtime.deterministic_mode`",
        "cuBLAS may split a product differently on another stream; PyTorch refuses to run without",
        _is_deterministic,
        is_required=True,
    ),
    Setting(
        "NCCL_ALGO",
        "Ring",
        "`Ring` with `runtime.deterministic_mode`",
        "NCCL decides by measuring at its start; any fixed algorithm will do (Megatron-LM requires one)",
        _is_deterministic,
    ),
    Setting(
        "CUDNN_HOME",
        _cudnn_of_torch,
        "the cuDNN that came with torch, where it came with one",
        "the Engine prefers the system's; where that is another version, the two refuse each other's parts, and "
        "attention falls back to one that keeps every score, without a word (one H100)",
        other="CUDNN_PATH",
    ),
    Setting(
        "THP_MEM_ALLOC_ENABLE",
        "1",
        "always",
        "a CPU's step makes and frees gigabytes, whose pages of 4 KiB the kernel zeroes one by one (PyTorch)",
    ),
)


class Applied(NamedTuple):
    """A setting in a process: this program's value, and the user's where there was one."""

    setting: Setting
    name: str
    """The name by which the user has set it, else the variable's."""
    ours: str | None
    theirs: str | None

    @property
    def differs(self) -> bool:
        """Return whether the user's value is kept against this program's."""
        return self.ours is not None and self.theirs is not None and self.ours != self.theirs


def settings_of(shape: RunShape, env: MutableMapping[str, str] = os.environ) -> list[Applied]:
    """Return what a process sets, and what the environment says already.

    Raises:
        InputError: the environment has a value that would make the run wrong.
    """
    applied = []
    set_here = env.get(SET_HERE, "").split(",")
    for setting in SETTINGS:
        names = (name for name in (setting.variable, setting.other) if name in env and name not in set_here)
        name = next(names, setting.variable)
        theirs = None if name in set_here else env.get(name)
        applied.append(Applied(setting, name, setting.value_for(shape), theirs))
        if setting.is_required and applied[-1].differs:
            raise InputError(
                f"{name} is {theirs} in the environment, but this run needs {applied[-1].ours} ({setting.when}); "
                "unset it"
            )
    return applied


def prepare(shape: RunShape = ANY_SHAPE, env: MutableMapping[str, str] = os.environ) -> list[Applied]:
    """Set what the environment leaves open; must be called before torch is imported, and before a GPU is used.

    Raises:
        InputError: like `settings_of`; nothing was set.
    """
    applied = settings_of(shape, env)
    set_here = set(env.get(SET_HERE, "").split(","))
    for setting, _, ours, theirs in applied:
        if theirs is None and ours is not None:
            env[setting.variable] = ours
            set_here.add(setting.variable)
        elif theirs is None:
            env.pop(setting.variable, None)  # of a run before this one
    env[SET_HERE] = ",".join(sorted(set_here))
    return applied


def kept_line(applied: list[Applied]) -> str | None:
    """Return the notice about values of the user's that a run would have set otherwise, None if there are none."""
    kept = [
        f"{each.name} {each.theirs} (this run would set {each.ours})"
        for each in applied
        if each.differs and each.name != OMP_THREADS
    ]
    if not kept:
        return None
    return f"kept from the environment: {', '.join(kept)}; `config --environment` has the reasons"
