"""The device of this process, and everything that the process reads from environment variables.

Besides `environment`, which sets the variables of libraries, no other module reads environment variables.
torch, which takes seconds to import, is imported by the functions that need it.
"""

import ctypes
import importlib.util
import logging
import os
import re
import socket
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from megatron_fanformer.errors import InputError
from megatron_fanformer.processes import usable_cores
from megatron_fanformer.runtime import environment
from megatron_fanformer.runtime.cuda_on_cpu import FUSED_GRADIENT_KERNEL
from megatron_fanformer.runtime.layout import DeviceKind
from megatron_fanformer.stores import is_url

if TYPE_CHECKING:
    import torch

VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
NVIDIA_DRIVER = Path("/proc/driver/nvidia")
# Blackwell and later: B200, GB200, B300, "RTX PRO 6000 Blackwell", R100.
AFTER_HOPPER = re.compile(r"\b[GV]?[BR]\d{3}\b|Blackwell")


def resolve_device(setting: Literal["auto", "cuda", "cpu"]) -> DeviceKind:
    """Return the device to run on; `auto` uses a usable GPU, else the CPU.

    Raises:
        InputError: a CPU run can see a usable GPU; CUDA is configured and not usable; or a GPU's driver is
            loaded that torch cannot use, since a broken installation must not silently start a CPU run.
    """
    import torch

    if torch.cuda.is_available():
        if setting == "cpu":
            raise InputError(
                "runtime.device is cpu on a machine with a usable GPU, which megatron-core would partly use; hide it "
                f"with an empty {VISIBLE_GPUS} in the environment, or set runtime.device to auto"
            )
        return "cuda"
    is_hidden = os.environ.get(VISIBLE_GPUS) == ""
    if setting == "cpu" or (setting == "auto" and is_hidden):
        return "cpu"
    if setting == "cuda":
        raise InputError(
            "runtime.device is cuda, but torch finds no usable GPU; check the driver with nvidia-smi, or set it to cpu"
        )
    if (NVIDIA_DRIVER / "version").exists():
        raise InputError(
            "runtime.device is auto and an NVIDIA driver is loaded, but torch cannot use a GPU; install a CUDA build "
            f"of torch that the driver supports, or hide the GPU with an empty {VISIBLE_GPUS} in the environment"
        )
    return "cpu"


def torch_device(kind: DeviceKind) -> "torch.device":
    """Return the device of this process's tensors: the GPU that `configure_process` selected, or the CPU."""
    import torch

    # torch takes a number alone for the GPU of that number; megatron-core names GPUs so, too.
    return torch.device(torch.cuda.current_device() if kind == "cuda" else "cpu")


def cache_folder() -> Path:
    """Return this user's cache folder, by the XDG base directories.

    Raises:
        InputError: there is no home folder, as in a container whose user the system does not know.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "megatron-fanformer"
    except RuntimeError:
        raise InputError(
            "there is no home folder for a cache (no HOME, and no such user); set XDG_CACHE_HOME to a folder"
        ) from None


def cache_of(name: str) -> Path | None:
    """Return the cache folder if `name` is a URL; None for a path of this machine, which needs no cache."""
    return cache_folder() if is_url(name) else None


def hide_gpus() -> None:
    """Hide all GPUs from this process and its children; must be called before torch looks for a GPU."""
    os.environ[VISIBLE_GPUS] = ""


def has_bf16_matrix_units(device: DeviceKind) -> bool:
    """Return whether bf16 products are faster than float32 ones: on supported GPUs, CPUs with AMX or AVX512-BF16.

    Where ONEDNN_MAX_CPU_ISA keeps oneDNN from a CPU's units, bf16 products are some fifty times slower than float32.
    """
    import torch

    if device == "cuda":
        return torch.cuda.is_bf16_supported()
    # torch has no public query. The first function asks oneDNN, the two others ask the CPU.
    is_enabled: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return is_enabled and (torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported())


def has_fused_gradient_kernel() -> bool:
    """Return whether megatron-core's own layers can add a weight gradient into its buffer inside the product.

    On a GPU they need NVIDIA apex's kernel; on a CPU they call its replacement in `megatron_cpu`.
    """
    import torch

    return not torch.cuda.is_available() or importlib.util.find_spec(FUSED_GRADIENT_KERNEL) is not None


def has_transformer_engine() -> bool:
    """Return whether Transformer Engine is installed and torch finds a GPU."""
    import torch

    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


def fp8_problem(recipe: str) -> str | None:
    """Return why this machine's GPU does not support an FP8 recipe (by Megatron's name), or None.

    The bounds are compute capabilities, as in Transformer Engine 2.20: FP8 came with 8.9, block scaling with 9.0 and
    CUDA 12.9, blocks of 32 in hardware with 10.0 (but 12.0 lacks some of their products).
    """
    import torch

    if not torch.cuda.is_available():
        return "there is no GPU"
    chip = torch.cuda.get_device_capability()
    name = f"{torch.cuda.get_device_name()} has compute capability {chip[0]}.{chip[1]}"
    if chip < (8, 9):
        return f"{name}, and FP8 needs 8.9 or higher"
    cuda = tuple(int(part) for part in (torch.version.cuda or "0.0").split("."))
    if recipe == "blockwise" and (chip < (9, 0) or cuda < (12, 9)):
        return f"{name} and torch is built for CUDA {torch.version.cuda}, and it needs 9.0 and CUDA 12.9"
    if recipe == "mxfp8" and not (10, 0) <= chip < (12, 0):
        return f"{name}, and it needs 10.x"
    return None


@dataclass(frozen=True, kw_only=True)
class RankAddress:
    """This process's rank, by its launcher, and the address of the store at which the ranks meet."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_address: str
    master_port: int


def rank_address() -> RankAddress | None:
    """Return this process's rank as torchrun or Slurm reports it; None if it was started without either.

    Raises InputError if Slurm started several tasks, and MASTER_ADDR is not set.
    """
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
    # A batch script itself has SLURM_NTASKS, too; only `srun` sets the number of tasks of a step.
    if int(env.get("SLURM_STEP_NUM_TASKS", "1")) < 2:
        return None
    if "MASTER_ADDR" not in env:
        raise InputError(
            "Slurm started several tasks, but MASTER_ADDR is not set; export the first node's name as MASTER_ADDR "
            "before srun, as examples/slurm.sh does"
        )
    tasks = int(env["SLURM_STEP_NUM_TASKS"])
    tasks_per_node = env.get("SLURM_STEP_TASKS_PER_NODE", str(tasks))  # "8(x4)": 8 on each of 4 nodes
    return RankAddress(
        rank=int(env["SLURM_PROCID"]),
        world_size=tasks,
        local_rank=int(env["SLURM_LOCALID"]),
        local_world_size=int(tasks_per_node.split("(")[0].split(",")[0]),  # the first node's; all must have as many
        master_address=env["MASTER_ADDR"],
        master_port=int(env.get("MASTER_PORT", "29500")),
    )


def rank_number() -> int:
    """Return this process's rank as torchrun or Slurm states it; 0 if it was started without either."""
    return int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))


def restart_count() -> int:
    """Return how often torchrun's agent has restarted this rank."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def is_bound_by_launcher() -> bool:
    """Return whether Slurm has bound this rank to cores of its own.

    Only a rank that is a whole task can have such cores: ranks that torchrun or this program starts within a task share
    the task's cores. Slurm states how it binds tasks, as `cores,mask_cpu:` or `none`.
    """
    env = os.environ
    tasks = env.get("SLURM_STEP_NUM_TASKS", "1")
    # torchrun sets RANK; then this rank is a whole task only if there are as many ranks as tasks.
    is_task = int(tasks) > 1 and ("RANK" not in env or env.get("WORLD_SIZE") == tasks)
    binding = env.get("SLURM_CPU_BIND_TYPE", "")
    return is_task and bool(binding.strip(":, ")) and "none" not in binding


def gpu_models() -> list[str]:
    """Return the models of all GPUs of this machine, hidden ones included, from the driver's files, without torch."""
    texts = (file.read_text() for file in sorted(NVIDIA_DRIVER.glob("gpus/*/information")))
    return [line.partition(":")[2].strip() for text in texts for line in text.splitlines() if line.startswith("Model")]


def is_after_hopper() -> bool:
    """Return whether a GPU of this machine is of the Blackwell architecture or later."""
    return any(map(AFTER_HOPPER.search, gpu_models()))


