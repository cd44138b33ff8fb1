"""The section `runtime` of a run's configuration: what its ranks run on."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

DeviceKind = Literal["cuda", "cpu"]


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    """Device, threads and communication of the ranks."""

    device: Literal["auto", "cuda", "cpu"] = "auto"
    """`auto`: a GPU if torch can use one, else the CPU. `cpu` beside a usable GPU is refused: set
    `CUDA_VISIBLE_DEVICES` to nothing."""
    threads_per_rank: int | None = None
    """CPU threads per rank; null: `OMP_NUM_THREADS`, else the cores divided by the ranks of a machine."""
    cpu_kernels: Literal["auto", "compiled", "torch"] = "auto"
    """This project's CPU kernels, built by the machine's C++ compiler, or PyTorch's operations; `auto`: `compiled` if
    every rank finds a compiler."""
    deterministic_mode: bool = False
    """Bitwise the same numbers every time, more slowly on a GPU; a CPU run always has them
    (docs/gpu.md#the-same-numbers-every-time)."""
    distributed_backend: Literal["nccl", "gloo"] | None = None
    """null: NCCL on GPUs, gloo on CPUs. gloo also serves ranks that share a GPU, slowly, without pipeline stages or
    `cp_comm_type` p2p."""
    distributed_timeout_minutes: float | None = None
    """Time that a collective waits for a rank before the run ends; null: 10 minutes
    (docs/clusters.md#when-a-rank-fails)."""

    def backend(self, device: DeviceKind) -> str:
        """Return `distributed_backend` resolved for a device."""
        return self.distributed_backend or {"cuda": "nccl", "cpu": "gloo"}[device]

    @property
    def timeout(self) -> timedelta:
        """`distributed_timeout_minutes`, of every process group."""
        return timedelta(minutes=self.distributed_timeout_minutes or 10)

    def problems(self) -> list[str]:
        """Return the rules of single fields that this configuration breaks, one line each."""
        lines = []
        if self.threads_per_rank is not None and self.threads_per_rank < 1:
            lines.append(f"runtime.threads_per_rank is {self.threads_per_rank}; it must be at least 1, or null")
        if self.distributed_timeout_minutes is not None and not self.distributed_timeout_minutes > 0:
            lines.append(
                f"runtime.distributed_timeout_minutes is {self.distributed_timeout_minutes}; "
                "it must be above 0, or null"
            )
        return lines


DEFAULT_RUNTIME = RuntimeConfig()
