"""A run's optimizer: megatron-core's, over the torch optimizer of a rule (`optimizers.py`)."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from megatron_fanformer.model.config import torch_dtype
from megatron_fanformer.ops.matrices import norm
from megatron_fanformer.plan.gradient_buffers import EMBEDDING
from megatron_fanformer.train.optimizers import AdamW, OptimizerConfig

if TYPE_CHECKING:  # megatron-core takes seconds to import, and a configuration is checked before
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.optimizer import MegatronOptimizer


def build_optimizer(config: OptimizerConfig, stages: "list[DistributedDataParallel]") -> "MegatronOptimizer":
    """Return megatron-core's optimizer over the stages of this rank."""
    from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
    from megatron.core.optimizer import get_megatron_optimizer

    rule, dtype = config.rule, stages[0].config.params_dtype
    megatron_config = MegatronOptimizerConfig(
        lr=config.lr,
        min_lr=0.0,
        weight_decay=config.weight_decay,
        clip_grad=config.clip_grad,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=stages[0].ddp_config.use_distributed_optimizer,
        optimizer="adam",
        adam_beta1=config.adam_beta1,
        adam_beta2=config.adam_beta2,
        adam_eps=config.adam_eps,
    )
    with _in_place_of_adam(rule.torch_class()):
        optimizer = get_megatron_optimizer(megatron_config, stages, config_overrides=_overrides(rule, stages))
    for part in single_optimizers(optimizer):
        part.init_state_fn = lambda torch_optimizer, _config=None: _make_states(rule, torch_optimizer)
        rule.connect(config, part, stages)
    return optimizer


def single_optimizers(optimizer: Any) -> list[Any]:
    """Return the optimizers in a chain, or the one that is none."""
    return getattr(optimizer, "chained_optimizers", [optimizer])


@torch.no_grad()
def weight_norm(optimizer: "MegatronOptimizer") -> float:
    """Return the global norm of the main weights, as megatron-core takes the gradient norm; a collective call."""
    from megatron.core.optimizer.clip_grads import get_grad_norm_fp32
    from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
    from megatron.core.transformer.module import param_is_not_shared

    square = 0.0
    for part in single_optimizers(optimizer):
        norms = [
            norm(weight).float()
            for weight in part.get_parameters()
            if param_is_not_tensor_parallel_duplicate(weight, getattr(part, "tp_group", None))
            and param_is_not_shared(weight)
        ]
        square += get_grad_norm_fp32(norms, grad_stats_parallel_group=part.get_grad_stats_parallel_group()) ** 2
    return math.sqrt(square)


def _overrides(rule: AdamW, stages: list[Any]) -> dict[Any, dict[str, Any]]:
    from megatron.core.optimizer import ParamKey
    from megatron.core.optimizer.optimizer_config import ParamWithNamePredicate

    def group_of(parameter: torch.nn.Parameter, name: str) -> Mapping[str, Any]:
        # `shared_embedding` marks the last stage's copy of a tied embedding, which is called output_layer there
        is_copy = getattr(parameter, "shared_embedding", False)
        return rule.group_of(EMBEDDING if is_copy else name, parameter.ndim)

    groups = [group_of(parameter, name) for stage in stages for name, parameter in stage.named_parameters()]
    overrides: dict[Any, dict[str, Any]] = {}
    for key, group in {tuple(sorted(group.items())): group for group in groups if group}.items():
        predicate = ParamWithNamePredicate(
            name=str(key), fn=lambda parameter, name, group=group: group_of(parameter, name) == group
        )
        overrides[ParamKey(with_name_predicate=predicate)] = dict(group)
    return overrides


def _make_states(rule: AdamW, torch_optimizer: torch.optim.Optimizer) -> None:
    """Make the state tensors, as the first step would."""
    for group in torch_optimizer.param_groups:
        for weight in group["params"]:
            if torch_optimizer.state[weight]:
                continue
            if (initialize := getattr(torch_optimizer, "initialize_state", None)) is not None:
                initialize(weight, False)  # the Engine's Adam, which notes more of a moment in bf16 than its tensor
                continue
            torch_optimizer.state[weight] = {
                name: torch.zeros_like(weight, dtype=torch_dtype(rule.state_dtype(name))) for name in rule.states(group)
            }


@contextmanager
def _in_place_of_adam(torch_class: type[torch.optim.Optimizer] | None) -> Iterator[None]:
    """Make megatron-core build a torch optimizer where it would build Adam, the one that it shards.

    None leaves its own.
    """
    import megatron.core.optimizer as megatron_optimizer
    from megatron.core.optimizer import distrib_optimizer

    if torch_class is None:
        yield
        return
    sharding: Any = distrib_optimizer
    sharding.HAVE_APEX_OR_TE = True  # for good: its own state dicts then look for the step in the groups, too
    with (
        mock.patch.object(megatron_optimizer, "Adam", torch_class),
        mock.patch.object(megatron_optimizer, "USING_PYTORCH_OPTIMIZER", False),
        mock.patch.object(distrib_optimizer, "Adam", torch_class),
    ):
        yield