def sees_gpus() -> bool:
    """Return, without importing torch, whether the driver lists a GPU and GPUs are not hidden from this process."""
    return os.environ.get(VISIBLE_GPUS) != "" and bool(gpu_models())


def node_name() -> str:
    """Return the name of this machine: Slurm's, else the host's."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
LOOPBACK_INTERFACE = "lo"


def listen_on_loopback() -> None:
    """Make process groups of one machine's ranks listen on the loopback, unless the environment names an interface.

    Must be called before the first group is made.
    """
    for name in INTERFACES:
        os.environ.setdefault(name, LOOPBACK_INTERFACE)


LAUNCHED_HERE = "FANFORMER_LAUNCHED_HERE"  # path of the rank's payload
LAUNCHER = "FANFORMER_LAUNCHER"  # process id
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # path at which the launcher expects a rank's error


def rank_environment(
    rank: int, world_size: int, *, threads: int, store_port: int, payload: Path, error: Path
) -> dict[str, str]:
    """Return the environment of a rank that this process launches, by the names that torch and `rank_address` know.

    Ranks of one machine listen on its loopback alone, unless the environment names an interface.

    Args:
        store_port: the port of this process's store, at which the ranks meet.
        payload: the file with the payload of `launch.launch_ranks`.
        error: the file for the rank's error.
    """
    return {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        **{name: os.environ.get(name, LOOPBACK_INTERFACE) for name in INTERFACES},
        "MASTER_PORT": str(store_port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # or torch's rank 0 would host a store of its own
        "OMP_NUM_THREADS": str(threads),  # OpenMP reads it when a process starts
        ERROR_FILE: str(error),
        LAUNCHED_HERE: str(payload),
        LAUNCHER: str(os.getpid()),
    }


def launched_here() -> bool:
    """Return whether this process is a rank that `launch` started; then its launcher reports failures to the user."""
    return LAUNCHED_HERE in os.environ and "RANK" in os.environ


def launcher_process() -> int | None:
    """Return the process id of this rank's launcher; None if that is another program, such as torchrun."""
    return int(os.environ[LAUNCHER]) if launched_here() and LAUNCHER in os.environ else None


def launched_by_torchrun() -> bool:
    """Return whether this process is a rank that torch's elastic agent started."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ and not launched_here()


def payload_file() -> Path | None:
    """Return the file of this rank's payload; None if another program launched this rank."""
    return Path(os.environ[LAUNCHED_HERE]) if launched_here() else None


def error_file() -> Path | None:
    """Return the file in which this rank's launcher, ours or torchrun, expects an error; None if it expects none."""
    return Path(os.environ[ERROR_FILE]) if os.environ.get(ERROR_FILE) else None


# Settings of glibc's mallopt: never trim the heap, grow it by 256 MiB, and take no memory from outside the heap. Keys
# are the environment variables by which a user sets the same; values are mallopt's arguments (parameter, value).
MALLOPT_SETTINGS = {"MALLOC_TRIM_THRESHOLD_": (-1, -1), "MALLOC_TOP_PAD_": (-2, 2**28), "MALLOC_MMAP_MAX_": (-4, 0)}
_keeps_freed_memory = False


def keep_freed_memory() -> None:
    """Make glibc keep freed memory for the next step instead of returning large pieces to the kernel.

    Otherwise the kernel zeroes thousands of huge pages anew in every step. The process stays as large as at its peak,
    and grows if sizes change from step to step (`return_freed_memory`). A user's own malloc settings win.
    """
    global _keeps_freed_memory
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    is_set = any(name in os.environ for name in MALLOPT_SETTINGS) or "glibc.malloc." in os.environ.get(
        "GLIBC_TUNABLES", ""
    )
    if mallopt is None or is_set:
        return
    for parameter, value in MALLOPT_SETTINGS.values():
        mallopt(parameter, value)
    _keeps_freed_memory = True


def return_freed_memory() -> None:
    """Give the kernel back the unused memory that `keep_freed_memory` has kept.

    Call it now and then if tensors have many sizes: pieces kept for one size seldom fit the next, and the process
    would grow without end (beyond 23 GB in scoring the paper's tasks by a model of 13 MB).
    """
    if _keeps_freed_memory:
        ctypes.CDLL(None).malloc_trim(0)


