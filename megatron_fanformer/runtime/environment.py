"""Environment variables that libraries read when they start: what a run sets, to what, and why.

`SETTINGS` is the table; `prepare` applies it, before torch is imported. What the environment says already wins, but
for what would make a run wrong. `config --environment` prints the table for a run, docs/gpu.md has it for all.
"""

import importlib.util
import json
import os
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_fanformer.errors import InputError
from megatron_fanformer.runtime.layout import ParallelConfig

BRIDGE_RECIPES = "Megatron-Bridge `perf_recipes/environment.py` and recipes"
BRIDGE_GUIDE = "Megatron-Bridge's performance guide"
NORM_MARGIN = "20"  # multiprocessors that NCCL's kernels find free: Bridge's recipes have 20, its guide 16
FLIGHT_RECORDS = "2000"  # of a process, the last ones
ALLOCATOR, ALLOCATOR_OLD = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
EXPANDABLE = "expandable_segments:True"
GRAPH_REGISTER = "NCCL_GRAPH_REGISTER"
OMP_THREADS = "OMP_NUM_THREADS"
SET_HERE = "FANFORMER_ENVIRONMENT"
"""What this program has set, as JSON: for its later runs, and the processes that it starts, that is not the user's."""
DETERMINISTIC = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}


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


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A variable, and when a process sets it to what."""

    variable: str
    value: Callable[[RunShape | None], str | None]
    """The value for a run's process; None: it is left alone. Of None: for a process that may take any layout."""
    when: str
    reason: str
    source: str
    proved: str
    """Where it is proved, and how far."""
    to_measure: str
    """What `tools/gpu_queue.py` measures of it."""
    others: tuple[str, ...] = ()
    """Other names of the same setting, by any of which a user may have made it."""
    is_required: bool = False
    """Whether another value in the environment would make the run wrong, and is refused."""


def _connections(shape: RunShape | None) -> str:
    return "1" if shape is None or shape.ranks == 1 or shape.orders_launches else "32"


def _cudnn_of_torch(_shape: RunShape | None) -> str | None:
    nvidia = importlib.util.find_spec("nvidia")
    folders = (Path(folder, "cudnn") for folder in (nvidia and nvidia.submodule_search_locations) or ())
    return next((str(folder) for folder in folders if (folder / "lib").is_dir()), None)


def _in_runs(value: str, applies: Callable[[RunShape], bool]) -> Callable[[RunShape | None], str | None]:
    return lambda shape: value if shape is not None and applies(shape) else None


def _deterministic(variable: str) -> Callable[[RunShape | None], str | None]:
    return _in_runs(DETERMINISTIC[variable], lambda shape: shape.deterministic)


_TABLE_TEST = "its value: `tests/runtime/test_environment.py`"
_SETTINGS_PART = "part `settings`, on one GPU: "

