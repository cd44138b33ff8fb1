"""The torch optimizers that replace megatron-core's Adam: AdamW and Muon. megatron-core shards their states.

A step is computed in float32. States kept in bf16 are rounded to the nearest number when they are stored.

Muon needs whole matrices, but each rank of a stage holds only a part. `plan.matrix_updates` assigns every matrix an
owner, and orders the matrices into rounds in which a rank owns at most one. In a round, each owner receives all parts
of its matrix in an all-to-all, orthogonalizes the whole, and sends the parts of the update back in a second one. So a
rank never holds more than one whole matrix. Products and messages are float32 on CPUs, bf16 on GPUs.
"""

import inspect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fanformer.model.placements import all_tensors
from megatron_fanformer.ops.matrices import orthogonalize
from megatron_fanformer.plan.matrix_updates import BY_MUON, NEWTON_SCHULZ_STEPS, newton_schulz_flops, owners, rounds

COPIED_ELEMENTS = 2**20
"""Elements of a weight updated at a time if a state is in bf16, so that float32 copies of states take little memory."""


class Adam(torch.optim.Optimizer):
    """AdamW by torch's fused kernel. Like FusedAdam, it keeps `step` in the parameter group, not in each state."""

    state_dtypes: Mapping[str, torch.dtype] = {}
    """Number formats of states, by name; a state without an entry has the format of its weight."""

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        adam_w_mode: bool = True,  # this and the next are for megatron-core, which passes them to any Adam
        capturable: bool = False,
    ) -> None:
        assert adam_w_mode and not capturable, "only decoupled decay outside CUDA graphs"
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            if group["params"]:  # a group that is empty on this rank gets no step
                group["step"] = group.get("step", 0) + 1
                self._step_group(group)

    def _step_group(self, group: dict[str, Any]) -> None:
        parameters = [p for p in group["params"] if p.grad is not None]
        states = [self._state_of(p, "exp_avg", "exp_avg_sq") for p in parameters]
        gradients = [p.grad for p in parameters]
        first, second = [state["exp_avg"] for state in states], [state["exp_avg_sq"] for state in states]
        if all(moment.dtype == torch.float32 for moment in (*first, *second)):
            _update(group, parameters, gradients, first, second)
            return
        for tensors in zip(parameters, gradients, first, second, strict=True):
            blocks = (tensor.view(-1).split(COPIED_ELEMENTS) for tensor in tensors)
            for weight, gradient, *moments in zip(*blocks, strict=True):
                float32_moments = [moment.float() for moment in moments]  # a moment in float32 is not copied
                _update(group, [weight], [gradient], [float32_moments[0]], [float32_moments[1]])
                for moment, value in zip(moments, float32_moments, strict=True):
                    moment.copy_(value)  # rounds to bf16

    def _state_of(self, weight: Tensor, *names: str) -> dict[str, Tensor]:
        """Return the states of a weight by name; if there are none yet, create those of `names`, filled with zeros."""
        if not self.state[weight]:
            self.state[weight] = {
                name: torch.zeros_like(weight, dtype=self.state_dtypes.get(name, weight.dtype)) for name in names
            }
        return self.state[weight]


