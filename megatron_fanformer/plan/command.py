"""The work of `plan`: judge or search layouts, print the fastest and the others, write the report."""

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from megatron_fanformer import __version__
from megatron_fanformer.durable_files import file_problems, write_atomically
from megatron_fanformer.errors import InputError
from megatron_fanformer.plan.communication import communication
from megatron_fanformer.plan.estimate import GIB, Estimate, check_formats, checkpoint_bytes, resolve_for_machine
from megatron_fanformer.plan.machines import DRIVERS_SHARE, Machine, load_machine
from megatron_fanformer.plan.search import Findings, apply_layout, judge, layout_lines, layout_name, search
from megatron_fanformer.plan.verb import PlanOptions
from megatron_fanformer.terminal import Row, plural, show, table
from megatron_fanformer.train.config import RunConfig, load_config
from megatron_fanformer.train.preflight import with_steps, with_train_iters

LAYERS = {"local": "the local layers", "transformer_engine": "Transformer Engine's layers"}


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """A run to plan."""

    options: PlanOptions
    config: RunConfig  # every open field (auto, null) is chosen for `machine`
    machine: Machine
    named: list[tuple[str, RunConfig]]  # name and configuration of each layout to judge; empty: search for layouts
    tokens: int  # the tokens that the whole run trains on


def plan(options: PlanOptions) -> None:
    """Judge the stated layouts or search for the fastest, show the plan, and write the report if one is requested.

    Raises:
        InputError: the request is wrong, or no layout is legal and fits.
    """
    if problems := file_problems(report=options.report):
        raise InputError("\n".join(problems))
    request = read_request(options)
    if request.named:
        findings = judge(request.named, options.gpus, request.machine)
    else:
        findings = search(request.config, options.gpus, request.machine)
    if findings.candidates:
        show(plan_lines(request, findings))
        if options.report is not None:
            write_atomically(options.report, json.dumps(_report(request, findings), indent=1) + "\n")
    if not any(candidate.fits for candidate in findings.candidates):
        raise InputError("\n".join(_nothing_fits(request, findings)))


def read_request(options: PlanOptions) -> PlanRequest:
    """Read the configuration, the machine and the layouts that the options state.

    Raises:
        InputError: the configuration, the machine or a layout is wrong; the message has a line for each problem.
    """
    machine, config = load_machine(options.gpu), load_config(options.config, options.overrides)
    if problems := config.section_problems(exclude=("data", "parallel")):  # data is not read, layouts are judged later
        raise InputError("\n".join(problems))
    config = _state_steps(config, options.tokens)
    named = [(text, resolve_for_machine(apply_layout(config, text), machine)) for text in options.layouts]
    config = resolve_for_machine(config, machine)
    check_formats(config, machine)
    if not named and not options.search:
        named = [(layout_name(config, config), config)]  # the configured layout alone
    tokens = options.tokens or config.training.steps * config.batch_tokens
    return PlanRequest(options=options, config=config, machine=machine, named=named, tokens=tokens)


def _state_steps(config: RunConfig, tokens: int | None) -> RunConfig:
    """Return the configuration with steps for any epochs: as many as the run's `tokens`, or else the epochs, take."""
    if config.training.epochs is None:  # it states steps already, which `tokens` leaves as they are
        return config
    if tokens is not None:  # `--tokens` overrides the epochs, and spares reading the data
        return with_train_iters(config, math.ceil(tokens / config.batch_tokens))
    if not config.data.is_chats:
        raise InputError("training.epochs counts conversations (data.format sft) alone; state training.train_iters")
    return with_steps(config)


def _nothing_fits(request: PlanRequest, findings: Findings) -> Iterator[str]:
    """Yield the message if no layout fits: a line for each reason against named layouts, or one for a whole search."""
    if request.named:
        yield from (f"layout {rejected.example!r}: {rejected.message}" for rejected in findings.rejected)
    elif findings.legal:  # the candidate is the one that needs the least memory
        shortage = findings.candidates[0].shortage
        yield f"none of {findings.legal:,} legal ones of {findings.judged:,} layouts fits: {shortage}"
    else:  # the first class is the rule that rejects the most layouts
        yield f"none of {findings.judged:,} layouts is legal: {findings.rejected[0].message}"


