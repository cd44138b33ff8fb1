"""The rank grid, and the start and end of a distributed run.

The grid has Megatron's order tp-cp-dp-pp: tensor parallel ranks are innermost, so that they share a node. The global
ranks for tensor 2 x context 2 x data 2 x pipeline 2:

             stage 0            stage 1
           tp 0  tp 1         tp 0  tp 1
dp 0 cp 0    0     1            8     9
     cp 1    2     3           10    11
dp 1 cp 0    4     5           12    13
     cp 1    6     7           14    15
"""

import os.path
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_fanformer.errors import InputError
from megatron_fanformer.ops import cpu_kernels
from megatron_fanformer.runtime import device as devices
from megatron_fanformer.runtime import megatron_cpu
from megatron_fanformer.runtime.agreement import reported_by_main, store_of_ranks
from megatron_fanformer.runtime.layout import DEFAULT_RUNTIME, ParallelConfig, RuntimeConfig
from megatron_fanformer.runtime.roll_call import naming_missing_ranks

MEETING_TIME = timedelta(minutes=10)  # how long the first ranks to start wait for the last

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection


@dataclass(frozen=True, kw_only=True)
class RankGrid:
    """This rank's place in the grid, and the process groups that are passed to the rest of the code."""

    device: devices.DeviceKind
    torch_device: torch.device  # device of this rank's tensors
    backend: str  # backend of the ranks' communication: `nccl` or `gloo`
    rank: int
    world_size: int
    data_parallel_rank: int
    data_parallel_size: int
    is_first_stage: bool
    is_last_stage: bool
    groups: "ProcessGroupCollection"
    samples_group: dist.ProcessGroup
    """The tensor and context parallel ranks of a replica's stage, which take the same samples. The group is for tensors
    on the CPU: hosts share samples among themselves, and no device waits for that."""
    exchanges_heads: bool = False  # whether a context parallel rank attends over whole sequences, with a part of heads
    is_deterministic: bool = False  # whether results must be bitwise reproducible (`runtime.deterministic_mode`)

    @property
    def context_parallel_size(self) -> int:
        """Return the number of ranks that share a sample's sequence."""
        return self.groups.cp.size()

    def takes_samples(self, *, has_document_ids: bool) -> bool:
        """Return whether this stage needs a step's samples: the first reads tokens, the last labels, and all stages
        the bounds of documents, where attention stays within them.
        """
        return self.is_first_stage or self.is_last_stage or has_document_ids

    @property
    def sharding_metadata(self) -> dict[str, Any]:
        """Return the metadata by which megatron-core names shards: one name per layer."""
        return {"non_homogeneous_layers": True, "dp_cp_group": self.groups.dp_cp}

    @property
    def has_fused_gradient_kernel(self) -> bool:
        """Return whether layers other than Transformer Engine's can add weight gradients inside the product."""
        return devices.has_fused_gradient_kernel()

    @property
    def cpu_kernels_problem(self) -> str | None:
        """Return why the ranks do not use this project's CPU kernels; None if they use them."""
        return cpu_kernels.problem()

    @property
    def is_main(self) -> bool:
        """Return whether this is the rank that writes files, logs and messages."""
        return self.rank == 0


@contextmanager
def process_group(config: RuntimeConfig, address: devices.RankAddress | None) -> Iterator[devices.DeviceKind]:
    """Join the process group of the ranks at `address`, or, if that is None, of this rank alone; yield the device.

    The group is destroyed at the end, except after an error on one of several ranks, where destroying it would wait for
    the others.
    """
    kind = devices.resolve_device(config.device)
    if kind == "cpu":
        megatron_cpu.install()
    local_ranks = address.local_world_size if address else 1
    threads = config.threads_per_rank or devices.threads_per_rank(local_ranks)
    devices.configure_process(
        kind, address.local_rank if address else 0, threads, deterministic=config.deterministic_mode
    )
    backend = config.backend(kind)
    if address is None:
        devices.listen_on_loopback()
        with tempfile.TemporaryDirectory(prefix="fanformer-") as folder:
            file_store = dist.FileStore(os.path.join(folder, "store"), 1)
            dist.init_process_group(backend, store=file_store, rank=0, world_size=1)
            try:
                with cpu_kernels_of(config, kind):
                    yield kind
            finally:
                dist.destroy_process_group()
        return
    store = store_of_ranks(address, max(config.timeout, MEETING_TIME))
    with naming_missing_ranks(store.clone(), address.rank, address.world_size):
        dist.init_process_group(
            backend, store=store, rank=address.rank, world_size=address.world_size, timeout=config.timeout
        )
        with cpu_kernels_of(config, kind):
            yield kind
        dist.destroy_process_group()


