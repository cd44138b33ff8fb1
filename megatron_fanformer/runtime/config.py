"""The section `runtime` of a run's configuration: what its ranks run on."""

from dataclasses import dataclass
from typing import Literal

DeviceKind = Literal["cuda", "cpu"]


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    """What the ranks run on."""

    device: Literal["auto", "cuda", "cpu"] = "auto"
    """`auto` uses a GPU where torch can, else the CPU; it refuses if an NVIDIA driver is loaded that torch cannot use.
    `cpu` on a machine with a usable GPU is refused: hide the GPU with an empty `CUDA_VISIBLE_DEVICES`."""
    threads_per_rank: int | None = None
    """CPU threads per rank; null: `OMP_NUM_THREADS` where the environment sets it (as torchrun does for ranks), else
    the machine's usable cores, in a container those of its quota, shared evenly by its ranks."""
    cpu_kernels: Literal["auto", "compiled", "torch"] = "auto"
    """What computes a layer's element-wise functions and attention, the loss head's softmax and bf16's weight gradients
    on a CPU: this project's kernels, which the machine's C++ compiler builds once (`compiled`), or PyTorch's operations
    (`torch`). `auto` uses the first where every rank finds a compiler."""
    cpu_shared_memory_collectives: bool = True
    """Whether CPU ranks of one machine sum and gather through memory that they share; false: over gloo's sockets, as
    ranks of several machines do. Neither changes what is computed but for the order of sums."""
    deterministic_mode: bool = False
    """Reproduce the same numbers bit for bit, on a GPU at the cost of speed; a CPU run always does
    (docs/gpu.md#the-same-numbers-every-time)."""
    distributed_backend: Literal["nccl", "gloo"] | None = None
    """How ranks communicate; null: over NCCL on GPUs, over gloo on CPUs. gloo also serves ranks that share a GPU, but
    for pipeline stages and `cp_comm_type` p2p, at a fraction of the speed; NCCL needs one GPU a rank."""
    distributed_timeout_minutes: float | None = None
    """How long a rank may be silent, or hold up the others in a step, before the run ends and names it; null: ten times
    the longest of the last twenty steps, and at least 2 minutes (docs/clusters.md#when-a-rank-fails)."""

    def backend(self, device: DeviceKind) -> str:
        """`distributed_backend` resolved for a device."""
        return self.distributed_backend or {"cuda": "nccl", "cpu": "gloo"}[device]

    def problems(self) -> list[str]:
        """Rules of single fields that this configuration breaks, one line each."""
        found = []
        if self.threads_per_rank is not None and self.threads_per_rank < 1:
            found.append(f"runtime.threads_per_rank is {self.threads_per_rank}; it must be at least 1, or null")
        if self.distributed_timeout_minutes is not None and not self.distributed_timeout_minutes > 0:
            found.append(
                f"runtime.distributed_timeout_minutes is {self.distributed_timeout_minutes}; "
                "it must be above 0, or null"
            )
        return found


DEFAULT_RUNTIME = RuntimeConfig()
