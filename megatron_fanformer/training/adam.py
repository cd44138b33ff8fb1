"""AdamW for machines on which neither Transformer Engine nor apex brings a fused one."""

from typing import Any

import torch


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
        step = torch.full((), float(group["step"]), device=group["params"][0].device)  # made there, and only read
        torch._fused_adamw_(
            parameters,
            [p.grad for p in parameters],
            [self.state[p]["exp_avg"] for p in parameters],
            [self.state[p]["exp_avg_sq"] for p in parameters],
            [],
            [step] * len(parameters),
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )
