"""Layouts as text over a configuration, all layouts of some GPUs, and the fastest of them that fit.

Fields that a layout does not name are the configuration's, as if the named ones had been overridden on the command
line.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import yaml

from megatron_fanformer.configuration import build
from megatron_fanformer.errors import InputError
from megatron_fanformer.model.config import FANformerConfig
from megatron_fanformer.model.layout_rules import divisors
from megatron_fanformer.model.layouts import Layout, laid_over, layout_fields, layout_text
from megatron_fanformer.plan.estimate import Estimate, estimate, job_of, problems, problems_of_layout
from megatron_fanformer.plan.gradient_buffers import first_stage_buckets, first_stage_weights
from megatron_fanformer.plan.job import head_flops_per_token, layer_flops_per_token
from megatron_fanformer.plan.machines import Machine
from megatron_fanformer.plan.step_time import step_time
from megatron_fanformer.runtime.layout import ParallelConfig, RecomputeModule
from megatron_fanformer.train.config import RunConfig, TrainingConfig
from megatron_fanformer.train.machine_rules import can_recompute_norms

MICRO_BATCH = "mbs"
NAMED = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "data_parallel_size",
    "sequence_parallel",
    "fan_form",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "pipeline_model_parallel_layout",
    "cp_comm_type",
    "ddp_bucket_size",
    "recompute_granularity",
    "recompute_modules",
)
"""The fields of `parallel` that a layout's name shows."""
ALWAYS_WRITTEN = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "sequence_parallel",
    "use_distributed_optimizer",
)
FEW_BUCKETS, MANY_BUCKETS, MILLION = 4, 8, 10**6
LAYER_BY_LAYER = ("uniform", 1)  # full recomputation that says no more
NOT_RECOMPUTED: dict[str, Any] = {
    "recompute_granularity": None,
    "recompute_method": None,
    "recompute_num_layers": None,
}
RECOMPUTATION = ("recompute_granularity", "recompute_modules")
MOST_SHOWN = 10
NUMBERS = re.compile(r"\d+(?:\.\d+)?(?:, ?\d+(?:\.\d+)?)*")  # also several, with commas between


# -- layouts as text


def laid_out(config: RunConfig, text: str) -> RunConfig:
    """Return the configuration in the layout that `text` describes, such as `tp=8,pp=4,mbs=2`.

    Raises:
        InputError: it cannot be read.
    """
    fields = layout_fields(text)
    training = config.training
    for name in (MICRO_BATCH, "micro_batch_size"):
        if name in fields:
            values = {**dataclasses.asdict(training), "micro_batch_size": fields.pop(name)}
            try:
                training = build(values, TrainingConfig, "training.")
            except InputError as error:
                raise InputError(f"layout {text!r}: {error}") from None
    layout = laid_over(Layout(config.parallel, config.kernels), fields, text)
    return dataclasses.replace(config, parallel=layout.parallel, kernels=layout.kernels, training=training)


def layout_name(config: RunConfig, base: RunConfig) -> str:
    """Return the text that `laid_out` reads as this configuration, if it differs from `base` in its layout alone."""
    plain, parallel = ParallelConfig(), config.parallel
    named = {
        name: value
        for name in NAMED
        if not (value := getattr(parallel, name)) == getattr(plain, name) == getattr(base.parallel, name)
    }
    if parallel.recompute_granularity != "selective":
        named.pop("recompute_modules", None)
    if parallel.recompute_granularity == "full":
        layers = {"recompute_method": parallel.recompute_method, "recompute_num_layers": parallel.recompute_num_layers}
        named |= layers if tuple(layers.values()) != LAYER_BY_LAYER else {}
    return layout_text({**named, MICRO_BATCH: config.training.micro_batch_size})


def layout_lines(config: RunConfig, base: RunConfig) -> Iterator[str]:
    """Yield a layout as lines of a configuration: `parallel`, and other sections where they differ from `base`.

    The number of replicas follows from the GPUs, and is left out.
    """
    plain = ParallelConfig()
    parallel = {
        name: value
        for name, value in vars(config.parallel).items()
        if name != "data_parallel_size" and (name in ALWAYS_WRITTEN or value != getattr(plain, name))
    }
    kernels = {name: value for name, value in vars(config.kernels).items() if value != getattr(base.kernels, name)}
    sections = {
        "parallel": parallel,
        **({"kernels": kernels} if kernels else {}),
        "training": {"micro_batch_size": config.training.micro_batch_size},
    }
    for section, values in sections.items():
        yield f"{section}:"
        for name, value in values.items():
            yield f"  {name}: {yaml.safe_dump(value, default_flow_style=True, width=math.inf).splitlines()[0]}"


