"""Every patch that megatron-core needs to run on a machine without CUDA, or to be faster there, with its reason.

Patches of torch are in `cuda_on_cpu`. Patches that only make megatron-core faster come last, and change results by
rounding alone.

Where a GPU is usable, no patch is installed. Patches must be installed before the first import of `megatron.core`,
which binds names at import; later calls raise. Checked on megatron-core 0.16.1 and 0.19.2.
"""

import functools
import importlib
import sys
import types
from collections.abc import Callable
from contextlib import suppress
from importlib.machinery import ModuleSpec
from typing import Any

import torch

from megatron_fanformer.ops.element_wise import rotate
from megatron_fanformer.ops.matrices import add_product, norm
from megatron_fanformer.runtime import cuda_on_cpu
from megatron_fanformer.runtime.cuda_on_cpu import FUSED_GRADIENT_KERNEL

_installed = False


def install() -> None:
    """Adapt torch and megatron-core to a machine without CUDA; do nothing if a GPU is usable, or the second time.

    Raises:
        RuntimeError: megatron.core was imported before.
    """
    if _installed or torch.cuda.is_available():
        return
    adapt()


def adapt(*, with_engine: bool = False) -> None:
    """Adapt torch and megatron-core to compute on the CPU; unlike `install`, also where torch finds a GPU.

    Args:
        with_engine: leave Transformer Engine visible; the caller has replaced its CUDA extension by CPU functions.

    Raises:
        RuntimeError: megatron.core was imported before.
    """
    global _installed
    if "megatron.core" in sys.modules:
        raise RuntimeError("megatron.core was imported before runtime.megatron_cpu adapted it; call install() first")
    _hide_cuda_extensions(("apex",) if with_engine else ("transformer_engine", "apex"))
    cuda_on_cpu.map_cuda()
    _add_weight_gradients_inside_products()
    _import_megatron(with_engine)
    _adapt_random_state()
    _adapt_recomputation(with_engine)
    if not with_engine:
        _sum_gradient_norms_exactly()
    _replace_rotary_embedding()
    _skip_collectives_of_one_rank()
    _leave_the_compiler_out()
    _installed = True


def _hide_cuda_extensions(extensions: tuple[str, ...]) -> None:
    """Make imports of extensions raise ImportError: without CUDA they may import, but raise once they are called.

    An installed Engine whose libraries do not load raises other errors than megatron-core expects.
    """
    for extension in extensions:
        for module in [name for name in sys.modules if name == extension or name.startswith(extension + ".")]:
            del sys.modules[module]
        sys.modules[extension] = None  # type: ignore[assignment]  # the import system's own mark for "not found"


# Optional imports of megatron-core that nothing here uses on a CPU. They take most of its import time: FSDP above all,
# which imports torch's distributed tensors.
_OPTIONAL = (
    "megatron.core.distributed.fsdp.src.megatron_fsdp",
    "torch.distributed._tensor",
    "torch.distributed.fsdp",
    "triton",
)
# Modules that megatron-core cannot do without, but calls only to save, and for FSDP, NCCL's memory and experts.
_CALLED_SELDOM = (
    "megatron.core.dist_checkpointing.strategies.torch",
    "megatron.core.distributed.fsdp.src.megatron_fsdp.utils",
    "megatron.core.transformer.fsdp_dtensor_checkpoint",
    "megatron.core.transformer.moe.ops.paged_stash",
    "torch.utils.cpp_extension",
)


# The modules of megatron-core from which a model is built; the second exists from 0.19 on.
_BUILT_FROM = ("megatron.core.models.gpt.gpt_layer_specs", "megatron.core.models.hybrid.hybrid_model")


def _import_megatron(with_engine: bool) -> None:
    """Import megatron-core without torch.compile, which it binds at import and which needs a compiler at run time.

    Imports that cost time and are not used are left out, or put off: wandb by itself takes a second.
    """
    compile_ = torch.compile
    torch.compile = lambda function=None, **_: function if function else (lambda f: f)  # type: ignore
    hidden: dict[str, Any] = {"wandb": None}  # None: the import raises ImportError
    if not with_engine:
        hidden |= dict.fromkeys(_OPTIONAL) | {name: _lazy_module(name) for name in _CALLED_SELDOM}
    hidden = {name: module for name, module in hidden.items() if name not in sys.modules}
    sys.modules.update(hidden)
    try:
        for name in _BUILT_FROM:
            with suppress(ModuleNotFoundError):  # a version may lack one
                importlib.import_module(name)
    finally:
        torch.compile = compile_
        for name in hidden:
            del sys.modules[name]


def _lazy_module(name: str) -> types.ModuleType:
    """Return a stand-in for a module, whose attributes import the module once called or used with isinstance."""

    def attribute_of(attribute: str) -> Any:
        if attribute.startswith("__"):  # such as __path__, for which the import system asks
            raise AttributeError(attribute)

        class LazyType(type):
            def __call__(cls, *args: Any, **kwargs: Any) -> Any:
                return getattr(importlib.import_module(name), attribute)(*args, **kwargs)

            def __instancecheck__(cls, instance: Any) -> bool:
                return isinstance(instance, getattr(importlib.import_module(name), attribute))

        return LazyType(attribute, (), {})

    stand_in = types.ModuleType(name)
    stand_in.__getattr__ = attribute_of  # type: ignore[method-assign]
    return stand_in