@contextmanager
def cpu_kernels_of(config: RuntimeConfig, kind: devices.DeviceKind) -> Iterator[None]:
    """Use this project's CPU kernels in the block, on all ranks of the process group or, if one cannot, on none.

    Weights that ranks share would drift apart if only some of the ranks used the kernels.

    Raises:
        InputError: the kernels are configured, and a rank cannot build them, or ranks are on GPUs.
    """
    are_wanted = kind == "cpu" and config.cpu_kernels != "torch"
    reason_for_none = "they are not asked for" if kind == "cpu" else "ranks on GPUs do not use them"
    problem = _kernels_problem() if are_wanted else reason_for_none
    if kind == "cpu" and dist.get_world_size() > 1:
        problems: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(problems, problem)
        problem = next(filter(None, problems), None)
    if problem is not None:
        cpu_kernels.unload(problem)
    if problem is not None and config.cpu_kernels == "compiled":
        raise reported_by_main(InputError(f"runtime.cpu_kernels is compiled, but {problem}; set it to torch"))
    try:
        yield
    finally:
        cpu_kernels.unload("no run is going on")


def _kernels_problem() -> str | None:
    """Load this project's CPU kernels; return why this rank cannot, or None."""
    try:
        return cpu_kernels.load(devices.cache_folder())
    except InputError as error:  # there is no folder to build them in
        return str(error).partition("; ")[0]


@contextmanager
def rank_grid(
    config: ParallelConfig, kind: devices.DeviceKind, runtime: RuntimeConfig = DEFAULT_RUNTIME
) -> Iterator[RankGrid]:
    """Build Megatron's process groups from the current process group, and yield the grid; destroy them at the end."""
    from megatron.core import parallel_state
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.process_groups_config import ProcessGroupCollection

    if kind == "cuda" and dist.get_backend() == "gloo":
        reduce_one_bucket_a_call()
    config.resolve_data_parallel_size(dist.get_world_size())  # raises if the layout does not fit the ranks
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=config.virtual_stages if config.virtual_stages > 1 else None,
        context_parallel_size=config.context_parallel_size,
        num_distributed_optimizer_instances=config.num_distributed_optimizer_instances,
        distributed_timeout_minutes=runtime.timeout / timedelta(minutes=1),
        create_gloo_process_groups=True,  # the distributed optimizer asks for them when it saves
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    grid = RankGrid(
        device=kind,
        torch_device=devices.torch_device(kind),
        backend=dist.get_backend(),
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        data_parallel_rank=parallel_state.get_data_parallel_rank(),
        data_parallel_size=parallel_state.get_data_parallel_world_size(),
        is_first_stage=parallel_state.is_pipeline_first_stage(),
        is_last_stage=parallel_state.is_pipeline_last_stage(),
        groups=groups,
        samples_group=for_host_tensors(groups.tp_cp, runtime.timeout),
        exchanges_heads=config.exchanges_heads,
        is_deterministic=runtime.deterministic_mode,
    )
    try:
        yield grid
    finally:
        parallel_state.destroy_model_parallel()
        RotaryEmbedding.forward.cache_clear()  # its entries hold modules, which hold process groups


@contextmanager
def distributed(
    config: ParallelConfig, address: devices.RankAddress | None = None, runtime: RuntimeConfig = DEFAULT_RUNTIME
) -> Iterator[RankGrid]:
    """Set up the process group for a whole run, and yield the rank grid; see `process_group` for `address`."""
    with process_group(runtime, address) as kind, rank_grid(config, kind, runtime) as grid:
        yield grid


def for_host_tensors(group: dist.ProcessGroup, timeout: timedelta) -> dist.ProcessGroup:
    """Return a group of the same ranks that takes tensors on the CPU; a collective call of these ranks."""
    if group.size() == 1 or dist.get_backend(group) != "nccl":
        return group
    ranks = dist.get_process_group_ranks(group)
    # Only these ranks take part; otherwise every rank would have to take part in making thousands of groups.
    host_group = dist.new_group(ranks, timeout=timeout, backend="gloo", use_local_synchronization=True)
    assert isinstance(host_group, dist.ProcessGroup)
    return host_group


def reduce_one_bucket_a_call() -> None:
    """Make megatron-core reduce gradients and gather weights with one call for each bucket, over gloo alone.

    Ranks that share a GPU use gloo, since NCCL needs a GPU for each rank. On GPU tensors, gloo's collectives take one
    tensor a call, and gloo cannot send from rank to rank (`train.machine_rules` refuses pipeline stages).
    """
    from megatron.core.distributed import param_and_grad_buffer as buffers

    assert hasattr(buffers, "_coalescing_manager"), "megatron-core reduces buckets in another way"
    buffers._coalescing_manager = _coalesce_unless_gloo


@contextmanager
def _coalesce_unless_gloo(group: dist.ProcessGroup, *, async_ops: bool = False) -> Iterator[Any]:
    """Coalesce the block's collectives as torch does; over gloo, each blocking one is a call of its own."""
    if dist.get_backend(group) == "gloo" and not async_ops:
        yield None
        return
    with dist._coalescing_manager(group, async_ops=async_ops) as works:
        yield works
