"""AdamW for machines on which neither Transformer Engine nor apex brings a fused one, and for moments in bf16.

A step is computed in float32, whatever its moments are kept in; those in bf16 are rounded to the nearest as they are
stored.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

COPIED_ELEMENTS = 2**20
"""Elements of a weight that are updated at a time where states are not float32: so few, that what is copied of them
takes little memory."""


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
            for block in zip(*blocks, strict=True):
                _update_rounded(group, *block)

    def _state_of(self, weight: Tensor, *names: str) -> dict[str, Tensor]:
        """Return a weight's state, which its first step makes."""
        if not self.state[weight]:
            self.state[weight] = {
                name: torch.zeros_like(weight, dtype=self.state_dtypes.get(name, weight.dtype)) for name in names
            }
        return self.state[weight]


def store(states: list[Tensor], values: list[Tensor]) -> None:
    """Round what a step computed to what is kept of it, where that is another tensor."""
    for state, value in zip(states, values, strict=True):
        if state is not value:
            state.copy_(value)


def with_bf16_moments(fused: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Return Transformer Engine's Adam with both moments in bf16, which its kernel reads and writes as they are.

    Of apex's, which has them in float32 alone, ours takes the place.
    """
    if "exp_avg_dtype" not in inspect.signature(fused).parameters:
        return Adam

    class FusedAdamOfBF16Moments(fused):  # type: ignore[valid-type, misc]
        """Made by megatron-core, which does not say which formats."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, exp_avg_dtype=torch.bfloat16, exp_avg_sq_dtype=torch.bfloat16, **kwargs)

    return FusedAdamOfBF16Moments


def _update_rounded(group: dict[str, Any], weight: Tensor, gradient: Tensor, first: Tensor, second: Tensor) -> None:
    exact = [first.float(), second.float()]  # themselves, where they are
    _update(group, [weight], [gradient], exact[:1], exact[1:])
    store([first, second], exact)


def _update(
    group: dict[str, Any], weights: list[Tensor], gradients: list[Tensor], first: list[Tensor], second: list[Tensor]
) -> None:
    """Advance weights and moments in place, all of one type."""
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
