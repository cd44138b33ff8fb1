"""Compares a FANformer's cost with a Transformer's: parameters and FLOPs by formula, memory counted on fake tensors.

The paper's 6.25% is the FLOPs of FAN over those of a layer, 24 s d² for s tokens of width d: the maps of queries, keys,
values and output, and an FFN of two maps. The FFN of this project's model, a SwiGLU, has three maps.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.initialization import no_init_weights

from megatron_fanformer.convert.huggingface import to_huggingface_config
from megatron_fanformer.errors import InputError
from megatron_fanformer.experiments.probe import CostSettings
from megatron_fanformer.experiments.result import Cell, Finding, Log, Measured, Table
from megatron_fanformer.hf import FANformerForCausalLM
from megatron_fanformer.model.config import PRESETS, FANformerConfig
from megatron_fanformer.plan.job import forward_flops_per_token
from megatron_fanformer.plan.live_tensors import MemoryTracker

MIB = 2**20
HALF_BYTES = 2  # bytes of a number in half precision
PAPER_SIZE = "fanformer-1b"  # the preset whose memory the paper states
PAPER_FLOPS = 6.25  # percent that a FANformer has more than its Transformer, at most
PAPER_MEMORY = (4642.69, 4738.86)  # MB, allocated for OLMo-1B's and FANformer-1B's inference
TWINS = ("-transformer", "", "-same-params")  # suffixes of a size in the presets' names; "" is the FANformer


class Cost(NamedTuple):
    """The cost of one model."""

    parameters: int
    flops: int
    """FLOPs of a token's forward pass."""
    weight_bytes: int
    """Bytes of all weights in half precision."""
    counted_bytes: int
    """Peak memory of a forward pass without gradients, weights included."""


def measure(settings: CostSettings, _folder: Path, log: Log) -> Measured:
    """Count the costs of every size in `settings.presets`, as a Transformer and as both FANformers.

    Raises:
        InputError: a name in `settings.presets` is not a size.
    """
    if stray := [name for name in settings.presets if f"{name}-same-params" not in PRESETS]:
        sizes = [name for name in PRESETS if f"{name}-same-params" in PRESETS]
        raise InputError(f"cost.presets has {stray[0]!r}, which is not a size; choose from {', '.join(sizes)}")
    costs = {}
    for name in settings.presets:
        for twin in TWINS:
            # The model for transformers has no vocabulary padding, so the formulas must not count any, either.
            config = replace(PRESETS[name + twin], make_vocab_size_divisible_by=1)
            costs[name + twin] = Cost(
                parameters=config.num_parameters,
                flops=forward_flops_per_token(config, settings.sequence_length),
                weight_bytes=HALF_BYTES * config.num_parameters,
                counted_bytes=_peak_bytes(config, settings.inference_length),
            )
        log(f"{name}: {costs[name].parameters:,} parameters")
    columns = ["model", "parameters", "FLOPs a token", "weights, MiB", "peak of inference, MiB"]
    rows: list[list[Cell]] = [
        [name, cost.parameters, cost.flops, cost.weight_bytes / MIB, cost.counted_bytes / MIB]
        for name, cost in costs.items()
    ]
    table = Table(title="Costs: parameters and FLOPs by formula, memory counted", columns=columns, rows=rows)
    return Measured(findings=list(_findings(settings, costs)), tables=[table])


def _peak_bytes(config: FANformerConfig, length: int) -> int:
    """Return the peak memory of a forward pass of one sequence in half precision, logits of all tokens included."""
    with FakeTensorMode(), torch.no_grad():
        with no_init_weights():  # drawing weights reads values, which fake tensors do not have
            model = FANformerForCausalLM._from_config(
                to_huggingface_config(config), attn_implementation="sdpa", dtype=torch.float16
            )
        model.tie_weights()
        ids = torch.zeros(1, length, dtype=torch.long)
        with MemoryTracker() as tracker:
            for weight in model.parameters():
                weight.detach()  # the tracker counts tensors that operations return: this one returns the weight
            model(input_ids=ids, use_cache=True)
    return tracker.peak_bytes


def _more_flops(costs: dict[str, Cost], name: str, suffix: str = "") -> float:
    """Return how many percent more FLOPs the model `name` + `suffix` needs than the Transformer of the size `name`."""
    return 100 * (costs[name + suffix].flops / costs[f"{name}-transformer"].flops - 1)


def _findings(settings: CostSettings, costs: dict[str, Cost]) -> Iterator[Finding]:  # FLOPs, then memory
    for name in settings.presets:
        more = _more_flops(costs, name)
        yield Finding(
            name=f"FLOPs of a forward pass more than the Transformer's, {name}",
            paper=f"at most {PAPER_FLOPS}%",
            ours=more,
            unit="%",
            shows=more <= PAPER_FLOPS,
            sentence=f"{name} needs {more:.2f}% more FLOPs than the Transformer of its shape, head and scores of "
            f"{settings.sequence_length:,} tokens included, and with the Transformer's parameters "
            f"{_more_flops(costs, name, '-same-params'):+.2f}%.",
        )
    if PAPER_SIZE in settings.presets:
        fan, transformer = costs[PAPER_SIZE], costs[f"{PAPER_SIZE}-transformer"]
        more_weights = (fan.weight_bytes - transformer.weight_bytes) / MIB
        more_peak = (fan.counted_bytes - transformer.counted_bytes) / MIB
        low, high = PAPER_MEMORY
        yield Finding(
            name=f"memory of inference more than the Transformer's, {PAPER_SIZE}",
            paper=f"{low} to {high} MB: {high - low:.2f} more",
            ours=more_peak,
            unit="MiB",
            shows=None,
            sentence=f"For a sequence of {settings.inference_length:,} tokens in half precision {PAPER_SIZE} takes "
            f"{fan.counted_bytes / MIB:,.2f} MiB at its peak, {more_peak:.2f} more than the Transformer's "
            f"{transformer.counted_bytes / MIB:,.2f}; its weights are {more_weights:.2f} MiB more. The paper measured "
            f"{high - low:.2f} MB more, on a GPU.",
        )