def prepare_libraries(shape: environment.RunShape = environment.ANY_SHAPE) -> list[str]:
    """Set the variables that libraries read when they are imported; return a line for each user's value that differs.

    Every process that computes calls this first.

    Raises:
        InputError: the environment has a value that would make the run wrong.
    """
    quieten_libraries()
    return environment.prepare(shape)


def prepare_megatron(shape: environment.RunShape = environment.ANY_SHAPE, *, on_cpu: bool = False) -> None:
    """Prepare for the first import of megatron-core: quiet it, and adapt it to a machine without CUDA.

    Args:
        on_cpu: compute on the CPU, whatever the machine has.
    """
    if on_cpu:
        hide_gpus()
    prepare_libraries(shape)
    from megatron_fanformer.runtime import megatron_cpu

    megatron_cpu.install()


def threads_of_environment() -> int | None:
    """Return the number of threads in OMP_NUM_THREADS; None if it is not set, no number, or not positive."""
    # OMP_NUM_THREADS may list one number per nesting level of parallel regions; the first is the outermost level's.
    outermost = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(outermost) if outermost.isdecimal() and int(outermost) > 0 else None


def threads_per_rank(local_ranks: int) -> int:
    """Return the CPU threads of each rank on this machine: OMP_NUM_THREADS, else an equal share of the usable cores."""
    # A bound rank may use only its own cores, which it shares with no other rank.
    return threads_of_environment() or max(1, usable_cores() // (1 if is_bound_by_launcher() else local_ranks))


def configure_process(device: DeviceKind, local_rank: int, threads: int, *, deterministic: bool = False) -> None:
    """Select this rank's GPU; or, on a CPU, set the number of threads and keep freed memory for reuse.

    Args:
        deterministic: on a GPU, restrict torch to algorithms that give the same bits every time. (`prepare_libraries`
            sets the variables that libraries need for that.)
    """
    import torch

    if device == "cuda":
        if deterministic:
            torch.use_deterministic_algorithms(True)
            # Filling uninitialized memory would only cost time: nothing here reads it.
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.cuda.set_device(local_rank % torch.cuda.device_count())  # over gloo, ranks may share one
    else:
        torch.set_num_threads(threads)
        keep_freed_memory()


# Beginnings of notices of megatron-core and torch that mean nothing to a user of this package: missing GPU packages,
# and deprecated names in megatron-core itself.
NOTICES = (
    "Transformer Engine and Apex are not installed",
    "transformer_engine and apex are not installed",
    "Apex is not installed",
    "full scope is deprecated",
    "The 'megatron.core.transformer.custom_layers.transformer_engine'",
    "The .grad attribute of a Tensor that is not a leaf Tensor",
    "`torch.distributed.all_gather_into_tensor` is deprecated",
    "`torch.distributed.reduce_scatter_tensor` is deprecated",
    "`torch.distributed._all_gather_base` is deprecated",
    "`torch.distributed._reduce_scatter_base` is deprecated",
    "torch.distributed._all_gather_base is a private function",
    "torch.distributed._reduce_scatter_base is a private function",
    "barrier(): using the device under current context",
    "When using async grad allreduce",
    "When using sequence parallelism it is recommended",
    "TypedStorage is deprecated",
    "`load_state_dict` is deprecated",
    "The argument order of load",
    "torch.distributed is disabled, unavailable",
    "MimoModelConfig is experimental",
    "If you are using transformer_engine as the transformer implementation",
    # of calls within megatron-core 0.19
    "Warning: tp_group is None, using default tp group",
    "MLP requires ffn_hidden_size, but it was not provided",
    "Could not determine rank from torch.distributed",
)


def quieten_libraries() -> None:
    """Silence `NOTICES`, here and in children (checkpoint writers), and log messages below errors; idempotent."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # or tokenizers warn of forks
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or the profiler reports its start and its stop on the terminal
    for notice in NOTICES:
        warnings.filterwarnings("ignore", message=r"\s*" + re.escape(notice))
    filters = os.environ.get("PYTHONWARNINGS", "").split(",")
    ours = [f"ignore:{notice}" for notice in NOTICES if not {":", ","} & {*notice}]  # separators in the variable
    # Each filter once, or the variable grows with every command of this process until no child can be started with it.
    os.environ["PYTHONWARNINGS"] = ",".join(dict.fromkeys([*filter(None, filters), *ours]))
    for name in ("megatron.core", "torch.distributed", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.ERROR)
