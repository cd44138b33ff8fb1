"""The machine as the formula of the step time knows it (`planning.machines`), measured with a model's own shapes."""

from typing import Any

import torch
import torch.nn.functional as F

from benchmarking.matrix_rate import REPEATS, MatrixClock, timed
from megatron_fanformer.model.config import FANformerConfig
from megatron_fanformer.planning.machines import known_machines
from megatron_fanformer.planning.roofline import layer_operations
from megatron_fanformer.planning.step_time import FLASH_BACKWARD

USUAL_GPU, CPU = "h100", "cpu"  # whose links are taken, which one process cannot measure


def measured_machine(
    model: FANformerConfig, micro_batch_size: int, dtype: str, torch_dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    """The fields of a machine file: rates that were measured, and what else the machine that it is `like` has."""
    tokens = micro_batch_size * model.seq_length
    rate = MatrixClock(model, tokens, torch_dtype, device).mean()
    name = torch.cuda.get_device_name() if device.type == "cuda" else CPU
    known = [short for short in known_machines() if short in name.lower()]
    return {
        "like": known[0] if known else USUAL_GPU,
        "name": f"{name}, measured",
        f"{dtype}_flops_per_second": rate,
        "product_efficiency": 1.0,
        "unhidden": 0.0,  # the products' bytes are in their rate
        "attention_efficiency": min(1.0, _attention_rate(model, micro_batch_size, torch_dtype, device) / rate),
        "memory_bytes_per_second": _memory_rate(tokens, model, torch_dtype, device),
        "memory_efficiency": 1.0,
        "relative_error": 0.15,
        "sources": [
            f"measured by tools/bench_train.py, in {dtype}; links and host are those of the machine it is like"
        ],
    }


def _attention_rate(model: FANformerConfig, micro_batch_size: int, dtype: torch.dtype, device: torch.device) -> float:
    """FLOP/s of causal attention, forward and backward, counted as the formula counts them."""
    shape = (micro_batch_size, model.num_attention_heads, model.seq_length, model.kv_channels)
    query, key, value = (torch.randn(shape, dtype=dtype, device=device, requires_grad=True) for _ in range(3))
    gradient = torch.randn(shape, dtype=dtype, device=device)

    def both() -> None:
        context = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        torch.autograd.grad(context, (query, key, value), gradient)

    operations = layer_operations(model, tokens=micro_batch_size * model.seq_length, element_bytes=dtype.itemsize)
    [attention] = [operation for operation in operations if operation.kind == "attention"]
    flops = attention.forward.flops + FLASH_BACKWARD * attention.backward.flops
    return flops / min(timed(both, device) for _ in range(REPEATS))


def _memory_rate(tokens: int, model: FANformerConfig, dtype: torch.dtype, device: torch.device) -> float:
    """Bytes per second of a sum of two activations of the MLP's width."""
    first, second = (torch.randn(tokens, model.ffn_hidden_size, dtype=dtype, device=device) for _ in range(2))
    seconds = min(timed(lambda: torch.add(first, second), device) for _ in range(REPEATS))
    return 3 * first.nbytes / seconds