SETTINGS = (
    Setting(
        variable="CUDA_DEVICE_MAX_CONNECTIONS",
        value=_connections,
        when="1 with tensor or context parallelism before Blackwell, and for one rank; else 32",
        reason="with one queue, kernels begin in the order of their launches, on which the overlap of tensor-parallel "
        "communication relies; without that overlap, or on Blackwell, streams that share a queue wait for each other",
        source=f"Megatron-LM `training/arguments.py`, megatron-core `tensor_parallel/layers.py`, {BRIDGE_RECIPES}",
        proved=f"{_TABLE_TEST}. One H100 was measured with 1",
        to_measure=_SETTINGS_PART + "32 over 1",
    ),
    Setting(
        variable="TORCH_NCCL_HIGH_PRIORITY",
        value=_in_runs("1", lambda shape: shape.over_nccl and shape.ranks > 1),
        when="1 with several ranks over NCCL",
        reason="a collective that others wait for is not queued behind products",
        source=BRIDGE_RECIPES,
        proved=_TABLE_TEST,
        to_measure="nothing: it takes several GPUs",
    ),
    Setting(
        variable="TORCH_FR_BUFFER_SIZE",
        value=_in_runs(FLIGHT_RECORDS, lambda shape: shape.over_nccl and shape.ranks > 1),
        when=f"{FLIGHT_RECORDS} with several ranks over NCCL",
        reason="torch records what NCCL was last called for, and writes it down when a collective has taken too long",
        source="PyTorch, flight recorder",
        proved=_TABLE_TEST,
        to_measure="nothing: it takes several GPUs",
        others=("TORCH_NCCL_TRACE_BUFFER_SIZE",),  # its name in earlier torches
    ),
    *(
        Setting(
            variable=f"NVTE_{way}_LAYERNORM_SM_MARGIN",
            value=_in_runs(NORM_MARGIN, lambda shape: shape.overlaps_norms),
            when=f"{NORM_MARGIN} where sums over replicas or interleaved stages overlap with computation",
            reason="the Engine's norms occupy every multiprocessor and wait for all of them: NCCL's kernels and a norm "
            "would wait for each other's end",
            source=f"{BRIDGE_GUIDE}; {BRIDGE_RECIPES}",
            proved=_TABLE_TEST,
            to_measure=_SETTINGS_PART + "20 over 0, which is the cost without the gain",
        )
        for way in ("FWD", "BWD")
    ),
    Setting(
        variable=ALLOCATOR,
        value=_in_runs(EXPANDABLE, lambda _shape: True),
        when="in every run, but where a user has NCCL register the buffers of graphs",
        reason="a run does not end for lack of memory that is free, but in pieces",
        source=f"PyTorch, CUDA semantics; {BRIDGE_GUIDE}; torchtitan `run_train.sh`",
        proved=_TABLE_TEST,
        to_measure=_SETTINGS_PART + "expandable segments over fixed ones, without graphs and with them",
        others=(ALLOCATOR_OLD,),
    ),
    Setting(
        variable=GRAPH_REGISTER,
        value=_in_runs("0", lambda shape: shape.cuda_graphs),
        when="0 with CUDA graphs",
        reason="NCCL would register the addresses of a graph's buffers, which segments that expand do not keep: an "
        "illegal memory access",
        source="megatron-core `transformer/cuda_graphs.py`, which asserts it",
        proved=f"{_TABLE_TEST}. 1 beside expandable segments is refused",
        to_measure=_SETTINGS_PART + "steps with graphs and both settings",
    ),
    Setting(
        variable=OMP_THREADS,
        value=lambda shape: str(shape.threads) if shape is not None and shape.threads is not None else None,
        when="a rank's share of the cores, where srun or another launcher started a rank for a GPU; local ranks always",
        reason="OpenMP would start a thread for every core in each of a node's ranks",
        source="OpenMP; torchrun sets 1",
        proved=_TABLE_TEST,
        to_measure="nothing",
    ),
    Setting(
        variable="NVTE_ALLOW_NONDETERMINISTIC_ALGO",
        value=_deterministic("NVTE_ALLOW_NONDETERMINISTIC_ALGO"),
        when="0 with `runtime.deterministic_mode`",
        reason="attention's backward would add in any order; megatron-core checks it",
        source="megatron-core `extensions/transformer_engine.py`",
        proved="`tests/gpu/test_resuming.py`, on one H100",
        to_measure="part `tests`",
        is_required=True,
    ),
    Setting(
        variable="CUBLAS_WORKSPACE_CONFIG",
        value=_deterministic("CUBLAS_WORKSPACE_CONFIG"),
        when="`:4096:8` with `runtime.deterministic_mode`",
        reason="cuBLAS may split a product differently on another stream",
        source="cuBLAS, reproducibility; PyTorch refuses to run without",
        proved="`tests/gpu/test_resuming.py`, on one H100",
        to_measure="part `tests`",
        is_required=True,
    ),
    Setting(
        variable="NCCL_ALGO",
        value=_deterministic("NCCL_ALGO"),
        when="`Ring` with `runtime.deterministic_mode`",
        reason="NCCL decides by measuring at its start; any fixed algorithm will do",
        source="Megatron-LM `training/arguments.py`, which requires one",
        proved=_TABLE_TEST,
        to_measure="nothing: it takes several GPUs",
    ),
    Setting(
        variable="CUDNN_HOME",
        value=_cudnn_of_torch,
        when="the cuDNN that came with torch, where it came with one",
        reason="the Engine prefers the system's; where that is another version, the two refuse each other's parts, and "
        "attention falls back to one that keeps every score, without a word",
        source="one H100, 2026-11-23",
        proved="`tests/gpu/test_transformer_engine.py`, on the stand-in",
        to_measure="part `new-tests`",
        others=("CUDNN_PATH",),
    ),
    Setting(
        variable="THP_MEM_ALLOC_ENABLE",
        value=lambda _shape: "1",
        when="always",
        reason="a CPU's step makes and frees gigabytes, whose pages of 4 KiB the kernel zeroes one by one",
        source="PyTorch, CPU allocator",
        proved="`tests/runtime/test_device.py`; the lab log has its speed",
        to_measure="nothing",
    ),
)


@dataclass(frozen=True)
class Applied:
    """A setting in a process: this program's value, and the user's where there was one."""

    setting: Setting
    ours: str | None
    theirs: str | None = None
    stated_as: str = ""
    """The name by which the user has set it."""

    @property
    def variable(self) -> str:
        """The name to call it by."""
        return self.stated_as or self.setting.variable

    @property
    def value(self) -> str | None:
        """The value in force; None: not set."""
        return self.ours if self.theirs is None else self.theirs

    @property
    def differs(self) -> bool:
        """Return whether the user's value is kept against this program's."""
        return self.ours is not None and self.theirs is not None and self.ours != self.theirs


def settings_of(shape: RunShape | None, env: MutableMapping[str, str] = os.environ) -> list[Applied]:
    """Return what a process sets, and what the environment says already.

    Args:
        shape: None: of a process that is no run's, and may take any layout.

    Raises:
        InputError: the environment has a value that would make the run wrong.
    """
    found = []
    here = _set_here(env)
    users = {name: value for name, value in env.items() if here.get(name) != value}
    for setting in SETTINGS:
        name = next((name for name in (setting.variable, *setting.others) if name in users), "")
        found.append(Applied(setting, setting.value(shape), users.get(name), stated_as=name))
    for each in found:
        if each.setting.is_required and each.differs:
            raise InputError(
                f"runtime.deterministic_mode is true, but {each.setting.variable} is {each.theirs} in the environment; "
                "unset it"
            )
    if shape is not None and shape.cuda_graphs:
        found = _without_segments_that_nccl_registers(found)
    return found


def _without_segments_that_nccl_registers(found: list[Applied]) -> list[Applied]:
    """Leave the allocator alone in a run with graphs whose user has NCCL register their buffers."""
    by_name = {each.setting.variable: each for each in found}
    if by_name[GRAPH_REGISTER].value == "0":
        return found
    if EXPANDABLE in (by_name[ALLOCATOR].theirs or ""):
        raise InputError(
            f"kernels.cuda_graph_impl is local, and the environment has both {EXPANDABLE} and {GRAPH_REGISTER} "
            f"{by_name[GRAPH_REGISTER].theirs}, which ends in an illegal memory access; unset one of them"
        )
    return [replace(each, ours=None) if each.setting.variable == ALLOCATOR else each for each in found]


def prepare(shape: RunShape | None = None, env: MutableMapping[str, str] = os.environ) -> list[Applied]:
    """Set what the environment leaves open; must be called before torch is imported, and before a GPU is used.

    Raises:
        InputError: like `settings_of`; nothing was set.
    """
    return _set(settings_of(shape, env), env)


def make_deterministic(env: MutableMapping[str, str] = os.environ) -> None:
    """Set what `runtime.deterministic_mode` needs in a process that was not prepared for that run.

    Raises:
        InputError: the environment contradicts it.
    """
    shape = RunShape(parallel=ParallelConfig(), replicas=1, deterministic=True)
    _set([each for each in settings_of(shape, env) if each.setting.variable in DETERMINISTIC], env)


def _set(found: list[Applied], env: MutableMapping[str, str]) -> list[Applied]:
    here = _set_here(env)
    for each in found:
        if each.theirs is not None:
            continue
        if each.ours is not None:
            here[each.setting.variable] = env[each.setting.variable] = each.ours
        elif here.pop(each.setting.variable, None) is not None:
            env.pop(each.setting.variable, None)  # of a run before this one
    env[SET_HERE] = json.dumps(here)
    return found


def _set_here(env: MutableMapping[str, str]) -> dict[str, str]:
    try:
        return dict(json.loads(env.get(SET_HERE, "{}")))
    except (ValueError, TypeError):  # somebody else's
        return {}


def kept_line(found: list[Applied]) -> str | None:
    """Return the notice about values of the user's that a run would have set otherwise, None if there are none."""
    kept = [
        f"{each.variable} {each.theirs} (this run would set {each.ours})"
        for each in found
        if each.differs and each.setting.variable != OMP_THREADS
    ]
    if not kept:
        return None
    return f"kept from the environment: {', '.join(kept)}; `config --environment` has the reasons"
