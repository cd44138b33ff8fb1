"""The device of this process, and everything that the environment says about it.

The only module of the package that reads environment variables.
"""

import logging
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from megatron_fanformer.errors import InputError

DeviceKind = Literal["cuda", "cpu"]
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


def resolve_device(wanted: Literal["auto", "cuda", "cpu"]) -> DeviceKind:
    """The device to run on; `auto` takes a usable GPU, else the CPU.

    Raises:
        InputError: CUDA is asked for and not usable, or a GPU's driver is loaded that this torch cannot use: a
            broken installation must not start a CPU run quietly.
    """
    if wanted == "cpu":
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    if wanted == "cuda":
        raise InputError(
            "parallel.device is cuda, but torch finds no usable GPU; check the driver with nvidia-smi, or set it to cpu"
        )
    if NVIDIA_DRIVER.exists():
        raise InputError(
            "parallel.device is auto and an NVIDIA driver is loaded, but torch cannot use a GPU; install a CUDA build "
            "of torch that the driver supports, or set parallel.device to cpu"
        )
    return "cpu"


def has_bf16_matrix_units(device: DeviceKind) -> bool:
    """Whether bf16 matrix products are faster than float32 here: every supported GPU, CPUs with AMX or AVX512-BF16."""
    if device == "cuda":
        return torch.cuda.is_bf16_supported()
    # torch.cpu offers no public query for either
    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()


@dataclass(frozen=True, kw_only=True)
class RankAddress:
    """Which rank this process is, as its launcher says, and where the ranks meet."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_address: str
    master_port: int


def rank_address() -> RankAddress | None:
    """What torchrun or Slurm says that this process is; None if it was started plainly."""
    env = os.environ
    if "RANK" in env and "WORLD_SIZE" in env:
        return RankAddress(
            rank=int(env["RANK"]),
            world_size=int(env["WORLD_SIZE"]),
            local_rank=int(env.get("LOCAL_RANK", env["RANK"])),
            local_world_size=int(env.get("LOCAL_WORLD_SIZE", env["WORLD_SIZE"])),
            master_address=env.get("MASTER_ADDR", "localhost"),
            master_port=int(env.get("MASTER_PORT", "29500")),
        )
    # A batch script itself has SLURM_NTASKS too; only `srun` sets the step's own number of tasks.
    if int(env.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        return _slurm_address(env)
    return None


def _slurm_address(env: "os._Environ[str]") -> RankAddress:
    if "MASTER_ADDR" not in env:
        raise InputError(
            "Slurm started several tasks, but MASTER_ADDR is not set; export the first node's name as MASTER_ADDR "
            "before srun, as examples/slurm.sh does"
        )
    tasks = int(env["SLURM_STEP_NUM_TASKS"])
    tasks_per_node = env.get("SLURM_STEP_TASKS_PER_NODE", str(tasks))  # such as "8(x4)": uneven steps are not used
    return RankAddress(
        rank=int(env["SLURM_PROCID"]),
        world_size=tasks,
        local_rank=int(env["SLURM_LOCALID"]),
        local_world_size=int(tasks_per_node.split("(")[0].split(",")[0]),
        master_address=env["MASTER_ADDR"],
        master_port=int(env.get("MASTER_PORT", "29500")),
    )


def prepare_launch(threads: int) -> None:
    """Say to child processes how many threads each may use (read by OpenMP when a process starts)."""
    os.environ["OMP_NUM_THREADS"] = str(threads)


def threads_per_rank(local_ranks: int) -> int:
    """CPU threads for each of the ranks on this machine: its usable cores, shared evenly."""
    return max(1, len(os.sched_getaffinity(0)) // local_ranks)


def configure_process(device: DeviceKind, local_rank: int, threads: int) -> None:
    """Select this rank's GPU, or set this rank's CPU threads."""
    if device == "cuda":
        # Megatron's overlap of tensor-parallel communication wants kernels in the order of their launch.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        torch.cuda.set_device(local_rank)
    else:
        torch.set_num_threads(threads)


def quieten_libraries() -> None:
    """Silence the notices of megatron-core and torch that name packages which a CPU run does without."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    for message in (
        ".*[Tt]ransformer ?[Ee]ngine.*",
        ".*[Aa]pex.*",
        ".*nvidia-modelopt.*",
        ".*torch_dtype.*",
        ".*CUDA_DEVICE_MAX_CONNECTIONS.*",
        ".*async grad allreduce.*",
        ".*TypedStorage is deprecated.*",
        ".*full scope is deprecated.*",
        ".*isn't supported by the current version of mcore.*",
    ):
        warnings.filterwarnings("ignore", message=message)
    for name in ("megatron.core", "torch.distributed"):
        logging.getLogger(name).setLevel(logging.ERROR)
