"""What a configuration asks of this machine that it does not have: each rule that is broken, with its remedy.

The rules that need no machine are checked before: they need no torch, which takes seconds to import.
"""

from collections.abc import Iterator

from megatron_fanformer.errors import InputError
from megatron_fanformer.model.kernels import KernelsConfig
from megatron_fanformer.runtime import device as devices
from megatron_fanformer.training.config import RunConfig
from megatron_fanformer.training.fp8_rules import fp8_machine_problems


def machine_problems(config: RunConfig) -> list[str]:
    """What keeps this machine from running a configuration, one line each."""
    try:
        device = devices.resolve_device(config.runtime.device)
    except InputError as error:
        return [str(error)]
    return [*kernel_problems(config.kernels), *fp8_machine_problems(config.precision, device)]


def kernel_problems(kernels: KernelsConfig) -> list[str]:
    """What keeps this machine from the kernels that were asked for, one line each."""
    return list(_kernel_problems(kernels))


def _kernel_problems(kernels: KernelsConfig) -> Iterator[str]:
    if kernels.gradient_accumulation_fusion and not _has_fused_gradients(kernels):
        yield (
            "kernels.gradient_accumulation_fusion is true, but there is no GPU with Transformer Engine's layers, and "
            "apex's fused_weight_gradient_mlp_cuda does not import; set it to null"
        )
    if kernels.cuda_graph_impl == "local" and not devices.has_gpu():
        yield "kernels.cuda_graph_impl is local, but there is no GPU; set it to none"


def _has_fused_gradients(kernels: KernelsConfig) -> bool:
    """Whether this machine's layers can add weight gradients inside the product."""
    has_engine = kernels.transformer_impl != "local" and devices.has_transformer_engine()
    return has_engine or devices.has_fused_gradient_kernel()
