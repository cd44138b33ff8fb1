"""The Engine's optimizer kernels over lists of tensors, in float32."""

import torch
from torch import Tensor

ADAMW = 1


def multi_tensor_adam(
    chunk_size: int,
    noop_flag: Tensor,
    lists: list[list[Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Adam over gradients, parameters, first and second moments (and float32 parameters beside 16-bit ones)."""
    if noop_flag.item():
        return
    first_correction = 1.0 - beta1**step if bias_correction else 1.0
    second_correction = 1.0 - beta2**step if bias_correction else 1.0
    for grad, parameter, first, second, *main in zip(*lists, strict=True):
        target = main[0] if main else parameter
        value, gradient = target.float(), grad.float()
        if mode != ADAMW:
            gradient = gradient + weight_decay * value
        moment = first.float().mul_(beta1).add_(gradient, alpha=1.0 - beta1)
        square = second.float().mul_(beta2).addcmul_(gradient, gradient, value=1.0 - beta2)
        update = (moment / first_correction) / ((square / second_correction).sqrt() + epsilon)
        if mode == ADAMW:
            update = update + weight_decay * value
        value = value - lr * update
        first.copy_(moment)
        second.copy_(square)
        target.copy_(value)
        if main:
            parameter.copy_(value)


def multi_tensor_scale(chunk_size: int, noop_flag: Tensor, lists: list[list[Tensor]], scale: float) -> None:
    """Writes each tensor of the first list times `scale` into the second's; flags what is not finite."""
    for source, target in zip(*lists, strict=True):
        if not torch.isfinite(source).all():
            noop_flag.fill_(1)
        target.copy_(source.float() * scale)


def multi_tensor_scale_tensor(chunk_size: int, noop_flag: Tensor, lists: list[list[Tensor]], scale: Tensor) -> None:
    """The same, by a number on the device."""
    multi_tensor_scale(chunk_size, noop_flag, lists, scale.item())


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, lists: list[list[Tensor]], per_tensor: bool | None
) -> tuple[Tensor, Tensor]:
    """The norm over all tensors [1], and each one's own [tensors] where it is asked for."""
    norms = torch.stack([tensor.float().norm() for tensor in lists[0]])
    return norms.norm().view(1), norms if per_tensor else norms.new_zeros(0)
