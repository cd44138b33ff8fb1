"""Layouts as text over a configuration, all layouts of some GPUs, and the fastest of them that fit.

A layout names fields of a configuration; other fields keep the configuration's values.
"""

import dataclasses
import itertools
import re
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
NOT_RECOMPUTED: dict[str, Any] = dict.fromkeys(("recompute_granularity", "recompute_method", "recompute_num_layers"))
LAYER_BY_LAYER: dict[str, Any] = {"recompute_method": "uniform", "recompute_num_layers": 1}
MOST_SHOWN = 10
NUMBERS = re.compile(r"\d+(?:\.\d+)?(?:, ?\d+(?:\.\d+)?)*")  # one number, or several with commas between them


# -- layouts as text


def apply_layout(config: RunConfig, text: str) -> RunConfig:
    """Return the configuration in the layout that `text` describes, such as `tp=8,pp=4,mbs=2`.

    Raises:
        InputError: `text` cannot be read.
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
    """Return the text by which `apply_layout` makes `config` from `base`, which must differ from it in layout alone."""
    default, parallel = ParallelConfig(), config.parallel
    # A field that `base` sets to the same value is named, too: readers should see all that departs from the default.
    named = {
        name: value
        for name, value in vars(parallel).items()
        if value != getattr(default, name) or value != getattr(base.parallel, name)
    }
    if parallel.recompute_granularity != "selective":
        named.pop("recompute_modules", None)
    if parallel.recompute_granularity == "full" and named.items() >= LAYER_BY_LAYER.items():  # as `full` alone means
        named = {name: value for name, value in named.items() if name not in LAYER_BY_LAYER}
    return layout_text({**named, MICRO_BATCH: config.training.micro_batch_size})


def layout_lines(config: RunConfig, base: RunConfig) -> list[str]:
    """Return a layout as lines of a configuration: `parallel`, and other fields where they differ from `base`.

    The number of replicas follows from the GPUs, and is left out.
    """
    default = ParallelConfig(data_parallel_size=config.parallel.data_parallel_size)
    parallel = {name: value for name, value in vars(config.parallel).items() if value != getattr(default, name)}
    kernels = {name: value for name, value in vars(config.kernels).items() if value != getattr(base.kernels, name)}
    sections = {"parallel": parallel, "kernels": kernels} if kernels else {"parallel": parallel}
    sections["training"] = {"micro_batch_size": config.training.micro_batch_size}
    return yaml.safe_dump(sections, sort_keys=False).splitlines()


# -- all layouts


def all_layouts(config: RunConfig, gpus: int) -> Iterator[list[RunConfig]]:
    """Yield every layout on `gpus` GPUs, legal or not, as a list of configurations with rising micro batch sizes.

    Stages have equally many layers, and nothing is recomputed. No layout is yielded in two spellings: sequence
    parallelism is tried with several tensor parallel ranks alone, and chunks with several stages alone.
    """
    # Attention within documents needs the exchange of heads.
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
        sizes = [1] if rest or not samples else divisors(samples)  # 1 if none is legal: rejections count the layout
        trainings = [dataclasses.replace(config.training, micro_batch_size=size) for size in sizes]
        layers, layers_left = divmod(config.model.num_layers, pipeline)
        chunk_counts = [None] if pipeline == 1 or layers_left else [None, *divisors(layers)[1:]]  # None stands for one
        for chunks, form in itertools.product(chunk_counts, _fan_forms(config.model, tensor)):
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
            yield [dataclasses.replace(config, parallel=parallel, training=training) for training in trainings]


def _bucket_size(config: RunConfig, parallel: ParallelConfig) -> int | None:
    """Return the configured bucket size, or a size that makes about eight buckets if the default would make too few.

    All buckets but one are communicated beside the computation, and the default size grows with the replicas.
    """
    default = max(LEAST_BUCKET, BUCKET_PER_REPLICA * (parallel.data_parallel_size or 1))
    is_overlapped = config.runtime.device != "cpu" and parallel.overlap_grad_reduce is not False
    if parallel.ddp_bucket_size is not None or default == LEAST_BUCKET or not is_overlapped:
        return parallel.ddp_bucket_size
    layers = (parallel.layers_per_stage(config.model.num_layers) or [0])[0]  # of the first stage
    elements = sum(weight.elements for weight in first_stage_weights(config.model, parallel, layers))
    size = round(elements / MANY_BUCKETS / MILLION) * MILLION
    return size if size and elements < FEW_BUCKETS * default else None


def _fan_forms(model: FANformerConfig, tensor: int) -> list[dict[str, Any]]:
    """Return the values of `sequence_parallel` and `fan_form` to try."""
    forms = [(False, "column")]
    if tensor > 1:
        forms += [(True, "column"), (True, "sequence")] if model.has_fan else [(True, "column")]
    return [{"sequence_parallel": is_sharded, "fan_form": form} for is_sharded, form in forms]


def recomputations(config: RunConfig) -> list[RunConfig]:
    """Return a layout with rising recomputation: of nothing, of parts without a matrix product, of the MLP, too, and of
    whole layers. Configured `recompute_modules`, other than the default, take the place of the second and the third.
    """
    parallel, cheap = config.parallel, list[RecomputeModule]()  # `cheap`: parts without a matrix product
    # The Engine fuses all norms but the input norm of the `sequence` form.
    has_plain_norm = config.kernels.transformer_impl == "local" or parallel.fan_form == "sequence"
    if has_plain_norm and can_recompute_norms(config.precision):
        cheap.append("layernorm")
    refusals = fan_recompute_problems(config.model, parallel.tensor_model_parallel_size)
    if config.model.has_fan and not any(refusals):
        cheap.append("fan")
    modules = [cheap, [*cheap, "mlp"]] if cheap else [["mlp"]]
    if parallel.recompute_modules != ParallelConfig().recompute_modules:
        modules = [parallel.recompute_modules]
    choices: list[dict[str, Any]] = [{}]
    choices += [{"recompute_granularity": "selective", "recompute_modules": names} for names in modules]
    choices.append({"recompute_granularity": "full", **LAYER_BY_LAYER})
    return [dataclasses.replace(config, parallel=dataclasses.replace(parallel, **chosen)) for chosen in choices]


# -- the fastest


@dataclass(frozen=True)
class RejectedClass:
    """Layouts that one rule rejects; a layout that breaks several rules is in several classes."""

    count: int
    example: str  # one of these layouts, as `--layouts` reads it; of layouts that do not fit, the one that needs least
    message: str  # why the example is rejected: `train` refuses an illegal layout by the same message


@dataclass(frozen=True, kw_only=True)
class Findings:
    """The layouts that were judged."""

    # Layouts that fit come first, the fastest before others. A search keeps the ten fastest that fit or, if none does,
    # the one that needs the least memory.
    candidates: tuple[Estimate, ...]
    judged: int  # all layouts
    legal: int  # those that break no rule, whether they fit or not
    # The largest class comes first. Of layouts that do not fit, a search counts only those that it tried: it ends where
    # layouts would be slower than the last candidate.
    rejected: tuple[RejectedClass, ...]


def judge(named: Sequence[tuple[str, RunConfig]], gpus: int, machine: Machine) -> Findings:
    """Judge the layouts that a user named, given as pairs of a name and its configuration."""
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
    """Find the fastest layouts of a configuration on `gpus` GPUs, each with the least recomputation with which it fits.

    Layouts are tried in the order of their time without recomputation: once enough of them fit, and the next one would
    be slower, the search ends, so that the memory of most layouts is never computed.
    """
    rejections, legal, judged = list[tuple[str, RunConfig]](), list[RunConfig](), 0
    for layouts in all_layouts(config, gpus):  # which differ in their micro batch size alone
        judged += len(layouts)
        parallel = layouts[0].parallel
        layout_problems = [*parallel.problems(), *problems_of_layout(layouts[0])]
        for layout in layouts:
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
        if estimated.fits:
            fitting = sorted([*fitting, estimated], key=lambda estimated: estimated.time.seconds)[:MOST_SHOWN]
        else:  # not even with whole layers recomputed
            too_large.append(estimated)
    candidates, rejected = fitting, _classes(rejections, partial(layout_name, base=config))
    if too_large:
        least = min(too_large, key=lambda estimated: estimated.needed_bytes)
        rejected.append(RejectedClass(len(too_large), least.name, least.shortage))
        candidates = fitting or [least]
    return Findings(
        candidates=tuple(candidates),
        judged=judged,
        legal=len(legal),
        rejected=tuple(sorted(rejected, key=lambda rejected: -rejected.count)),
    )


def _classes(rejections: Iterable[tuple[str, Example]], name_of: Callable[[Example], str]) -> list[RejectedClass]:
    """Group rejections, pairs of a message and an example, by their messages without numbers; the largest class first.

    A class has the message of its first example, and the name that `name_of` returns for that example.
    """
    rejections_by_rule: dict[str, list[tuple[str, Example]]] = {}
    for message, example in rejections:
        rejections_by_rule.setdefault(NUMBERS.sub("N", message), []).append((message, example))
    classes = []
    for members in sorted(rejections_by_rule.values(), key=len, reverse=True):
        message, example = members[0]
        classes.append(RejectedClass(len(members), name_of(example), message))
    return classes