def _adapt_random_state() -> None:
    """Make the tracker set random states at once: it would queue them for CUDA's initialization, which never comes."""
    from megatron.core.tensor_parallel import random

    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


def _adapt_recomputation(with_engine: bool) -> None:
    """Make selective recomputation work without Transformer Engine, and without compiling a C++ extension."""
    from megatron.core.tensor_parallel import random

    class CheckpointWithoutOutput(random.CheckpointWithoutOutput):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.fp8 = False  # megatron-core would take the None in this attribute for FP8 by the Engine

    for module in [] if with_engine else list(sys.modules.values()):  # every module that has bound the class
        if getattr(module, "__name__", "").startswith("megatron.core") and hasattr(module, "CheckpointWithoutOutput"):
            module.CheckpointWithoutOutput = CheckpointWithoutOutput  # type: ignore[attr-defined]
    if hasattr(random, "_get_share_storage"):  # from 0.19 on: it compiles the extension

        def share_storage(target: torch.Tensor, source: torch.Tensor) -> None:
            target.untyped_storage().resize_(source.untyped_storage().nbytes())
            target.untyped_storage().copy_(source.untyped_storage())

        random._get_share_storage = lambda: share_storage


def _sum_gradient_norms_exactly() -> None:
    """Replace torch's norm of each gradient, which on a CPU is too small for large gradients (`norm` says why)."""
    from megatron.core.optimizer import clip_grads

    def l2_norm(_chunk_size: int, _overflow: Any, tensor_lists: Any, _per_tensor: bool) -> tuple[torch.Tensor, None]:
        norms = [norm(tensor) for tensors in tensor_lists for tensor in tensors]
        return torch.linalg.vector_norm(torch.stack(norms)).reshape(1).float(), None

    clip_grads.l2_norm_impl = l2_norm


# -- patches that only make it faster


def _replace_rotary_embedding() -> None:
    """Rotate in few operations: megatron-core, without the Engine's kernel, runs a dozen over all queries and keys."""
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
        # Rotate all sequences at once: megatron-core 0.19 rotates each alone, and each backward copies all of `t`.
        positions = torch.arange(len(t)) - cu_seqlens[:-1].repeat_interleave(cu_seqlens.diff())  # within a sequence
        return apply(t.unsqueeze(1), freqs[positions], **kwargs).squeeze(1)

    rope_utils._apply_rotary_pos_emb_bshd = apply
    rope_utils._apply_rotary_pos_emb_thd = apply_packed


def _skip_collectives_of_one_rank() -> None:
    """Skip collectives over one rank, for which gloo would copy the whole gradient buffer, or all weights."""
    from megatron.core.distributed import param_and_grad_buffer as buffers

    for name in ("dist_reduce_scatter_func", "dist_all_gather_func"):
        setattr(buffers, name, _unless_alone(getattr(buffers, name)))


def _unless_alone(collective: Callable[..., Any]) -> Callable[..., Any]:
    """Return the collective, changed to do nothing if this rank's part is the whole tensor, as on one rank."""

    @functools.wraps(collective)
    def call(output: torch.Tensor, source: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        is_alone = _address(output) == _address(source) and output.numel() == source.numel()
        if is_alone and not kwargs.get("async_op"):  # an asynchronous collective must return a handle
            return None
        return collective(output, source, *args, **kwargs)

    return call


def _address(tensor: torch.Tensor) -> tuple[int, int]:
    """Return a tensor's storage and its offset there; simulated tensors have no `data_ptr`."""
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())


def _add_weight_gradients_inside_products() -> None:
    """Replace apex's kernel, by which megatron-core's layers add weight gradients (`gradient_accumulation_fusion`).

    Otherwise a gradient is computed, rounded to the weights' format, and read again to be added.
    """

    def accumulate(x_nh: torch.Tensor, grad_no: torch.Tensor, sum_oh: torch.Tensor) -> None:
        add_product(sum_oh, grad_no, x_nh)

    kernel: Any = types.ModuleType(FUSED_GRADIENT_KERNEL)
    kernel.__spec__ = ModuleSpec(FUSED_GRADIENT_KERNEL, None)
    kernel.wgrad_gemm_accum_fp32 = kernel.wgrad_gemm_accum_fp16 = accumulate
    sys.modules[FUSED_GRADIENT_KERNEL] = kernel


def _leave_the_compiler_out() -> None:
    """Keep torch's optimizer from importing torch's compiler, which takes over a second.

    On a method's first call, the optimizer imports the compiler, asks it for a form of the method that is never
    compiled, and keeps this form in `__dynamo_disable`, where this function puts the plain method in advance.
    """
    for method in vars(torch.optim.Optimizer).values():
        plain: Any = getattr(method, "__wrapped__", None)
        if plain is not None:
            plain.__dynamo_disable = plain
