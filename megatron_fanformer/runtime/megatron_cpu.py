"""Every patch that megatron-core needs to run on a machine without CUDA, or to be faster there, with its reason.

Those of torch are in `cuda_on_cpu`. The second list changes no result but by rounding.

None is installed where a GPU is usable. They must be installed before the first import of `megatron.core`, which binds
names at import, and are refused after. Checked on megatron-core 0.16.1 and 0.19.2.
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
    """Adapt torch and megatron-core to a machine without CUDA; does nothing where a GPU is usable, or the second time.

    Raises:
        RuntimeError: megatron.core was imported before.
    """
    if _installed or torch.cuda.is_available():
        return
    adapt()


def adapt(*, with_engine: bool = False) -> None:
    """Do what `install` does, whether or not torch finds a GPU.

    Args:
        with_engine: Transformer Engine is there, over something that computes on a CPU; it stays visible.

    Raises:
        RuntimeError: megatron.core was imported before.
    """
    global _installed
    if "megatron.core" in sys.modules:
        raise RuntimeError("megatron.core was imported before runtime.megatron_cpu.install(); call install() first")
    _hide_cuda_extensions(("apex",) if with_engine else ("transformer_engine", "apex"))
    cuda_on_cpu.map_cuda()
    _add_weight_gradients_inside_products()
    _import_megatron(with_engine)
    _adapt_random_state()
    _adapt_recomputation(with_engine)
    if not with_engine:
        _sum_gradient_norms_exactly()
    _write_out_rotary_embedding()
    _skip_collectives_of_one_rank()
    _leave_the_compiler_out()
    _installed = True


def _hide_cuda_extensions(extensions: tuple[str, ...]) -> None:
    """Transformer Engine and apex may import without CUDA, but can do nothing there but raise.

    An installed Engine whose libraries do not load raises more than the ImportError that megatron-core expects.
    """
    for extension in extensions:
        for module in [name for name in sys.modules if name == extension or name.startswith(extension + ".")]:
            del sys.modules[module]
        sys.modules[extension] = None  # type: ignore[assignment]  # the import system's own mark for "not found"


# What megatron-core imports where it is there, and nothing here uses on a CPU: most of its time, by FSDP above all,
# which asks for torch's distributed tensors.
_OPTIONAL = (
    "megatron.core.distributed.fsdp.src.megatron_fsdp",
    "torch.distributed._tensor",
    "torch.distributed.fsdp",
    "triton",
)
# Of these it has functions and classes in any case, which it calls when it saves, and for FSDP, NCCL's memory, experts.
_CALLED_SELDOM = (
    "megatron.core.dist_checkpointing.strategies.torch",
    "megatron.core.distributed.fsdp.src.megatron_fsdp.utils",
    "megatron.core.transformer.fsdp_dtensor_checkpoint",
    "megatron.core.transformer.moe.ops.paged_stash",
    "torch.utils.cpp_extension",
)


# All of megatron-core that a model is built from; the second is there from 0.19 on.
_BUILT_FROM = ("megatron.core.models.gpt.gpt_layer_specs", "megatron.core.models.hybrid.hybrid_model")


def _import_megatron(with_engine: bool) -> None:
    """megatron.core.jit binds torch.compile when imported; inductor would need a compiler at run time.

    Its dynamic inference, which is not used here, imports wandb where that is installed: a second, for nothing.
    """
    compile_ = torch.compile
    torch.compile = lambda function=None, **_: function if function else (lambda f: f)  # type: ignore
    hidden: dict[str, Any] = {"wandb": None}
    if not with_engine:
        hidden |= dict.fromkeys(_OPTIONAL) | {name: _imported_when_called(name) for name in _CALLED_SELDOM}
    hidden = {name: module for name, module in hidden.items() if name not in sys.modules}
    sys.modules.update(hidden)
    try:
        for name in _BUILT_FROM:
            with suppress(ModuleNotFoundError):
                importlib.import_module(name)
    finally:
        torch.compile = compile_
        for name in hidden:
            del sys.modules[name]


def _imported_when_called(name: str) -> types.ModuleType:
    """Return a stand-in for a module of which functions and classes are imported, until one of them is called."""

    def attribute_of(attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)

        class Kind(type):
            def __call__(cls, *args: Any, **kwargs: Any) -> Any:
                return getattr(importlib.import_module(name), attribute)(*args, **kwargs)

            def __instancecheck__(cls, instance: Any) -> bool:
                return isinstance(instance, getattr(importlib.import_module(name), attribute))

        return Kind(attribute, (), {})

    stand_in = types.ModuleType(name)
    stand_in.__getattr__ = attribute_of  # type: ignore[method-assign]
    return stand_in


def _adapt_random_state() -> None:
    """Set the tracker's states at once, not queued for CUDA's lazy initialisation, which never comes without CUDA."""
    from megatron.core.tensor_parallel import random

    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


def _adapt_recomputation(with_engine: bool) -> None:
    """Selective recomputation assumes Transformer Engine (fp8 `None` is not `False`), and compiles a C++ extension."""
    from megatron.core.tensor_parallel import random

    if not with_engine:
        _recompute_without_engine(random)
    if hasattr(random, "_get_share_storage"):

        def share_storage(target: torch.Tensor, source: torch.Tensor) -> None:
            target.untyped_storage().resize_(source.untyped_storage().nbytes())
            target.untyped_storage().copy_(source.untyped_storage())

        random._get_share_storage = lambda: share_storage


def _recompute_without_engine(random: Any) -> None:

    class CheckpointWithoutOutput(random.CheckpointWithoutOutput):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.fp8 = False

    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("megatron.core") and hasattr(module, "CheckpointWithoutOutput"):
            module.CheckpointWithoutOutput = CheckpointWithoutOutput  # type: ignore[attr-defined]


def _sum_gradient_norms_exactly() -> None:
    """Replace torch's norm of each gradient, which without a GPU's kernel is too small for large ones: see `norm`."""
    from megatron.core.optimizer import clip_grads

    def l2_norm(_chunk_size: int, _overflow: Any, tensor_lists: Any, _per_tensor: bool) -> tuple[torch.Tensor, None]:
        norms = [norm(tensor) for tensors in tensor_lists for tensor in tensors]
        return torch.linalg.vector_norm(torch.stack(norms)).reshape(1).float(), None

    clip_grads.l2_norm_impl = l2_norm


# -- patches that only make it faster


def _write_out_rotary_embedding() -> None:
    """Replace the rotary embedding, which without Transformer Engine's kernel takes a dozen passes each way."""
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
    """Skip collectives of one rank, for which gloo copies the whole gradient buffer, or all weights."""
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
    """Return where its first element is; not by `data_ptr`, which simulated tensors do not have."""
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())


def _add_weight_gradients_inside_products() -> None:
    """Take the place of apex's kernel, which megatron-core's layers call for it (`gradient_accumulation_fusion`).

    Otherwise a gradient is made, rounded to the weights' type, and read again to be added.
    """

    def accumulate(x_nh: torch.Tensor, grad_no: torch.Tensor, sum_oh: torch.Tensor) -> None:
        add_product(sum_oh, grad_no, x_nh)

    kernel: Any = types.ModuleType(FUSED_GRADIENT_KERNEL)
    kernel.__spec__ = ModuleSpec(FUSED_GRADIENT_KERNEL, None)
    kernel.wgrad_gemm_accum_fp32 = kernel.wgrad_gemm_accum_fp16 = accumulate
    sys.modules[FUSED_GRADIENT_KERNEL] = kernel


def _leave_the_compiler_out() -> None:
    """Leave out torch's compiler, which its optimizer imports, over a second's work, to keep it from tracing methods.

    Each method remembers, as after its first call, to call its plain form: nothing compiles it.
    """
    for method in vars(torch.optim.Optimizer).values():
        plain: Any = getattr(method, "__wrapped__", None)
        if plain is not None:
            plain.__dynamo_disable = plain