def plan_lines(request: PlanRequest, findings: Findings) -> Iterator[str]:
    """Yield the tables: the first candidate's memory, time and cost; the other candidates; the rejected layouts."""
    config, options, machine, shown = request.config, request.options, request.machine, findings.candidates[0]

    def titled_table(title: str, columns: Row, rows: Iterable[Row], align: str) -> Iterator[str]:
        yield from ["", title, *table(columns, rows, align=align)]

    yield (
        f"{options.config.name}: {config.model.num_parameters:,} parameters; a global batch of "
        f"{config.training.global_batch_size:,} samples of {config.model.seq_length:,} tokens, on {options.gpus:,} x "
        f"{machine.name}. Predicted, not measured."
    )
    needed = f"{shown.needed_bytes / GIB:.1f} of {machine.usable_bytes / GIB:.1f} GiB"
    yield from ["", f"{shown.name}: {'fits' if shown.fits else 'does NOT fit'}, {needed}"]
    numbers = sorted({0, shown.heaviest.stage, len(shown.stages) - 1})  # the first, the heaviest and the last stage
    stages = [shown.stages[number] for number in numbers]
    purposes = dict.fromkeys(purpose for stage in stages for purpose in stage.lines)  # a set in order
    memory = [(purpose, [stage.lines.get(purpose, 0) for stage in stages]) for purpose in purposes]
    memory.append(("reserve", [shown.reserve_bytes] * len(stages)))
    memory.append(("total", [stage.total_bytes + shown.reserve_bytes for stage in stages]))
    rows = [(purpose, *(f"{size / GIB:.2f}" for size in sizes)) for purpose, sizes in memory]
    columns = ["", *(f"stage {stage.stage}" for stage in stages)]
    yield from titled_table("memory of a GPU, GiB", columns, rows, "l" + "r" * len(stages))
    time = shown.time
    parts = sorted(time.parts.items(), key=itemgetter(1), reverse=True)
    rows = [(name, f"{seconds:.3f}", f"{seconds / time.seconds:.1%}") for name, seconds in parts]
    rows.append(("total", f"{time.seconds:.3f}", ""))
    yield from titled_table("a training step", ["", "seconds", "share"], rows, "lrr")
    cost = _cost(request, shown)
    price = f", price {cost['price']:,.0f}" if "price" in cost else ""
    yield from [
        "",
        f"model FLOPs utilization {time.model_flops_utilization:.1%}, {time.tokens_per_second:,.0f} tokens a second; "
        f"{request.tokens:,} tokens: {cost['days']:,.2f} days, {cost['gpu_hours']:,.0f} GPU hours{price}; a "
        f"checkpoint of {cost['checkpoint_bytes'] / 1e9:,.1f} GB",
        "",
        "the layout, as lines of a configuration (parallel in place of the whole section)",
        *layout_lines(shown.config, config),
    ]
    if len(findings.candidates) > 1:
        rows = []
        for candidate in findings.candidates:
            seconds, utilization = f"{candidate.time.seconds:.3f}", f"{candidate.time.model_flops_utilization:.1%}"
            needed, verdict = f"{candidate.needed_bytes / GIB:.1f}", "fits" if candidate.fits else "too large"
            rows.append((candidate.name, seconds, utilization, needed, verdict))
        yield from titled_table("candidates", ["layout", "seconds", "MFU", "GiB", ""], rows, "lrrrl")
    yield from ["", f"{plural(findings.judged, 'layout')} judged, {findings.legal:,} legal."]
    if findings.rejected:
        rows = [(f"{rejected.count:,}", rejected.example, rejected.message) for rejected in findings.rejected]
        yield from titled_table("rejected", ["layouts", "of them", "by train's message"], rows, "rll")
    yield from ["", *(f"- {sentence}" for sentence in _assumptions(request, shown))]


def _assumptions(request: PlanRequest, shown: Estimate) -> Iterator[str]:
    """Yield sentences that state an estimate's assumptions and error."""
    machine, precision = request.machine, request.config.precision
    fp8 = f", products in FP8 ({precision.fp8_recipe})" if precision.fp8 else ""
    yield (
        f"Numbers in {precision.dtype}{fp8}; {machine.domain_size} chips in a domain of fast links; ranks in the order "
        "tensor, context, data, pipeline parallel."
    )
    yield (
        f"Memory is of {LAYERS[shown.job.layers]}; {shown.reserve_bytes / GIB:.1f} GiB are left to the allocator, "
        f"communicators, the CUDA context and the formula's error, and {DRIVERS_SHARE:.0%} of a chip to its driver."
    )
    if error := shown.time.relative_error:
        yield f"± {error:.0%}: nine of ten published runs on such chips, with such numbers, are within it."
    else:
        yield "Nobody has compared steps of such chips and numbers with the formula: its error is unknown."


def _cost(request: PlanRequest, shown: Estimate) -> dict[str, float]:
    """Return the days and GPU hours of the steps, their price (if an hour's is stated), and a checkpoint's bytes."""
    hours = request.tokens / shown.time.tokens_per_second / 3600
    gpu_hours, price = hours * shown.job.world_size, request.options.price
    cost = {"days": hours / 24, "gpu_hours": gpu_hours, "checkpoint_bytes": checkpoint_bytes(shown.job)}
    return cost if price is None else {**cost, "price": price * gpu_hours}


def _report(request: PlanRequest, findings: Findings) -> dict[str, Any]:
    """Return the whole plan as plain values, for JSON; sizes in bytes, times in seconds."""
    shown = findings.candidates[0]
    return {
        "megatron_fanformer": __version__,
        "config": str(request.options.config),
        "gpus": request.options.gpus,
        "machine": dataclasses.asdict(request.machine),
        "tokens": request.tokens,
        "cost": _cost(request, shown),
        "candidates": [
            {
                "layout": candidate.name,
                "parallel": dataclasses.asdict(candidate.job.parallel),
                "micro_batch_size": candidate.job.micro_batch_size,
                "fits": candidate.fits,
                "memory": candidate.needed_bytes,
                "stages": [dataclasses.asdict(stage) for stage in candidate.stages],
                **dataclasses.asdict(candidate.time),
            }
            for candidate in findings.candidates
        ],
        # Of one rank of each stage. The formulas are those of the local layers, whichever layers the run has.
        "communication": [
            {"stage": stage, "ranks": shown.job.group_sizes(stage)[term.group], **term._asdict()}
            for stage in range(shown.job.stages)
            for term in communication(shown.job, stage)
        ],
        "judged": findings.judged,
        "legal": findings.legal,
        "rejected": [dataclasses.asdict(rejected) for rejected in findings.rejected],
    }
