"""Patches of torch for `megatron_cpu`: calls of CUDA by megatron-core work on the CPU.

torch is imported by the functions that use it, so that `device` can import this module without torch.
"""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

FUSED_GRADIENT_KERNEL = "fused_weight_gradient_mlp_cuda"
"""Module of apex's kernel, which adds a weight's gradient into its buffer inside the product."""
# Factories that megatron-core calls with device="cuda", device=torch.cuda.current_device() or pin_memory=True:
# optimizer scales, gradient norms, schedules, inference buffers, the exchange of loaded tensors.
FACTORIES = ("arange", "empty", "empty_like", "full", "ones", "rand", "randn", "tensor", "zeros", "zeros_like")


@functools.cache
def map_cuda() -> None:
    """Patch torch's factories, `torch.cuda` and tensors, once. Comments name the callers in megatron-core."""
    import torch
    from torch.utils._device import _device_constructors

    # torch makes a list of its factories when `with torch.device(…)` is first used, and looks each called factory up
    # there. The replacements call the originals, so the list must be made while torch still has the originals.
    _device_constructors()
    for name in FACTORIES:
        setattr(torch, name, _make_on_cpu(getattr(torch, name)))

    cuda: Any = torch.cuda
    cpu = torch.device("cpu")
    cuda.current_device = lambda: cpu  # gradient buffers, rotary embedding, distributed optimizer
    cuda.set_device = lambda *_: None  # asynchronous save, schedules
    cuda.device_count = lambda: 1  # the checkpoint writer divides by it
    cuda.synchronize = lambda *_: None  # asynchronous save, timers
    # Overlap of gradient reduction; default_stream with several `num_distributed_optimizer_instances`.
    cuda.current_stream = cuda.default_stream = lambda *_: _InertStream()
    cuda.Stream = cuda.Event = _InertStream
    cuda.stream = lambda *_: nullcontext()
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()  # the random tracker
    cuda.set_rng_state = lambda state, *_: torch.set_rng_state(state)
    cuda.manual_seed = torch.manual_seed
    cuda.FloatTensor, cuda.HalfTensor = torch.FloatTensor, torch.HalfTensor  # bound by transformer.module
    cuda.BFloat16Tensor = torch.BFloat16Tensor

    plain_type = torch.Tensor.type
    # Gradient clipping and the distributed optimizer accept only these types.
    cuda_names = {
        torch.float32: "torch.cuda.FloatTensor",
        torch.float16: "torch.cuda.HalfTensor",
        torch.bfloat16: "torch.cuda.BFloat16Tensor",
    }

    def type_as_on_cuda(self: "torch.Tensor", *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return plain_type(self, *args, **kwargs)
        return cuda_names.get(self.dtype) or plain_type(self)

    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *_args, **_kwargs: self  # gathering of optimizer state, fully parallel load
    tensor.type = type_as_on_cuda


def _make_on_cpu(factory: Callable[..., "torch.Tensor"]) -> Callable[..., "torch.Tensor"]:
    """Return the factory, changed: tensors on CUDA are made on the CPU instead, and none in pinned memory."""

    @functools.wraps(factory)
    def on_cpu(*args: Any, **kwargs: Any) -> "torch.Tensor":
        device = kwargs.get("device")
        if device is not None and str(device).startswith("cuda"):
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):  # pinning needs a GPU
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return on_cpu


class _InertStream:
    """A stream or event of a device that works in order: nothing to wait for."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None: ...

    def _nothing(self, *_args: Any, **_kwargs: Any) -> None: ...

    synchronize = wait_stream = wait_event = record_event = record = wait = _nothing

    def query(self) -> bool:
        return True
