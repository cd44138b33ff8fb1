"""Builds a run's optimizer: megatron-core's, around the torch optimizer of an entry of `OPTIMIZERS`."""

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

if TYPE_CHECKING:  # megatron-core takes seconds to import, and a configuration is checked before that
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.optimizer import MegatronOptimizer


def build_optimizer(config: OptimizerConfig, stages: "list[DistributedDataParallel]") -> "MegatronOptimizer":
    """Return megatron-core's optimizer for the weights of this rank's stages."""
    from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
    from megatron.core.optimizer import get_megatron_optimizer

    rule, dtype = config.rule, stages[0].config.params_dtype
    megatron_config = MegatronOptimizerConfig(
        lr=config.lr,
        min_lr=0.0,  # `build_scheduler` sets the rates of the parameter groups
        weight_decay=config.weight_decay,
        clip_grad=config.clip_grad,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=stages[0].ddp_config.use_distributed_optimizer,
        optimizer="adam",  # which `_replacing_adam` replaces
        adam_beta1=config.adam_beta1,
        adam_beta2=config.adam_beta2,
        adam_eps=config.adam_eps,
    )
    with _replacing_adam(rule.torch_class()):
        optimizer = get_megatron_optimizer(megatron_config, stages, config_overrides=_config_overrides(rule, stages))
    for part in single_optimizers(optimizer):
        part.init_state_fn = lambda torch_optimizer, _config=None: _initialize_states(rule, torch_optimizer)
        rule.connect(config, part, stages)
    return optimizer


def single_optimizers(optimizer: Any) -> list[Any]:
    """Return the members of a chained optimizer, or the optimizer itself if it is no chain."""
    return getattr(optimizer, "chained_optimizers", [optimizer])


@torch.no_grad()
def weight_norm(optimizer: "MegatronOptimizer") -> float:
    """Return the global norm of the main weights, each weight counted once; a collective call."""
    from megatron.core.optimizer.clip_grads import get_grad_norm_fp32
    from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
    from megatron.core.transformer.module import param_is_not_shared

    square = 0.0
    for part in single_optimizers(optimizer):
        norms = [  # megatron-core computes the norm of these norms over the ranks
            norm(weight).float()
            for weight in part.get_parameters()
            if param_is_not_tensor_parallel_duplicate(weight, getattr(part, "tp_group", None))
            and param_is_not_shared(weight)
        ]
        square += get_grad_norm_fp32(norms, grad_stats_parallel_group=part.get_grad_stats_parallel_group()) ** 2
    return math.sqrt(square)


def _config_overrides(rule: AdamW, stages: list[Any]) -> dict[Any, dict[str, Any]]:
    """Return the entries of each parameter group that has any, by a key that selects the weights of the group."""
    from megatron.core.optimizer import ParamKey
    from megatron.core.optimizer.optimizer_config import ParamWithNamePredicate

    def entries_of(parameter: torch.nn.Parameter, name: str) -> Mapping[str, Any]:
        # `shared_embedding` marks the last stage's copy of a tied embedding, whose name there is output_layer
        is_copy = getattr(parameter, "shared_embedding", False)
        return rule.group_entries(EMBEDDING if is_copy else name, parameter.ndim)

    all_entries = [entries_of(parameter, name) for stage in stages for name, parameter in stage.named_parameters()]
    groups = {tuple(sorted(entries.items())): entries for entries in all_entries if entries}  # equal ones once
    overrides: dict[Any, dict[str, Any]] = {}
    for key, entries in groups.items():
        predicate = ParamWithNamePredicate(
            name=str(key), fn=lambda parameter, name, entries=entries: entries_of(parameter, name) == entries
        )
        overrides[ParamKey(with_name_predicate=predicate)] = dict(entries)
    return overrides


def _initialize_states(rule: AdamW, torch_optimizer: torch.optim.Optimizer) -> None:
    """Create the state tensors that the first step would create, so that a checkpoint can be loaded into them."""
    for group in torch_optimizer.param_groups:
        for weight in group["params"]:
            if torch_optimizer.state[weight]:
                continue
            if hasattr(torch_optimizer, "initialize_state"):  # Transformer Engine's Adam, which keeps more than tensors
                torch_optimizer.initialize_state(weight, False)  # False: no remainder bits of bf16 weights
                continue
            torch_optimizer.state[weight] = {
                name: torch.zeros_like(weight, dtype=torch_dtype(rule.state_dtype(name)))
                for name in rule.state_names(group)
            }


@contextmanager
def _replacing_adam(torch_class: type[torch.optim.Optimizer] | None) -> Iterator[None]:
    """Make megatron-core create a torch optimizer of this class instead of its Adam; None changes nothing."""
    import megatron.core.optimizer as megatron_optimizer
    from megatron.core.optimizer import distrib_optimizer

    if torch_class is None:
        yield
        return
    sharding: Any = distrib_optimizer
    sharding.HAVE_APEX_OR_TE = True  # stays set: it makes state dicts read and write the step in the groups
    with (
        mock.patch.object(megatron_optimizer, "Adam", torch_class),
        mock.patch.object(megatron_optimizer, "USING_PYTORCH_OPTIMIZER", False),  # True would take torch's
        mock.patch.object(distrib_optimizer, "Adam", torch_class),
    ):
        yield