# -- all layouts


def all_layouts(config: RunConfig, gpus: int) -> Iterator[list[RunConfig]]:
    """Yield the configuration in every layout of that many GPUs, legal or not; one list a layout, by rising micro
    batch.

    Only one of two spellings of a layout is yielded: sequence parallelism and the `sequence` form where there are
    tensor parallel ranks, chunks where there are stages whose layers they divide. Stages have equally many layers, or
    take equally long (`balanced_layouts`).
    """
    # Attention within documents has one exchange alone.
    exchange = "a2a" if config.data.reset_attention_mask else config.parallel.cp_comm_type
    for tensor in divisors(gpus):
        for context in divisors(gpus // tensor):
            for pipeline in divisors(gpus // tensor // context):
                if pipeline > config.model.num_layers:
                    continue  # a stage without a layer
                replicas = gpus // (tensor * context * pipeline)
                degrees: dict[str, Any] = {
                    "tensor_model_parallel_size": tensor,
                    "context_parallel_size": context,
                    "cp_comm_type": exchange if context > 1 else None,
                    "pipeline_model_parallel_size": pipeline,
                    "num_layers_in_first_pipeline_stage": None,
                    "num_layers_in_last_pipeline_stage": None,
                    "data_parallel_size": replicas,
                }
                samples, rest = divmod(config.training.global_batch_size, replicas)
                micro_batches = [
                    dataclasses.replace(config.training, micro_batch_size=size)
                    for size in ([1] if rest or not samples else divisors(samples))
                ]
                for stages in _stages(config.model, pipeline):
                    for form in _fan_forms(config.model, tensor):
                        parallel = dataclasses.replace(config.parallel, **degrees, **stages, **form)
                        for size, again in itertools.product(
                            _bucket_sizes(config, parallel), recomputations(config, parallel)
                        ):
                            whole = dataclasses.replace(parallel, ddp_bucket_size=size, **again)
                            yield [
                                dataclasses.replace(config, parallel=whole, training=training)
                                for training in micro_batches
                            ]


def _stages(model: FANformerConfig, pipeline: int) -> Iterator[dict[str, Any]]:
    """Yield the ways to share out the layers: evenly, where they divide, in every number of chunks; and by time."""
    layers, rest = divmod(model.num_layers, pipeline)
    for number in divisors(layers) if pipeline > 1 and not rest else [1]:
        chunks = number if number > 1 else None
        yield {"virtual_pipeline_model_parallel_size": chunks, "pipeline_model_parallel_layout": None}
    for text in balanced_layouts(model, pipeline) if pipeline > 1 else ():
        yield {"virtual_pipeline_model_parallel_size": None, "pipeline_model_parallel_layout": text}


def _bucket_sizes(config: RunConfig, parallel: ParallelConfig) -> list[int | None]:
    """Return the configuration's size; and where it leaves that open and would have few buckets, one for about eight.

    All buckets but one are communicated beside the computation; their default size grows with the replicas.
    """
    replicas, stated = parallel.data_parallel_size or 1, parallel.ddp_bucket_size
    pays = config.runtime.device != "cpu" and replicas * parallel.context_parallel_size > 1
    reduces, _ = parallel.overlaps(pays=pays)
    if stated is not None or not reduces:
        return [stated]
    layers = (parallel.layers_per_stage(config.model.num_layers) or [0])[0]
    elements = sum(weight.elements for weight in first_stage_weights(config.model, parallel, layers))
    size = round(elements / MANY_BUCKETS / MILLION) * MILLION
    overlapped = dataclasses.replace(parallel, overlap_grad_reduce=True)
    if not size or first_stage_buckets(config.model, overlapped, replicas, layers) >= FEW_BUCKETS:
        return [None]
    return [None, size]


def _fan_forms(model: FANformerConfig, tensor: int) -> list[dict[str, Any]]:
    plain = {"sequence_parallel": False, "fan_form": "column"}
    if tensor == 1:
        return [plain]
    sharded = [{"sequence_parallel": True, "fan_form": form} for form in ("column", "sequence")]
    return [plain, *sharded[: 2 if model.has_fan else 1]]


def recomputations(config: RunConfig, parallel: ParallelConfig) -> list[Mapping[str, Any]]:
    """List recomputation settings of a layout, from none to all: nothing, parts without a matrix product, the MLP too,
    layers.

    A configuration's own modules, where it recomputes selectively, take the place of the two in the middle.
    """
    cheap: list[RecomputeModule] = []
    # The Engine fuses all norms but the input norm of the `sequence` form.
    has_plain_norm = config.kernels.transformer_impl == "local" or parallel.fan_form == "sequence"
    if has_plain_norm and can_recompute_norms(config.precision):
        cheap.append("layernorm")
    refusals = config.model.placement.recompute_problems(config.model, parallel.tensor_model_parallel_size)
    if config.model.has_fan and not any(refusals):
        cheap.append("fan")
    modules: list[list[RecomputeModule]] = [*filter(None, [cheap]), [*cheap, "mlp"]]
    if config.parallel.recompute_granularity == "selective":
        modules = [config.parallel.recompute_modules]
    selective = [
        {**NOT_RECOMPUTED, "recompute_granularity": "selective", "recompute_modules": names} for names in modules
    ]
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return [NOT_RECOMPUTED, *selective, full]


def balanced_layouts(model: FANformerConfig, stages: int) -> Iterator[str]:
    """Yield a `pipeline_model_parallel_layout` for each number of chunks that divides the most layers of a stage.

    Layers and the loss head, which counts as layers by its FLOPs, are shared out evenly. Where that leaves chunks with
    one layer less, the first is one of them: it has the embedding. Even layouts are left out.
    """
    head = round(head_flops_per_token(model) / layer_flops_per_token(model))
    units = model.num_layers + head
    for chunks in divisors(-(-units // stages)):
        least, more = divmod(units, stages * chunks)
        layers = [least + (1 <= place <= more) for place in range(stages * chunks)]
        layers[-1] -= head
        if layers[-1] >= 0 and all(layers[1:-1]) and len(set(layers)) > 1:
            yield _layout_of_chunks(layers)


def _layout_of_chunks(layers: list[int]) -> str:
    """Return the shortest text of chunks with so many layers, equal neighbors as a repeated group."""
    chunks = ["t" * number if number < 4 else f"t*{number}" for number in layers]
    middle = [(chunk, len(list(alike))) for chunk, alike in itertools.groupby(chunks[1:-1])]
    groups = [f"({chunk}|)*{number}" if number > 1 else f"{chunk}|" for chunk, number in middle]
    return f"E{chunks[0]}|{''.join(groups)}{chunks[-1]}L"


# -- the fastest


@dataclass(frozen=True, kw_only=True)
class RejectedClass:
    """Layouts that one rule rejects. (A layout that breaks several is in as many classes.)"""

    rule: str
    """Their common message, with N for the numbers."""
    count: int
    example: str
    """The name of one of them, as `--layouts` reads it; of those that do not fit, the one that needs least."""
    message: str
    """The example's message, also by `train`: the values, the rule, and the nearest legal value."""


@dataclass(frozen=True, kw_only=True)
class Findings:
    """The layouts that were judged."""

    candidates: tuple[Estimate, ...]
    """The candidates: those that fit first, then by speed; of a search the ten fastest that fit, or the one that lacks
    least."""
    judged: int
    """Number of layouts judged."""
    legal: int
    """Number of layouts that break no rule."""
    rejected: tuple[RejectedClass, ...]
    """Rejected classes, the largest first. A search counts a layout that does not fit only if it would be faster than
    the last candidate."""

    @property
    def best(self) -> Estimate | None:
        """Return the fastest that fits."""
        return next((candidate for candidate in self.candidates if candidate.fits), None)


def judge(named: Sequence[tuple[str, RunConfig]], gpus: int, machine: Machine) -> Findings:
    """Judge layouts that a user names, each with the configuration that is laid out so."""
    rejections, estimates = _Rejections(named[0][1]), list[Estimate]()
    for name, config in named:
        if broken := problems(config, gpus):
            rejections.add(broken, name)
        else:
            estimates.append(estimate(name, config, job_of(config, gpus), machine))
    for estimated in sorted(estimates, key=lambda estimated: estimated.needed_bytes):
        if not estimated.fits:
            rejections.add([estimated.shortage], estimated.name)
    return Findings(
        candidates=tuple(sorted(estimates, key=lambda estimated: (not estimated.fits, estimated.time.seconds))),
        judged=len(named),
        legal=len(estimates),
        rejected=rejections.classes(),
    )


def search(config: RunConfig, gpus: int, machine: Machine) -> Findings:
    """Search all layouts of a configuration on that many GPUs.

    Layouts are taken in the order of a lower bound of their time, that of the same one without recomputation, so that
    few need their own time and memory computed before the fastest that fit are known.
    """
    rejections = _Rejections(config)
    legal = list(_legal(config, gpus, rejections))
    fitting: list[Estimate] = []
    too_large: list[Estimate] = []
    for bound, layout in sorted(zip(_bounds(legal, gpus, machine), legal, strict=True), key=itemgetter(0)):
        if len(fitting) == MOST_SHOWN and bound > fitting[-1].time.seconds:
            break
        estimated = estimate(layout_name(layout, config), layout, job_of(layout, gpus), machine)
        (fitting if estimated.fits else too_large).append(estimated)
        fitting = sorted(fitting, key=lambda candidate: candidate.time.seconds)[:MOST_SHOWN]
    if len(fitting) == MOST_SHOWN:
        too_large = [estimated for estimated in too_large if estimated.time.seconds < fitting[-1].time.seconds]
    least = min(too_large, key=lambda estimated: estimated.needed_bytes, default=None)
    if least:
        rejections.add([least.shortage], least.name, count=len(too_large))
    return Findings(
        candidates=tuple(fitting or filter(None, [least])),
        judged=rejections.layouts + len(legal),
        legal=len(legal),
        rejected=rejections.classes(),
    )


def _legal(config: RunConfig, gpus: int, rejections: "_Rejections") -> Iterator[RunConfig]:
    """Yield the layouts that break no rule; the others are added to `rejections`."""
    for micro_batches in all_layouts(config, gpus):
        parallel = micro_batches[0].parallel
        layout_problems = [*parallel.problems(), *problems_of_layout(micro_batches[0])]
        for layout in micro_batches:
            if broken := layout_problems + layout.problems_of_steps(parallel.data_parallel_size or 1):
                rejections.layouts += 1
                rejections.add(broken, layout)
            else:
                yield layout


def _bounds(legal: Sequence[RunConfig], gpus: int, machine: Machine) -> Iterator[float]:
    """Yield the least seconds of a step of each layout: those without recomputation."""
    seconds: dict[tuple[Any, ...], float] = {}
    for config in legal:
        values = vars(config.parallel)
        key = (*(values[name] for name in NAMED if name not in RECOMPUTATION), config.training.micro_batch_size)
        if key not in seconds:
            plain = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, **NOT_RECOMPUTED))
            seconds[key] = step_time(job_of(plain, gpus), machine).seconds
        yield seconds[key]


class _Rejections:
    """Rejected layouts by rule, with the first example of each."""

    def __init__(self, base: RunConfig) -> None:
        self.base, self.layouts = base, 0
        self._counts: dict[str, int] = {}
        self._first: dict[str, tuple[str, RunConfig | str]] = {}

    def add(self, messages: list[str], example: RunConfig | str, *, count: int = 1) -> None:
        """Add layouts that these problems reject."""
        for message in messages:
            rule = NUMBERS.sub("N", message)
            self._counts[rule] = self._counts.get(rule, 0) + count
            self._first.setdefault(rule, (message, example))

    def classes(self) -> tuple[RejectedClass, ...]:
        """Return the classes, the largest first."""
        return tuple(
            RejectedClass(
                rule=rule,
                count=count,
                example=example if isinstance(example, str) else layout_name(example, self.base),
                message=message,
            )
            for rule, count in sorted(self._counts.items(), key=lambda item: -item[1])
            for message, example in [self._first[rule]]
        )
