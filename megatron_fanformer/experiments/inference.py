"""Prefill and decoding of a FANformer and its two twins: seconds in turns, memory measured.

In each round all three models take a turn, in another order, so that other work on the machine slows all alike.
Figures are medians over the rounds, ratios those of the same round; the peak is of a whole continuation, by live
tensors on a CPU and by the allocator on a GPU.
"""

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from megatron_fanformer.errors import InputError
from megatron_fanformer.experiments.intervals import ratio_mean
from megatron_fanformer.experiments.probe import InferenceSettings
from megatron_fanformer.experiments.result import Cell, Finding, Log, Measured, Table
from megatron_fanformer.experiments.twins import (
    SAME_PARAMETERS,
    SAME_SIZE,
    TRANSFORMER,
    fanformer_of,
    fresh_model,
    twins,
)
from megatron_fanformer.hf import FANformerForCausalLM
from megatron_fanformer.model.config import PRESETS
from megatron_fanformer.pictures import drawn
from megatron_fanformer.plan.live_tensors import MemoryTracker
from megatron_fanformer.runtime.device import resolve_device

MIB = 2**20
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PAPER = "141.49 to 142.88 ms (A100, fp16, 4,096 tokens, 20 iterations): 1.01"


@dataclass(kw_only=True)
class Contestant:
    """One of the three models that are measured in turns."""

    model: FANformerForCausalLM
    prefill: list[float] = field(default_factory=list)
    """Seconds of the prefill, one per round."""
    decode: list[float] = field(default_factory=list)
    """Seconds per decoded token, one per round."""
    weight_bytes: int = 0
    cache_bytes: int = 0
    peak_bytes: int = 0


def measure(settings: InferenceSettings, _folder: Path, log: Log) -> Measured:
    """Measure the three models in turns.

    Raises:
        InputError: the preset does not exist.
    """
    kind = resolve_device("auto")
    dtype = DTYPES[settings.dtype if settings.dtype != "auto" else "bf16" if kind == "cuda" else "fp32"]
    if settings.preset is None:
        config = fanformer_of(settings.num_layers, settings.hidden_size, settings.num_heads, settings.vocab_size)
    elif settings.preset in PRESETS:
        config = replace(PRESETS[settings.preset], make_vocab_size_divisible_by=1)
    else:
        raise InputError(f"inference.preset is {settings.preset!r}; name one of {', '.join(PRESETS)}")
    shape, generator = (settings.batch_size, settings.prompt_tokens), torch.Generator().manual_seed(0)
    prompt = torch.randint(config.vocab_size, shape, generator=generator).to(kind)
    contestants = {
        name: Contestant(model=fresh_model(twin, seed=0).to(device=kind, dtype=dtype).eval())
        for name, twin in twins(config).items()
    }
    for name, contestant in contestants.items():
        _measure_memory(contestant, prompt, settings.new_tokens, kind)
        log(
            f"{name}: {contestant.weight_bytes / MIB:.1f} MiB of weights, {contestant.peak_bytes / MIB:.1f} at the peak"
        )
    order = list(contestants.values())
    for number in range(settings.rounds):
        for contestant in (*order[number % 3 :], *order[: number % 3]):
            prefill, decode = continuation_seconds(contestant.model, prompt, settings.new_tokens)
            contestant.prefill.append(prefill)
            contestant.decode.append(decode)
    return Measured(
        findings=list(_findings(settings, contestants)),
        tables=[_table(contestants)],
        pictures={"inference.png": drawn(lambda panels: _draw(panels[0], contestants), columns=2)},
    )


# -- one continuation


@torch.no_grad()
def continuation_seconds(model: FANformerForCausalLM, prompt_bs: Tensor, new_tokens: int) -> tuple[float, float]:
    """Return seconds of the prefill, up to the first new token, and of each further one, all greedy."""
    cache = DynamicCache(config=model.config)
    start = _now(prompt_bs)
    token = _next_token(model, prompt_bs, cache)
    first = _now(prompt_bs)
    for _ in range(new_tokens - 1):
        token = _next_token(model, token, cache)
    return first - start, (_now(prompt_bs) - first) / max(1, new_tokens - 1)


def _next_token(model: FANformerForCausalLM, ids_bs: Tensor, cache: Any) -> Tensor:
    logits: Tensor = model(input_ids=ids_bs, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    return logits.argmax(-1)


def _now(on: Tensor) -> float:
    """Return the time once all work on the tensor's device is done."""
    if on.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


# -- memory


@torch.no_grad()
def _measure_memory(contestant: Contestant, prompt_bs: Tensor, new_tokens: int, kind: str) -> None:
    """Run a continuation without timing it, and fill in the bytes."""
    contestant.weight_bytes = sum(weight.numel() * weight.element_size() for weight in contestant.model.parameters())
    cache = DynamicCache(config=contestant.model.config)
    with MemoryTracker() as tracker:
        if kind == "cuda":
            torch.cuda.reset_peak_memory_stats()
        for weight in contestant.model.parameters():
            weight.detach()  # an operation that returns it, so that it is counted, once
        others = torch.cuda.memory_allocated() - contestant.weight_bytes if kind == "cuda" else 0
        token = prompt_bs
        for _ in range(new_tokens):
            token = _next_token(contestant.model, token, cache)
    contestant.peak_bytes = torch.cuda.max_memory_allocated() - others if kind == "cuda" else tracker.peak_bytes
    contestant.cache_bytes = sum(
        part.numel() * part.element_size() for layer in cache.layers for part in (layer.keys, layer.values)
    )


# -- findings


def _findings(settings: InferenceSettings, contestants: dict[str, Contestant]) -> Iterator[Finding]:
    none = contestants[TRANSFORMER]
    for name in (SAME_SIZE, SAME_PARAMETERS):
        contestant = contestants[name]
        for phase in ("prefill", "decode"):
            ratios = [a / b for a, b in zip(getattr(contestant, phase), getattr(none, phase), strict=True)]
            interval = ratio_mean(ratios).interval
            ours = statistics.median(ratios)
            spread = "" if interval is None else f" (mean {interval[0]:.3f} to {interval[1]:.3f})"
            yield Finding(
                name=f"seconds of {phase}, {name} over Transformer",
                paper=PAPER if phase == "prefill" and name == SAME_SIZE else None,
                ours=ours,
                interval=interval,
                unit="ratio",
                shows=None,
                sentence=f"The {phase} of the {name} takes {ours:.3f} times as long as the Transformer's, in the "
                f"median of {settings.rounds} rounds{spread}.",
            )
    more = (contestants[SAME_SIZE].peak_bytes - none.peak_bytes) / MIB
    weights = (contestants[SAME_SIZE].weight_bytes - none.weight_bytes) / MIB
    yield Finding(
        name="memory at the peak, FANformer less Transformer",
        paper="96.17 MB more, of 4642.69",
        ours=more,
        unit="MiB",
        shows=None,
        sentence=f"The FANformer takes {more:.2f} MiB more at its peak than the Transformer of its shape; its weights "
        f"are {weights:.2f} MiB more.",
    )


def _table(contestants: dict[str, Contestant]) -> Table:
    columns = ["model", "parameters", "prefill, ms", "decoding, ms a token", "weights, MiB", "cache, MiB", "peak, MiB"]
    rows: list[list[Cell]] = [
        [
            *(name, sum(weight.numel() for weight in contestant.model.parameters())),
            *(1000 * statistics.median(seconds) for seconds in (contestant.prefill, contestant.decode)),
            *(size / MIB for size in (contestant.weight_bytes, contestant.cache_bytes, contestant.peak_bytes)),
        ]
        for name, contestant in contestants.items()
    ]
    return Table(title="Medians over the rounds", columns=columns, rows=rows)


def _draw(panels: Any, contestants: dict[str, Contestant]) -> None:
    for axes, phase, unit in zip(panels, ("prefill", "decode"), ("ms", "ms a token"), strict=True):
        seconds = [[1000 * value for value in getattr(model, phase)] for model in contestants.values()]
        axes.boxplot(seconds, tick_labels=[name.replace(", ", ",\n") for name in contestants], showfliers=False)
        axes.set(title=f"{phase}, {unit}")
