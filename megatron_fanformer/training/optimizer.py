"""AdamW over megatron-core's optimizers, with the reference's decay groups.

Weight decay applies to linear weights alone: not to norms, biases and embeddings (a tied head is the embedding).
"""

import math
from typing import TYPE_CHECKING, Any

import torch

from megatron_fanformer.ops.norms import norm
from megatron_fanformer.training.optimizer_config import OptimizerConfig

HYPERPARAMETERS = ("lr", "max_lr", "min_lr", "betas", "eps")

if TYPE_CHECKING:  # megatron-core takes seconds to import, and a configuration is checked before
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.optimizer import MegatronOptimizer


def build_optimizer(
    config: OptimizerConfig,
    stages: "list[DistributedDataParallel]",
    *,
    dtype: torch.dtype,
    use_distributed_optimizer: bool,
) -> "MegatronOptimizer":
    """megatron-core's optimizer over the stages of this rank."""
    from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
    from megatron.core.optimizer import ParamKey, get_megatron_optimizer
    from megatron.core.optimizer.optimizer_config import ParamWithNamePredicate

    _provide_adam()
    megatron_config = MegatronOptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        min_lr=0.0,
        weight_decay=config.weight_decay,
        adam_beta1=config.adam_beta1,
        adam_beta2=config.adam_beta2,
        adam_eps=config.adam_eps,
        clip_grad=config.clip_grad,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=use_distributed_optimizer,
    )
    no_decay = ParamKey(with_name_predicate=ParamWithNamePredicate(name="no_decay", fn=_is_not_decayed))
    return get_megatron_optimizer(megatron_config, stages, config_overrides={no_decay: {"wd_mult": 0.0}})


def keep_hyperparameters(optimizer: "MegatronOptimizer", loaded: list[dict[str, Any]]) -> None:
    """Put this run's own rates, betas and epsilon into loaded parameter groups, in place of the saved ones.

    megatron-core takes all of a parameter group from a checkpoint (and 0.19 finds groups by their rates): a rate that
    the user changed for a resume would be ignored, or not be found.
    """
    present = {group["wd_mult"]: group for group in optimizer.param_groups}
    for group in loaded:
        if group["wd_mult"] in present:  # a stage need not have weights of every kind
            group.update({name: present[group["wd_mult"]][name] for name in HYPERPARAMETERS})


@torch.no_grad()
def weight_and_update_norms(optimizer: "MegatronOptimizer") -> tuple[float, float]:
    """Global norms of the weights, and of what the last step has added to them; a collective call.

    They are taken as megatron-core takes the gradient norm: of the main weights in float32, each counted once, whatever
    ranks hold it. The update is computed again, from AdamW's states, so that nothing is kept of the weights before it.
    """
    from megatron.core.optimizer.clip_grads import get_grad_norm_fp32
    from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
    from megatron.core.transformer.module import param_is_not_shared

    squares = [0.0, 0.0]
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        norms: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        for group in part.param_groups:
            for weight in group["params"]:
                is_own = param_is_not_tensor_parallel_duplicate(weight, getattr(part, "tp_group", None))
                if is_own and param_is_not_shared(weight):
                    norms[0].append(norm(weight).float())
                    norms[1].append(norm(_last_update(weight, part.optimizer.state[weight], group)).float())
        for number, own in enumerate(norms):
            total = get_grad_norm_fp32(own, grad_stats_parallel_group=part.get_grad_stats_parallel_group())
            squares[number] += total**2
    return math.sqrt(squares[0]), math.sqrt(squares[1])


def _last_update(weight: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> torch.Tensor:
    """What AdamW's last step added to a weight: -lr (m' / (sqrt v' + eps) + decay * the weight before)."""
    lr, steps, (beta1, beta2) = group["lr"], group["step"], group["betas"]
    size = (state["exp_avg_sq"] / (1 - beta2**steps)).sqrt_().add_(group["eps"])
    rate = (state["exp_avg"] / (1 - beta1**steps)).div_(size)
    decay = group["weight_decay"]
    before = (weight + lr * rate).div_(1 - lr * decay)
    return rate.add_(before, alpha=decay).mul_(-lr)


def _is_not_decayed(parameter: torch.nn.Parameter, name: str) -> bool:
    # `shared_embedding` marks the last stage's copy of a tied embedding, which is called output_layer there
    return parameter.ndim == 1 or "word_embeddings" in name or getattr(parameter, "shared_embedding", False)


def _provide_adam() -> None:
    """Use `Adam` below where neither Transformer Engine nor apex brings a fused one.

    With torch's AdamW, megatron-core's distributed optimizer loads the *same* step tensor into every parameter's
    state; it then advances once per parameter, and a resumed run silently goes wrong.
    """
    import megatron.core.optimizer as megatron_optimizer
    from megatron.core.optimizer import distrib_optimizer

    module: Any = megatron_optimizer
    sharding: Any = distrib_optimizer
    if module.USING_PYTORCH_OPTIMIZER:
        module.Adam = sharding.Adam = Adam
        module.USING_PYTORCH_OPTIMIZER = False
        sharding.HAVE_APEX_OR_TE = True


class Adam(torch.optim.Optimizer):
    """AdamW by torch's fused kernel, keeping its state as FusedAdam does: `step` in the parameter group."""

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
        for p in parameters:
            if not self.state[p]:
                self.state[p] = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        beta1, beta2 = group["betas"]
        torch._fused_adamw_(
            parameters,
            [p.grad for p in parameters],
            [self.state[p]["exp_avg"] for p in parameters],
            [self.state[p]["exp_avg_sq"] for p in parameters],
            [],
            [torch.tensor(float(group["step"]), device=p.device) for p in parameters],
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )
