"""Layouts as text over a configuration, all layouts of some GPUs, and the fastest of them that fit.

Fields that a layout does not name are the configuration's, as if the named ones had been overridden on the command
line.
"""

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any, TypeVar

import yaml

from megatron_fanformer.configuration import build
from megatron_fanformer.errors import InputError
from megatron_fanformer.model.config import FANformerConfig
from megatron_fanformer.model.layout_rules import divisors, fan_recompute_problems
from megatron_fanformer.model.layouts import Layout, layout_fields, layout_text, replace_fields
from megatron_fanformer.plan.estimate import Estimate, estimate, job_of, problems, problems_of_layout
from megatron_fanformer.plan.gradient_buffers import BUCKET_PER_REPLICA, LEAST_BUCKET, first_stage_weights
from megatron_fanformer.plan.machines import Machine
from megatron_fanformer.plan.step_time import step_time
from megatron_fanformer.runtime.layout import ParallelConfig, RecomputeModule
from megatron_fanformer.train.config import RunConfig, TrainingConfig
from megatron_fanformer.train.machine_rules import can_recompute_norms

Example = TypeVar("Example")
MICRO_BATCH = "mbs"
FEW_BUCKETS, MANY_BUCKETS, MILLION = 4, 8, 10**6
NOT_RECOMPUTED: dict[str, Any] = {
    "recompute_granularity": None,
    "recompute_method": None,
    "recompute_num_layers": None,
}
LAYER_BY_LAYER: dict[str, Any] = {"recompute_method": "uniform", "recompute_num_layers": 1}
MOST_SHOWN = 10
NUMBERS = re.compile(r"\d+(?:\.\d+)?(?:, ?\d+(?:\.\d+)?)*")  # also several, with commas between


# -- layouts as text


def laid_out(config: RunConfig, text: str) -> RunConfig:
    """Return the configuration in the layout that `text` describes, such as `tp=8,pp=4,mbs=2`.

    Raises:
        InputError: it cannot be read.
    """
    fields, training = layout_fields(text), config.training
    if MICRO_BATCH in fields:
        values = {**dataclasses.asdict(training), "micro_batch_size": fields.pop(MICRO_BATCH)}
        try:
            training = build(values, TrainingConfig, "training.")
        except InputError as error:
            raise InputError(f"layout {text!r}: {error}") from None
    layout = replace_fields(Layout(config.parallel, config.kernels), fields, text)
    return dataclasses.replace(config, parallel=layout.parallel, kernels=layout.kernels, training=training)


def layout_name(config: RunConfig, base: RunConfig) -> str:
    """Return the text that `laid_out` reads as this configuration, if it differs from `base` in its layout alone."""
    plain, parallel = ParallelConfig(), config.parallel
    named = {
        name: value
        for name, value in vars(parallel).items()
        if not value == getattr(plain, name) == getattr(base.parallel, name)
    }
    if parallel.recompute_granularity != "selective":
        named.pop("recompute_modules", None)
    if parallel.recompute_granularity == "full" and named.items() >= LAYER_BY_LAYER.items():  # as `full` is read
        named = {name: value for name, value in named.items() if name not in LAYER_BY_LAYER}
    return layout_text({**named, MICRO_BATCH: config.training.micro_batch_size})


def layout_lines(config: RunConfig, base: RunConfig) -> list[str]:
    """Return a layout as lines of a configuration: `parallel`, and other fields where they differ from `base`.

    The number of replicas follows from the GPUs, and is left out.
    """
    plain = ParallelConfig(data_parallel_size=config.parallel.data_parallel_size)
    sections = {
        "parallel": {name: value for name, value in vars(config.parallel).items() if value != getattr(plain, name)},
        "kernels": {
            name: value for name, value in vars(config.kernels).items() if value != getattr(base.kernels, name)
        },
        "training": {"micro_batch_size": config.training.micro_batch_size},
    }
    if not sections["kernels"]:
        del sections["kernels"]
    return yaml.safe_dump(sections, sort_keys=False).splitlines()


# -- all layouts


