"""Patches that make megatron-core faster on a CPU and change no result but by rounding: a closed list, with reasons.

`megatron_cpu.install` installs them. The required ones are in `megatron_cpu`.
"""

import functools
import types
from collections.abc import Callable
from typing import Any

import torch

from megatron_fanformer.ops.element_wise import rotate
from megatron_fanformer.ops.products import add_product
from megatron_fanformer.runtime import cpu_collectives


def install() -> None:
    """Install the faster forms; megatron-core must already be importable without CUDA."""
    _write_out_rotary_embedding()
    _skip_collectives_of_one_rank()
    cpu_collectives.install()
    _add_weight_gradients_inside_products()
    _leave_the_compiler_out()


def _write_out_rotary_embedding() -> None:
    """Without Transformer Engine's kernel it takes a dozen passes over memory, and as many in backward."""
    from megatron.core.models.common.embeddings import rope_utils

    plain, plain_packed = rope_utils._apply_rotary_pos_emb_bshd, rope_utils._apply_rotary_pos_emb_thd

    def apply(t: torch.Tensor, freqs: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        mscale = kwargs.pop("mscale", 1.0)
        if any(args) or any(kwargs.values()) or mscale != 1.0 or freqs.shape[-1] != t.shape[-1]:
            return plain(t, freqs, *args, mscale=mscale, **kwargs)  # interleaved pairs, a part of the head, …
        return rotate(t, freqs)

    def apply_packed(t: torch.Tensor, cu_seqlens: torch.Tensor, freqs: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        cp_group = kwargs.pop("cp_group")
        if cp_group.size() > 1:
            return plain_packed(t, cu_seqlens, freqs, cp_group=cp_group, **kwargs)
        # All sequences at once: megatron-core 0.19 goes through them, and its backward copies all for each.
        positions = torch.arange(len(t)) - cu_seqlens[:-1].repeat_interleave(cu_seqlens.diff())
        return apply(t.unsqueeze(1), freqs[positions], **kwargs).squeeze(1)

    rope_utils._apply_rotary_pos_emb_bshd = apply
    rope_utils._apply_rotary_pos_emb_thd = apply_packed


def _skip_collectives_of_one_rank() -> None:
    """gloo copies the whole gradient buffer to reduce it over one rank, and all weights to gather them from one."""
    from megatron.core.distributed import param_and_grad_buffer as buffers

    for name in ("dist_reduce_scatter_func", "dist_all_gather_func"):
        setattr(buffers, name, _unless_alone(getattr(buffers, name)))


def _unless_alone(collective: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(collective)
    def call(output: torch.Tensor, given: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        is_there = _place(output) == _place(given) and output.numel() == given.numel()
        if is_there and not kwargs.get("async_op"):  # a rank's part is the whole: the group has no other rank
            return None
        return collective(output, given, *args, **kwargs)

    return call


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    """Where its first element is; not by `data_ptr`, which simulated tensors do not have."""
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())


def _add_weight_gradients_inside_products() -> None:
    """A CPU has no apex, whose kernel megatron-core's layers call for it (`gradient_accumulation_fusion`).

    Otherwise a gradient is made, rounded to the weights' type, and read again to be added.
    """
    from megatron.core.tensor_parallel import layers

    def accumulate(x_nh: torch.Tensor, grad_no: torch.Tensor, sum_oh: torch.Tensor) -> None:
        add_product(sum_oh, grad_no, x_nh)

    layers.fused_weight_gradient_mlp_cuda = types.SimpleNamespace(
        wgrad_gemm_accum_fp32=accumulate, wgrad_gemm_accum_fp16=accumulate
    )
    layers._grad_accum_fusion_available = True


def _leave_the_compiler_out() -> None:
    """torch's optimizer imports torch's compiler, over a second's work, to keep it from tracing some methods.

    Each of them remembers here, as it does after its first call, what to call instead: itself, for nothing compiles it.
    """
    for method in vars(torch.optim.Optimizer).values():
        plain: Any = getattr(method, "__wrapped__", None)
        if plain is not None:
            plain.__dynamo_disable = plain
