"""The torch optimizers that megatron-core shards in the place of its Adam: AdamW and Muon.

A step is computed in float32, whatever its states are kept in; those in bf16 are rounded to the nearest as they are
stored.

Muon needs whole matrices, which the ranks of a stage hold in parts; `plan.matrix_updates` says which rank owns which.
In each round a rank owns one matrix at most: it gets the parts of the others by an all-to-all, orthogonalizes the
whole, and sends their parts back by another, so that no rank ever holds more than one whole matrix of others. Products
and messages are float32 on CPUs, bf16 on GPUs.
"""

import inspect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fanformer.model.placements import all_tensors
from megatron_fanformer.ops.matrices import orthogonalize
from megatron_fanformer.plan.matrix_updates import BY_MUON, NEWTON_SCHULZ_STEPS, newton_schulz_flops, owners, rounds

COPIED_ELEMENTS = 2**20
"""Elements of a weight that are updated at a time where states are not float32: their copies take little memory."""


class Adam(torch.optim.Optimizer):
    """AdamW by torch's fused kernel, keeping its state as FusedAdam does: `step` in the parameter group."""

    state_dtypes: Mapping[str, torch.dtype] = {}
    """Number formats of states, by name; a state that is not here has its weight's."""

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        adam_w_mode: bool = True,
        capturable: bool = False,
    ) -> None:
        assert adam_w_mode and not capturable, "only decoupled decay outside CUDA graphs"
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            if group["params"]:  # as FusedAdam does: an empty group of a shard keeps no step
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
                exact = [moment.float() for moment in moments]  # themselves, where they are float32
                _update(group, [weight], [gradient], exact[:1], exact[1:])
                store(moments, exact)

    def _state_of(self, weight: Tensor, *names: str) -> dict[str, Tensor]:
        if not self.state[weight]:
            self.state[weight] = {
                name: torch.zeros_like(weight, dtype=self.state_dtypes.get(name, weight.dtype)) for name in names
            }
        return self.state[weight]


def store(states: list[Tensor], values: list[Tensor]) -> None:
    """Round the values that a step computed to the states' formats, where they are other tensors."""
    for state, value in zip(states, values, strict=True):
        if state is not value:
            state.copy_(value)


def with_bf16_moments(fused: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Return Transformer Engine's Adam with both moments in bf16; ours in the place of apex's, which has none."""
    if "exp_avg_dtype" not in inspect.signature(fused).parameters:
        return Adam

    class FusedAdamOfBF16Moments(fused):  # type: ignore[valid-type, misc]
        """Made by megatron-core, which does not say which formats."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, exp_avg_dtype=torch.bfloat16, exp_avg_sq_dtype=torch.bfloat16, **kwargs)

    return FusedAdamOfBF16Moments


def _update(
    group: dict[str, Any], weights: list[Tensor], gradients: list[Tensor], first: list[Tensor], second: list[Tensor]
) -> None:
    beta1, beta2 = group["betas"]
    step = torch.full((), float(group["step"]), device=group["params"][0].device)  # made there, and only read
    torch._fused_adamw_(
        weights,
        gradients,
        first,
        second,
        [],
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
    """A matrix of a stage, and the parts of it that ranks hold."""

    shard: torch.Size
    """Shape of a tensor parallel rank's shard."""
    shards: int
    """Number of shards; 1 where every tensor parallel rank holds it whole."""
    dimension: int
    """Axis along which shards are joined."""
    rows_of_group: tuple[int, ...]
    """Rows of the parts of each query group that are orthogonalized apart; none: all together."""
    ranges: list[tuple[int, int]]
    """First and last (exclusive) element of the shard that each data parallel rank holds."""
    main: Tensor | None
    """This rank's part of the float32 main weight, in any shape; None where it holds nothing."""

    @property
    def part_shapes(self) -> list[tuple[int, int]]:
        """Return the shapes of the whole matrices that are orthogonalized."""
        rows, columns = (size * (self.shards if axis == self.dimension else 1) for axis, size in enumerate(self.shard))
        groups = rows // sum(self.rows_of_group) if self.rows_of_group else 1
        return [(groups * part, columns) for part in self.rows_of_group or (rows,)]

    def update(self, whole: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
        """Return the orthogonalized matrix [m, n], times `scale` and the root of its longer side."""

        def of_part(part: Tensor) -> Tensor:
            factor = scale * math.sqrt(max(part.shape))
            return orthogonalize(part, NEWTON_SCHULZ_STEPS, dtype).mul_(factor)

        if not self.rows_of_group:
            return of_part(whole)
        by_group = whole.unflatten(0, (-1, sum(self.rows_of_group))).split(self.rows_of_group, dim=1)
        parts = [of_part(part.flatten(0, 1)).unflatten(0, (part.shape[0], -1)) for part in by_group]
        return torch.cat(parts, dim=1).flatten(0, 1)


@dataclass
class Settings:
    """Settings of a step, and the ranks that take it together."""

    momentum: float
    scale: float
    dtype: torch.dtype
    """Type of products and messages."""
    nothing: Tensor
    """An empty tensor of that type, on the device."""
    group: dist.ProcessGroup
    """The ranks that hold the matrices together: tensor parallel ones first."""
    tensor: int
    """Tensor parallel ranks of it."""
    matrices: list[Matrix]
    rounds: list[list[int]] = field(init=False)
    """Numbers of the matrices of each round."""
    owner: list[int] = field(init=False)
    """The rank of `group` that owns each matrix."""

    def __post_init__(self) -> None:
        flops = [sum(newton_schulz_flops(*shape) for shape in matrix.part_shapes) for matrix in self.matrices]
        self.owner = owners(flops, self.group.size())
        self.rounds = rounds(self.owner)


class MuonAndAdam(Adam):
    """Muon for groups of matrices, else AdamW."""

    settings: Settings

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; a collective call."""
        super().step(closure)
        groups = {main: group for group in self.param_groups if BY_MUON in group for main in group["params"]}
        for matrices in self.settings.rounds:
            self._step_round(matrices, groups)

    def _step_group(self, group: dict[str, Any]) -> None:
        if BY_MUON not in group:  # matrices follow, all of a round together
            super()._step_group(group)

    def _step_round(self, numbers: list[int], groups: dict[Tensor, dict[str, Any]]) -> None:
        settings = self.settings
        matrices = {settings.owner[number]: settings.matrices[number] for number in numbers}
        gradients = {rank: self._direction(matrix.main) for rank, matrix in matrices.items() if matrix.main is not None}
        for rank, update in exchanged(settings, matrices, gradients).items():
            main = matrices[rank].main
            assert main is not None
            group = groups[main]
            change = update.reshape(main.shape).to(main.dtype).add_(main, alpha=group["weight_decay"])
            main.add_(change, alpha=-group["lr"])

    def _direction(self, main: Tensor) -> Tensor:
        """Advance the momentum of a part, and return what is orthogonalized: Nesterov's look ahead."""
        kept = self._state_of(main, "momentum_buffer")["momentum_buffer"]
        assert main.grad is not None
        momentum = self.settings.momentum
        buffer = kept.float()  # itself, where it is
        buffer.lerp_(main.grad, 1 - momentum)
        store([kept], [buffer])
        return torch.lerp(main.grad, buffer, momentum, out=None if buffer is kept else buffer)


def exchanged(settings: Settings, matrices: dict[int, Matrix], directions: dict[int, Tensor]) -> dict[int, Tensor]:
    """Return this rank's parts of the updates of a round's matrices, flat, by the rank that owns each.

    Args:
        matrices: by the rank that owns each.
        directions: this rank's parts of what is orthogonalized, likewise.
    """
    group, tensor, dtype = settings.group, settings.tensor, settings.dtype
    ranks, rank = group.size(), group.rank()
    owned = matrices.get(rank)
    if ranks == 1:
        assert owned is not None
        return {0: owned.update(directions[0].view(owned.shard), settings.scale, dtype)}

    def held(matrix: Matrix | None, by: int, *, is_sender: bool) -> int:
        """Return how many elements of a matrix a rank sends, or is sent back."""
        if matrix is None or (is_sender and matrix.shards == 1 and by % tensor):  # one sends what all hold
            return 0
        first, last = matrix.ranges[by // tensor]
        return last - first

    sent = [held(matrices.get(to), rank, is_sender=True) for to in range(ranks)]
    received = [held(owned, by, is_sender=True) for by in range(ranks)]
    given = torch.cat([settings.nothing, *(directions[to].flatten().to(dtype) for to in range(ranks) if sent[to])])
    parts = _all_to_all(given, sent, received, settings)
    del given  # of each of these there is as much as of the matrix
    returned = [held(owned, by, is_sender=False) for by in range(ranks)]
    results = settings.nothing
    if owned is not None:
        whole = _joined(owned, parts, tensor)
        del parts
        update = owned.update(whole, settings.scale, dtype)
        del whole
        results = results.new_empty(sum(returned))
        shards = [shard.flatten() for shard in update.chunk(owned.shards, dim=owned.dimension)]  # once for all replicas
        del update
        for by, result in enumerate(results.split(returned)):
            first, last = owned.ranges[by // tensor]
            result.copy_(shards[by % tensor if owned.shards > 1 else 0][first:last])
        del shards
    back = [held(matrices.get(of), rank, is_sender=False) for of in range(ranks)]
    updates = _all_to_all(results, returned, back, settings)
    return {of: update for of, update in enumerate(updates) if back[of]}


def _joined(matrix: Matrix, parts: Sequence[Tensor], tensor: int) -> Tensor:
    step, senders = (tensor, parts) if matrix.shards > 1 else (1, parts[::tensor])
    shards = [torch.cat(list(senders[shard::step])).view(matrix.shard) for shard in range(matrix.shards)]
    return torch.cat(shards, dim=matrix.dimension) if len(shards) > 1 else shards[0]


def _all_to_all(given: Tensor, sent: list[int], received: list[int], settings: Settings) -> tuple[Tensor, ...]:
    taken = given.new_empty(sum(received))
    dist.all_to_all_single(taken, given, received, sent, group=settings.group)
    return taken.split(received)


def connect_muon(config: Any, optimizer: Any, stages: list[Any], takes_whole: Callable[[str, int], bool]) -> None:
    """Give the torch optimizer in megatron-core's `optimizer` its settings, and the matrices of a rank's stages.

    Args:
        config: the section `optimizer` of the run's configuration.
        takes_whole: whether a weight of that name and so many dimensions is one of them.
    """
    from megatron.core.process_groups_config import ProcessGroupCollection

    groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "dp_cp", "tp_dp_cp"])
    is_sharded, tensor = stages[0].ddp_config.use_distributed_optimizer, groups.tp.size()
    replicas = groups.dp_cp.size() if is_sharded else 1
    group = groups.tp if replicas == 1 else groups.tp_dp_cp
    assert group.rank() == groups.tp.rank() + (tensor * groups.dp_cp.rank() if replicas > 1 else 0)
    matrices = [
        _matrix(optimizer, stage, name, weight, tensor, replicas)
        for stage in stages
        for name, weight in stage.named_parameters()
        if takes_whole(name, weight.ndim)
    ]
    device = next((weight.device for stage in stages for weight in stage.parameters()), torch.device("cpu"))
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    optimizer.optimizer.settings = Settings(
        momentum=config.muon_momentum,
        scale=config.muon_extra_scale_factor,
        dtype=dtype,
        nothing=torch.empty(0, dtype=dtype, device=device),
        group=group,
        tensor=tensor,
        matrices=matrices,
    )


def _matrix(optimizer: Any, stage: Any, name: str, weight: Any, tensor: int, replicas: int) -> Matrix:
    is_shard, config = getattr(weight, "tensor_model_parallel", False), stage.config
    heads_of_group = config.num_attention_heads // config.num_query_groups
    in_layer = next(tensor for tensor in all_tensors() if name.endswith(tensor.name))
    if isinstance(places := getattr(optimizer, "model_param_group_index_map", None), dict):
        group, number = places.get(weight, (None, None))
        main = None if group is None else optimizer.optimizer.param_groups[group]["params"][number]
        ranges = _ranges(stage, weight, replicas)
    else:
        main, ranges = getattr(weight, "main_param", weight), [(0, weight.numel())]
    return Matrix(
        shard=weight.shape,
        shards=tensor if is_shard else 1,
        dimension=weight.partition_dim if is_shard else 0,
        rows_of_group=in_layer.rows_of_group(heads_of_group, config.kv_channels),
        ranges=ranges,
        main=main,
    )


def _ranges(stage: Any, weight: Any, replicas: int) -> list[tuple[int, int]]:
    """Return what each data parallel rank has of a weight: of its bucket they have equal parts."""
    buffer = next(buffer for buffer in stage.buffers if weight in buffer.param_index_map)
    start, end, number = buffer.param_index_map[weight][:3]
    bucket = buffer.buckets[number]
    size = bucket.grad_data.numel() // replicas
    bounds = [bucket.offset + size * rank for rank in range(replicas + 1)]
    clipped = [min(max(bound, start), end) - start for bound in bounds]
    return list(itertools.pairwise(clipped))