def all_layouts(config: RunConfig, gpus: int) -> Iterator[list[RunConfig]]:
    """Yield the configuration in every layout of that many GPUs, legal or not, without recomputation; one list a
    layout, by rising micro batch.

    Only one of two spellings of a layout is yielded: sequence parallelism and the `sequence` form where there are
    tensor parallel ranks, chunks where there are stages whose layers they divide. Stages have equally many layers.
    """
    # Attention within documents has one exchange alone.
    exchange = "a2a" if config.data.reset_attention_mask else config.parallel.cp_comm_type
    degrees = [
        (tensor, context, pipeline)
        for tensor in divisors(gpus)
        for context in divisors(gpus // tensor)
        for pipeline in divisors(gpus // tensor // context)
        if pipeline <= config.model.num_layers
    ]
    for tensor, context, pipeline in degrees:
        replicas = gpus // (tensor * context * pipeline)
        samples, rest = divmod(config.training.global_batch_size, replicas)
        micro_batches = [
            dataclasses.replace(config.training, micro_batch_size=size)
            for size in ([1] if rest or not samples else divisors(samples))
        ]
        for chunks, form in itertools.product(_chunks(config.model, pipeline), _fan_forms(config.model, tensor)):
            parallel = dataclasses.replace(
                config.parallel,
                tensor_model_parallel_size=tensor,
                context_parallel_size=context,
                cp_comm_type=exchange if context > 1 else None,
                pipeline_model_parallel_size=pipeline,
                virtual_pipeline_model_parallel_size=chunks,
                pipeline_model_parallel_layout=None,
                num_layers_in_first_pipeline_stage=None,
                num_layers_in_last_pipeline_stage=None,
                data_parallel_size=replicas,
                **form,
                **NOT_RECOMPUTED,
            )
            parallel = dataclasses.replace(parallel, ddp_bucket_size=_bucket_size(config, parallel))
            yield [dataclasses.replace(config, parallel=parallel, training=training) for training in micro_batches]


def _chunks(model: FANformerConfig, pipeline: int) -> list[int | None]:
    layers, rest = divmod(model.num_layers, pipeline)
    return [None] if pipeline == 1 or rest else [number if number > 1 else None for number in divisors(layers)]


def _bucket_size(config: RunConfig, parallel: ParallelConfig) -> int | None:
    """Return the configuration's size; where it leaves that open and would have few buckets, one for about eight.

    All buckets but one are communicated beside the computation; their default size grows with the replicas.
    """
    default = max(LEAST_BUCKET, BUCKET_PER_REPLICA * (parallel.data_parallel_size or 1))
    is_overlapped = config.runtime.device != "cpu" and parallel.overlap_grad_reduce is not False
    if parallel.ddp_bucket_size is not None or default == LEAST_BUCKET or not is_overlapped:
        return parallel.ddp_bucket_size
    layers = (parallel.layers_per_stage(config.model.num_layers) or [0])[0]
    elements = sum(weight.elements for weight in first_stage_weights(config.model, parallel, layers))
    size = round(elements / MANY_BUCKETS / MILLION) * MILLION
    return size if size and elements < FEW_BUCKETS * default else None


def _fan_forms(model: FANformerConfig, tensor: int) -> list[dict[str, Any]]:
    forms = [(False, "column"), (True, "column"), (True, "sequence")]
    forms = forms[: 1 if tensor == 1 else 3 if model.has_fan else 2]
    return [{"sequence_parallel": is_sharded, "fan_form": form} for is_sharded, form in forms]


def recomputations(config: RunConfig) -> list[RunConfig]:
    """Return a layout with recomputation of nothing, parts without a matrix product, the MLP too, and layers.

    A configuration's own `recompute_modules`, if not the default, take the place of the two in the middle.
    """
    parallel, cheap = config.parallel, list[RecomputeModule]()
    # The Engine fuses all norms but the input norm of the `sequence` form.
    has_plain_norm = config.kernels.transformer_impl == "local" or parallel.fan_form == "sequence"
    if has_plain_norm and can_recompute_norms(config.precision):
        cheap.append("layernorm")
    refusals = fan_recompute_problems(config.model, parallel.tensor_model_parallel_size)
    if config.model.has_fan and not any(refusals):
        cheap.append("fan")
    modules = [*filter(None, [cheap]), [*cheap, "mlp"]]
    if parallel.recompute_modules != ParallelConfig().recompute_modules:
        modules = [parallel.recompute_modules]
    choices: list[dict[str, Any]] = [
        {},
        *({"recompute_granularity": "selective", "recompute_modules": names} for names in modules),
        {"recompute_granularity": "full", **LAYER_BY_LAYER},
    ]
    return [dataclasses.replace(config, parallel=dataclasses.replace(parallel, **chosen)) for chosen in choices]


# -- the fastest


@dataclass(frozen=True)
class RejectedClass:
    """Layouts that one rule rejects. (A layout that breaks several is in as many classes.)"""

    count: int
    example: str
    """The name of one of them, as `--layouts` reads it; of those that do not fit, the one that needs least."""
    message: str
    """The example's message, also by `train`: the values, the rule, and the nearest legal value."""


@dataclass(frozen=True, kw_only=True)
class Findings:
    """The layouts that were judged."""

    candidates: tuple[Estimate, ...]
    """Those that fit first, then by speed; of a search the ten fastest that fit, or the one that lacks least."""
    judged: int
    legal: int
    rejected: tuple[RejectedClass, ...]
    """The largest class first. A search counts a layout that does not fit only if it would be faster than the last
    candidate."""

    @property
    def best(self) -> Estimate | None:
        """Return the fastest that fits."""
        return next((candidate for candidate in self.candidates if candidate.fits), None)


def judge(named: Sequence[tuple[str, RunConfig]], gpus: int, machine: Machine) -> Findings:
    """Judge layouts that a user names, each with the configuration that is laid out so."""
    rejections, estimates = list[tuple[str, str]](), list[Estimate]()
    for name, config in named:
        if broken := problems(config, gpus):
            rejections += [(message, name) for message in broken]
        else:
            estimates.append(estimate(name, config, gpus, machine))
    by_size = sorted(estimates, key=lambda estimated: estimated.needed_bytes)
    rejections += [(estimated.shortage, estimated.name) for estimated in by_size if not estimated.fits]
    return Findings(
        candidates=tuple(sorted(estimates, key=lambda estimated: (not estimated.fits, estimated.time.seconds))),
        judged=len(named),
        legal=len(estimates),
        rejected=tuple(_classes(rejections, str)),
    )


def search(config: RunConfig, gpus: int, machine: Machine) -> Findings:
    """Search all layouts of a configuration on that many GPUs, each with the least recomputation with which it fits.

    Layouts are taken in the order of their time without recomputation, so that the memory of few needs to be known
    before the fastest that fit are.
    """
    rejections, legal, judged = list[tuple[str, RunConfig]](), list[RunConfig](), 0
    for micro_batches in all_layouts(config, gpus):
        judged += len(micro_batches)
        parallel = micro_batches[0].parallel
        layout_problems = [*parallel.problems(), *problems_of_layout(micro_batches[0])]
        for layout in micro_batches:
            if broken := layout_problems + layout.problems_of_steps(parallel.data_parallel_size or 1):
                rejections += [(message, layout) for message in broken]
            else:
                legal.append(layout)
    times = [step_time(job_of(layout, gpus), machine).seconds for layout in legal]
    fitting, too_large = list[Estimate](), list[Estimate]()
    for seconds, layout in sorted(zip(times, legal, strict=True), key=itemgetter(0)):
        if len(fitting) == MOST_SHOWN and seconds > fitting[-1].time.seconds:
            break
        for candidate in recomputations(layout):
            estimated = estimate(layout_name(candidate, config), candidate, gpus, machine)
            if estimated.fits:
                break
        (fitting if estimated.fits else too_large).append(estimated)
        fitting = sorted(fitting, key=lambda estimated: estimated.time.seconds)[:MOST_SHOWN]
    rejected = _classes(rejections, partial(layout_name, base=config))
    least = min(too_large, key=lambda estimated: estimated.needed_bytes, default=None)
    if least:
        rejected.append(RejectedClass(len(too_large), least.name, least.shortage))
    return Findings(
        candidates=tuple(fitting or filter(None, [least])),
        judged=judged,
        legal=len(legal),
        rejected=tuple(sorted(rejected, key=lambda rejected: -rejected.count)),
    )


def _classes(rejections: Iterable[tuple[str, Example]], name: Callable[[Example], str]) -> list[RejectedClass]:
    counts, first = Counter[str](), dict[str, tuple[Example, str]]()
    for message, example in rejections:
        rule = NUMBERS.sub("N", message)
        counts[rule] += 1
        first.setdefault(rule, (example, message))
    return [
        RejectedClass(count, name(example), message)
        for rule, count in counts.most_common()
        for example, message in [first[rule]]
    ]
