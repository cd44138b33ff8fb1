"""The learning rate over the steps: megatron-core's scheduler, counted in steps.

Steps count from 1. The first step of a warm-up of W steps runs at peak / W, as in the authors' implementation.
"""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from megatron_fanformer.errors import broken_fields
from megatron_fanformer.train.optimizers import OptimizerConfig

if TYPE_CHECKING:  # megatron-core takes seconds to import, and a configuration is checked before that
    from megatron.core.optimizer import MegatronOptimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Linear warm-up, then a decay to `min_lr`."""

    lr_decay_style: Literal["cosine", "linear", "constant", "WSD"] = "cosine"
    """`WSD` holds the peak and decays over the last `lr_wsd_decay_iters` steps."""
    lr_warmup_iters: int = 0
    """Steps of linear warm-up from 0."""
    lr_warmup_fraction: float | None = None
    """Warm-up as a share of the steps to the decay's end, in [0, 1); null: `lr_warmup_iters`."""
    lr_decay_iters: int | None = None
    """The step at which `min_lr` is reached; null: the last one."""
    min_lr: float | None = None
    """The rate after the decay; null: a tenth of the peak."""
    lr_wsd_decay_iters: int | None = None
    """Steps of WSD's decay; null: a tenth of `lr_decay_iters`."""
    lr_wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "minus_sqrt"
    """Form of WSD's decay."""

    def problems(self) -> list[str]:
        """Return the rules of single fields that this configuration breaks, one line each."""
        broken = partial(broken_fields, "schedule", self)
        lines = [
            *broken("not be negative", lambda value: value < 0, "lr_warmup_iters", "min_lr"),
            *broken("lie in [0, 1), or null", lambda value: not 0 <= value < 1, "lr_warmup_fraction"),
            *broken("be at least 1, or null", lambda value: value < 1, "lr_decay_iters", "lr_wsd_decay_iters"),
        ]
        if self.lr_warmup_fraction is not None and self.lr_warmup_iters:
            lines.append(
                f"schedule.lr_warmup_fraction is {self.lr_warmup_fraction} and lr_warmup_iters "
                f"{self.lr_warmup_iters}, which both set the length of the warm-up; leave one out"
            )
        return lines

    def warmup_steps(self, decay_steps: int) -> int:
        """Return the number of warm-up steps, if the decay ends at step `decay_steps`."""
        fraction = self.lr_warmup_fraction
        return self.lr_warmup_iters if fraction is None else round(fraction * decay_steps)

    def wsd_steps(self, decay_steps: int) -> int:
        """Return the number of steps of WSD's decay, if it ends at step `decay_steps`."""
        return self.lr_wsd_decay_iters or max(1, decay_steps // 10)

    def joint_problems(self, *, lr: float, train_iters: int | None) -> list[str]:
        """Return the broken rules that involve the peak rate or the number of steps (None: unknown yet)."""
        problems = []
        end = self.lr_decay_iters or train_iters  # the decay's last step
        if end is not None:
            warmup, wsd_steps = self.warmup_steps(end), self.wsd_steps(end)
            if warmup >= end:
                stated = f"iters {warmup}" if self.lr_warmup_fraction is None else f"fraction {self.lr_warmup_fraction}"
                problems.append(
                    f"schedule.lr_warmup_{stated} is not below the end of the decay, step {end}; "
                    "shorten the warm-up or raise training.train_iters"
                )
            elif self.lr_decay_style == "WSD" and warmup + wsd_steps > end:  # the rate would jump after the warm-up
                wsd = self.lr_wsd_decay_iters or f"null, here {wsd_steps}"
                problems.append(
                    f"schedule.lr_wsd_decay_iters is {wsd}, and with a warm-up of {warmup} does not fit into the {end} "
                    "steps to the decay's end; shorten one of them or raise training.train_iters"
                )
        if self.min_lr is not None and self.min_lr > lr:
            problems.append(f"schedule.min_lr {self.min_lr} is above optimizer.lr {lr}; lower it")
        return problems


def build_scheduler(
    config: ScheduleConfig, optimizer: "MegatronOptimizer", recipe: OptimizerConfig, *, train_iters: int
) -> "OptimizerParamScheduler":
    """Return the scheduler at step 0; `scheduler.step(1)` sets the rate of the next step.

    Args:
        recipe: the configuration that `optimizer` was built from.
    """
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    lr, decay_steps = recipe.lr, config.lr_decay_iters or train_iters
    min_lr = lr / 10 if config.min_lr is None else config.min_lr
    for group in optimizer.param_groups:
        factor = group.get("lr_mult", 1.0)
        group["max_lr"], group["min_lr"] = factor * lr, factor * min_lr  # take precedence over the scheduler's rates
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=lr,
        min_lr=min_lr,
        lr_warmup_steps=config.warmup_steps(decay_steps),
        lr_decay_steps=decay_steps,
        lr_decay_style=config.lr_decay_style,
        start_wd=recipe.weight_decay,
        end_wd=recipe.weight_decay,
        wd_incr_steps=train_iters,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        wsd_decay_steps=config.wsd_steps(decay_steps),
        lr_wsd_decay_style=config.lr_wsd_decay_style,
    )
