"""Environment variables of libraries: the values that a run sets, and the reasons.

`SETTINGS` is the table; `prepare` applies it, before torch is imported. Values in the environment win, unless they
would make the run wrong. A setting says why.
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
    """Facts of a run that decide the settings of its processes."""

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
    """A variable, its value, and the condition under which a process sets it."""

    variable: str
    value: Callable[[RunShape], str | None]
    """Returns the value for a process of a run; None: it is left alone."""
    when: str
    reason: str
    other: str = ""
    """Another name of the same setting, by which a user may have made it."""
    is_required: bool = False
    """Whether another value in the environment would make the run wrong, and is refused."""


def _fixed(value: str, applies: Callable[[RunShape], bool] = lambda _: True) -> Callable[[RunShape], str | None]:
    return lambda shape: value if applies(shape) else None


def _connections(shape: RunShape) -> str:
    return "1" if shape.ranks == 1 or shape.orders_launches else "32"


def _cudnn_of_torch(_shape: RunShape) -> str | None:
    nvidia = importlib.util.find_spec("nvidia")
    folders = (Path(folder, "cudnn") for folder in (nvidia and nvidia.submodule_search_locations) or ())
    return next((str(folder) for folder in folders if (folder / "lib").is_dir()), None)


PEERS, OVER_NCCL = (lambda shape: shape.over_nccl and shape.ranks > 1), "with several ranks over NCCL"
MARGIN = (
    _fixed("20", lambda shape: shape.overlaps_norms),
    "20 where sums over replicas or interleaved stages overlap with computation",
    "the Engine's norms occupy every multiprocessor, and would wait for NCCL's kernels (Megatron-Bridge)",
)
EXACT, DETERMINISTIC = (lambda shape: shape.deterministic), "with `runtime.deterministic_mode`"
SETTINGS = (
    Setting(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        _connections,
        "1 with tensor or context parallelism before Blackwell, and for one rank; else 32",
        "the overlap of tensor-parallel communication relies on the order of launches; else streams wait in one queue",
    ),
    Setting("TORCH_NCCL_HIGH_PRIORITY", _fixed("1", PEERS), f"1 {OVER_NCCL}", "collectives overtake products"),
    Setting(
        "TORCH_FR_BUFFER_SIZE",
        _fixed("2000", PEERS),
        f"2000 {OVER_NCCL}",
        "torch's flight recorder",
        other="TORCH_NCCL_TRACE_BUFFER_SIZE",  # its name in earlier torches
    ),
    Setting("NVTE_FWD_LAYERNORM_SM_MARGIN", *MARGIN),
    Setting("NVTE_BWD_LAYERNORM_SM_MARGIN", *MARGIN),
    Setting(
        "PYTORCH_ALLOC_CONF",
        _fixed("expandable_segments:True", lambda shape: not shape.is_any),
        "in every run",
        "free memory in pieces is used (PyTorch)",
        other="PYTORCH_CUDA_ALLOC_CONF",
    ),
    Setting(
        "NCCL_GRAPH_REGISTER",
        _fixed("0", lambda shape: shape.cuda_graphs),
        "0 with CUDA graphs",
        "NCCL would register addresses that expanding segments do not keep: an illegal memory access (megatron-core)",
        is_required=True,
    ),
    Setting(
        OMP_THREADS,
        lambda shape: None if shape.threads is None else str(shape.threads),
        "a rank's share of the cores, for a rank on a GPU that another launcher started; for local ranks always",
        "OpenMP would start a thread for every core in each rank",
    ),
    Setting(
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
        _fixed("0", EXACT),
        DETERMINISTIC,
        "attention's backward adds in any order",
        is_required=True,
    ),
    Setting(
        "CUBLAS_WORKSPACE_CONFIG",
        _fixed(":4096:8", EXACT),
        DETERMINISTIC,
        "cuBLAS splits products by stream",
        is_required=True,
    ),
    Setting("NCCL_ALGO", _fixed("Ring", EXACT), DETERMINISTIC, "NCCL chooses by measuring at its start"),
    Setting(
        "CUDNN_HOME",
        _cudnn_of_torch,
        "torch's cuDNN, where it came with one",
        "with two cuDNNs the Engine's attention falls back to one that keeps every score, without a word",
        other="CUDNN_PATH",
    ),
    Setting("THP_MEM_ALLOC_ENABLE", _fixed("1"), "always", "the kernel zeroes pages of 4 KiB one by one (PyTorch)"),
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
    """Return the settings of a process with the values that the environment has already.

    Raises:
        InputError: the environment has a value that would make the run wrong.
    """
    applied = []
    set_here = env.get(SET_HERE, "").split(",")
    for setting in SETTINGS:
        names = (name for name in (setting.variable, setting.other) if name in env and name not in set_here)
        name = next(names, setting.variable)
        theirs = None if name in set_here else env.get(name)
        applied.append(Applied(setting, name, setting.value(shape), theirs))
        if setting.is_required and applied[-1].differs:
            raise InputError(
                f"{name} is {theirs} in the environment, but this run needs {applied[-1].ours} ({setting.when}); "
                "unset it"
            )
    return applied


def prepare(shape: RunShape = ANY_SHAPE, env: MutableMapping[str, str] = os.environ) -> list[Applied]:
    """Set the variables that the environment leaves open; call it before torch is imported and a GPU is used.

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
        f"{setting.name} {setting.theirs} (this run would set {setting.ours})"
        for setting in applied
        if setting.differs and setting.name != OMP_THREADS
    ]
    if not kept:
        return None
    return f"kept from the environment: {', '.join(kept)}"