def with_bf16_moments(fused_adam: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Return an Adam with both moments in bf16: `fused_adam` if it is Transformer Engine's, ours if it is apex's."""
    if "exp_avg_dtype" not in inspect.signature(fused_adam).parameters:  # apex's
        return Adam

    class FusedAdamOfBF16Moments(fused_adam):  # type: ignore[valid-type, misc]
        """Sets the formats, because megatron-core creates the optimizer without these arguments."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, exp_avg_dtype=torch.bfloat16, exp_avg_sq_dtype=torch.bfloat16, **kwargs)

    return FusedAdamOfBF16Moments


def _update(
    group: dict[str, Any], weights: list[Tensor], gradients: list[Tensor], first: list[Tensor], second: list[Tensor]
) -> None:
    beta1, beta2 = group["betas"]
    step = torch.full((), float(group["step"]), device=group["params"][0].device)  # shared: the kernel only reads it
    torch._fused_adamw_(
        weights,
        gradients,
        first,
        second,
        [],  # the maxima of the second moment, which only amsgrad has
        [step] * len(weights),
        lr=group["lr"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
    )


# -- Muon


@dataclass(frozen=True)
class Matrix:
    """A matrix of a stage, and how the ranks share it."""

    shard: torch.Size
    """Shape of the shard of a tensor parallel rank."""
    shards: int
    """Number of shards; 1 if every tensor parallel rank holds the whole matrix."""
    dimension: int
    """Axis along which the shards are joined."""
    rows_of_group: tuple[int, ...]
    """In QKV, which interleaves query groups: the rows of queries, keys and values in each group. Queries, keys and
    values are orthogonalized separately. Empty for all other matrices."""
    ranges: list[tuple[int, int]]
    """For each data parallel rank, the first and the last (exclusive) element of the shard that it holds."""
    main: Tensor | None
    """This rank's part of the float32 main weight, in any shape; None if it holds nothing."""

    @property
    def part_shapes(self) -> list[tuple[int, int]]:
        """The shapes of the matrices that are orthogonalized: the whole one, or queries, keys and values."""
        rows, columns = (size * (self.shards if axis == self.dimension else 1) for axis, size in enumerate(self.shard))
        if not self.rows_of_group:
            return [(rows, columns)]
        groups = rows // sum(self.rows_of_group)
        return [(groups * rows_of_part, columns) for rows_of_part in self.rows_of_group]

    def update(self, whole: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
        """Return `whole`, [m, n], orthogonalized, times `scale` and the root of its longer side; QKV part by part."""

        def orthogonalize_part(part: Tensor) -> Tensor:
            factor = scale * math.sqrt(max(part.shape))
            return orthogonalize(part, NEWTON_SCHULZ_STEPS, dtype).mul_(factor)

        if not self.rows_of_group:
            return orthogonalize_part(whole)
        # Queries, keys and values are each [query groups, rows of one group, n] until they are flattened.
        by_part = whole.unflatten(0, (-1, sum(self.rows_of_group))).split(self.rows_of_group, dim=1)
        parts = [orthogonalize_part(part.flatten(0, 1)).unflatten(0, (part.shape[0], -1)) for part in by_part]
        return torch.cat(parts, dim=1).flatten(0, 1)


@dataclass
class Settings:
    """Muon's settings, the matrices of this rank's stage, and the ranks that hold them together."""

    momentum: float
    scale: float
    dtype: torch.dtype
    """Type of products and messages."""
    empty: Tensor
    """An empty tensor of that type, on the device."""
    group: dist.ProcessGroup
    """The ranks that hold the matrices together, ordered by data parallel rank, then by tensor parallel rank."""
    tensor_size: int
    """Number of tensor parallel ranks."""
    matrices: list[Matrix]
    owner: list[int]
    """For each matrix, the rank of `group` that owns it."""
    rounds: list[list[int]]
    """For each round, the numbers of its matrices."""


class MuonAndAdam(Adam):
    """Muon for parameter groups with the entry `BY_MUON`, AdamW for all others."""

    settings: Settings

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; a collective call."""
        super().step(closure)  # AdamW, for all but the matrices: see `_step_group`
        groups = {main: group for group in self.param_groups if BY_MUON in group for main in group["params"]}
        for matrix_numbers in self.settings.rounds:
            self._step_round(matrix_numbers, groups)

    def _step_group(self, group: dict[str, Any]) -> None:
        if BY_MUON not in group:  # `step` updates the matrices afterwards, in rounds
            super()._step_group(group)

    def _step_round(self, matrix_numbers: list[int], groups: dict[Tensor, dict[str, Any]]) -> None:
        """Orthogonalize the matrices of a round with the other ranks, and update this rank's parts of the weights."""
        settings = self.settings
        matrices = {settings.owner[number]: settings.matrices[number] for number in matrix_numbers}
        gradients = {
            owner: self._nesterov_gradient(matrix.main) for owner, matrix in matrices.items() if matrix.main is not None
        }
        for owner, update in exchange_updates(settings, matrices, gradients).items():
            main = matrices[owner].main
            assert main is not None
            group = groups[main]
            change = update.reshape(main.shape).to(main.dtype).add_(main, alpha=group["weight_decay"])
            main.add_(change, alpha=-group["lr"])

    def _nesterov_gradient(self, main: Tensor) -> Tensor:
        """Advance the momentum of this rank's part of a matrix, and return the gradient with Nesterov's momentum."""
        state = self._state_of(main, "momentum_buffer")["momentum_buffer"]
        assert main.grad is not None
        momentum = self.settings.momentum
        buffer = state.float()  # a float32 state is returned itself, not copied
        buffer.lerp_(main.grad, 1 - momentum)
        state.copy_(buffer)  # rounds to the format of the state
        return torch.lerp(main.grad, buffer, momentum, out=None if buffer is state else buffer)  # reuses a copy


def exchange_updates(
    settings: Settings, matrices: dict[int, Matrix], gradients: dict[int, Tensor]
) -> dict[int, Tensor]:
    """Return this rank's parts of the updates of one round's matrices, in any shape, by the matrix's owner.

    Args:
        matrices: the matrices of the round, by owner (a rank of `settings.group`).
        gradients: this rank's parts of the matrices to orthogonalize, by owner.
    """
    group, tensor_size, dtype = settings.group, settings.tensor_size, settings.dtype
    ranks, rank = group.size(), group.rank()
    owned = matrices.get(rank)  # the matrix of this round that this rank owns, if any
    if ranks == 1:
        assert owned is not None
        return {0: owned.update(gradients[0].view(owned.shard), settings.scale, dtype)}

    def num_elements(matrix: Matrix | None, holder: int, *, to_owner: bool) -> int:
        """Return how many elements of a matrix the rank `holder` sends to the owner, or else gets back from it."""
        if matrix is None:
            return 0
        first, last = matrix.ranges[holder // tensor_size]
        is_copy = matrix.shards == 1 and holder % tensor_size > 0
        return 0 if to_owner and is_copy else last - first  # of ranks with equal parts, only the first one sends it

    sent = [num_elements(matrices.get(owner), rank, to_owner=True) for owner in range(ranks)]
    received = [num_elements(owned, holder, to_owner=True) for holder in range(ranks)]
    message = torch.cat([settings.empty, *(gradients[to].flatten().to(dtype) for to in range(ranks) if sent[to])])
    parts = _all_to_all(message, sent, received, settings)
    del message  # each of the tensors deleted here is as large as the matrix
    sent_back = [num_elements(owned, holder, to_owner=False) for holder in range(ranks)]
    results = settings.empty
    if owned is not None:
        whole = _join_parts(owned, parts, tensor_size)
        del parts
        update = owned.update(whole, settings.scale, dtype)
        del whole
        results = results.new_empty(sum(sent_back))
        shards = [shard.flatten() for shard in update.chunk(owned.shards, dim=owned.dimension)]
        del update
        for holder, result in enumerate(results.split(sent_back)):
            first, last = owned.ranges[holder // tensor_size]
            shard_number = holder % tensor_size if owned.shards > 1 else 0
            result.copy_(shards[shard_number][first:last])
        del shards
    got_back = [num_elements(matrices.get(owner), rank, to_owner=False) for owner in range(ranks)]
    updates = _all_to_all(results, sent_back, got_back, settings)
    return {owner: update for owner, update in enumerate(updates) if got_back[owner]}


def _join_parts(matrix: Matrix, parts: Sequence[Tensor], tensor_size: int) -> Tensor:
    """Return the whole matrix [m, n] from the flat parts of the ranks, ordered as in `Settings.group`."""
    # Every `tensor_size`-th rank has a part of the same shard.
    shards = [torch.cat(list(parts[shard::tensor_size])).view(matrix.shard) for shard in range(matrix.shards)]
    return torch.cat(shards, dim=matrix.dimension) if len(shards) > 1 else shards[0]


def _all_to_all(message: Tensor, sent: list[int], received: list[int], settings: Settings) -> tuple[Tensor, ...]:
    """Send consecutive pieces of a flat message to the ranks of the group; return the pieces received, by rank."""
    output = message.new_empty(sum(received))
    dist.all_to_all_single(output, message, received, sent, group=settings.group)
    return output.split(received)


def connect_muon(config: Any, optimizer: Any, stages: list[Any], is_matrix: Callable[[str, int], bool]) -> None:
    """Give the torch optimizer in megatron-core's `optimizer` its settings and the matrices of this rank's stages.

    Args:
        config: the section `optimizer` of the run's configuration.
        is_matrix: returns whether Muon updates the weight with this name and number of dimensions.
    """
    from megatron.core.process_groups_config import ProcessGroupCollection

    groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "dp_cp", "tp_dp_cp"])
    is_sharded, tensor_size = stages[0].ddp_config.use_distributed_optimizer, groups.tp.size()
    data_ranks = groups.dp_cp.size() if is_sharded else 1
    group = groups.tp if data_ranks == 1 else groups.tp_dp_cp
    # `exchange_updates` finds a rank's part of a matrix by this order of ranks.
    assert group.rank() == groups.tp.rank() + (tensor_size * groups.dp_cp.rank() if data_ranks > 1 else 0)
    matrices = [
        _describe_matrix(optimizer, stage, name, weight, tensor_size, data_ranks)
        for stage in stages
        for name, weight in stage.named_parameters()
        if is_matrix(name, weight.ndim)
    ]
    device = next((weight.device for stage in stages for weight in stage.parameters()), torch.device("cpu"))
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    flops = [sum(newton_schulz_flops(*shape) for shape in matrix.part_shapes) for matrix in matrices]
    owner = owners(flops, group.size())
    optimizer.optimizer.settings = Settings(
        momentum=config.muon_momentum,
        scale=config.muon_extra_scale_factor,
        dtype=dtype,
        empty=torch.empty(0, dtype=dtype, device=device),
        group=group,
        tensor_size=tensor_size,
        matrices=matrices,
        owner=owner,
        rounds=rounds(owner),
    )


def _describe_matrix(optimizer: Any, stage: Any, name: str, weight: Any, tensor_size: int, data_ranks: int) -> Matrix:
    is_shard, config = getattr(weight, "tensor_model_parallel", False), stage.config
    heads_per_group = config.num_attention_heads // config.num_query_groups
    layer_tensor = next(tensor for tensor in all_tensors() if name.endswith(tensor.name))
    places = getattr(optimizer, "model_param_group_index_map", None)
    if isinstance(places, dict):  # megatron-core's distributed optimizer
        group, number = places.get(weight, (None, None))  # number of the group, and of the weight in the group
        main = None if group is None else optimizer.optimizer.param_groups[group]["params"][number]
        ranges = _shard_ranges(stage, weight, data_ranks)
    else:
        main, ranges = getattr(weight, "main_param", weight), [(0, weight.numel())]  # float32 weights: no copy
    return Matrix(
        shard=weight.shape,
        shards=tensor_size if is_shard else 1,
        dimension=weight.partition_dim if is_shard else 0,
        rows_of_group=layer_tensor.rows_of_group(heads_per_group, config.kv_channels),
        ranges=ranges,
        main=main,
    )


def _shard_ranges(stage: Any, weight: Any, data_ranks: int) -> list[tuple[int, int]]:
    """Return for each data parallel rank the first and the last (exclusive) element of a weight that it holds.

    megatron-core cuts the bucket that contains the weight into equal parts, one for each of these ranks.
    """
    buffer = next(buffer for buffer in stage.buffers if weight in buffer.param_index_map)
    start, end, number = buffer.param_index_map[weight][:3]
    bucket = buffer.buckets[number]
    size = bucket.grad_data.numel() // data_ranks
    bounds = [bucket.offset + size * rank for rank in range(data_ranks + 1)]
    bounds_in_weight = [min(max(bound, start), end) - start for bound in bounds]
    return list(itertools.pairwise(bounds_in_weight))
