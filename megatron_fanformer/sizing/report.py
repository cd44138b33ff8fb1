"""Reports of a plan: lines for the terminal, plain values for a file, and a picture."""

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from megatron_fanformer import __version__
from megatron_fanformer.pictures import drawn, use_many_colours
from megatron_fanformer.planning.communication import communication
from megatron_fanformer.planning.machines import DRIVERS_SHARE
from megatron_fanformer.planning.memory import RankMemory
from megatron_fanformer.sizing.candidates import layout_lines
from megatron_fanformer.sizing.estimate import GIB, Cost, Estimate
from megatron_fanformer.sizing.request import PlanRequest
from megatron_fanformer.sizing.search import Findings
from megatron_fanformer.sizing.simulated import SimulatedStage
from megatron_fanformer.terminal import Row, plural, table

MOST_STAGES = 4  # columns; the file has all
LAYERS = {"local": "the local layers", "transformer_engine": "Transformer Engine's layers"}
GROUPS = {"tp": "tensor parallel", "cp": "context parallel", "pp": "pipeline", "dp_cp": "replicas"}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The answer to a request."""

    request: PlanRequest
    findings: Findings
    cost: Cost | None
    """Cost of the first candidate; None without one."""
    storage: dict[str, int] | None
    """Its checkpoints; None without one."""
    goodput: dict[str, float] | None
    """The share of its time that trains; None without a rate of saves."""
    simulated: tuple[SimulatedStage, ...] = ()
    """Simulated ranks of the first candidate."""

    @property
    def shown(self) -> Estimate | None:
        """Return the layout that the details are of: the fastest that fits, or the first that does not."""
        return self.findings.candidates[0] if self.findings.candidates else None


def assumptions(plan: Plan) -> list[str]:
    """List what the figures depend on, one sentence each."""
    request, shown = plan.request, plan.shown
    machine, config = request.machine, request.config
    fp8 = f", products in FP8 ({config.precision.fp8_recipe})" if config.precision.fp8 else ""
    found = [
        "Everything is predicted by formula, not measured.",
        f"{request.gpus:,} chips {machine.name}, {machine.domain_size} in a domain of fast links, "
        f"{machine.node_size or machine.domain_size} a node; ranks in the order tensor, context, data, pipeline "
        "parallel.",
        f"Numbers in {config.precision.dtype}{fp8}; communication of gradients and weights overlapped where the "
        "configuration leaves it open.",
        f"A run's time is that of its steps{', unless said otherwise' if plan.goodput else ''}: no evaluations, saves, "
        "restarts or idle nodes.",
    ]
    if shown:
        found.append(
            f"Memory is of {LAYERS[shown.job.layers]}; {shown.reserve_bytes / GIB:.1f} GiB are left to the allocator, "
            f"communicators, the CUDA context and the formula's error, and {DRIVERS_SHARE:.0%} of a chip to its driver."
        )
    if shown and shown.job.has_ring:
        found.append(
            "The lines of communication are those of the local layers, which gather keys and values over context "
            "parallel ranks; the Engine's ring sends them round, with their gradients in backward. The time has "
            "the ring, as its code has it."
        )
    number_format = "fp8" if config.precision.fp8 else config.precision.dtype
    if error := machine.error_in(number_format):
        found.append(
            f"± {error:.0%}: nine of ten steps that a source published of such chips and numbers are within it of the "
            "formula, predicted without any run of that source."
        )
    else:
        found.append(
            f"Nobody has compared steps of {machine.name} in {number_format} with the formula: its error is unknown."
        )
    if not request.named:
        found.append(
            "The search gives stages equally many layers, or such that they take equally long, the head counted as "
            "layers by its FLOPs. It counts what does not fit among the layouts that would be faster than the last "
            "candidate."
        )
    if plan.simulated:
        found.append(
            "Simulated are the local layers, since the Engine's compute on GPUs alone, with few micro batches: its "
            "peak is compared with the formula for local layers."
        )
    return found


# -- for the terminal


def plan_lines(plan: Plan) -> Iterator[str]:
    """Yield the layout's memory, time and cost; the other candidates; what was rejected."""
    request, shown = plan.request, plan.shown
    model = request.config.model

    def titled(title: str, columns: Row, rows: Iterable[Row], align: str) -> Iterator[str]:
        yield from ["", title, *table(columns, rows, align=align)]

    yield (
        f"{request.file.name}: {model.num_parameters:,} parameters; a global batch of "
        f"{request.config.training.global_batch_size:,} samples of {model.seq_length:,} tokens, on {request.gpus:,} x "
        f"{request.machine.name}. Predicted, not measured."
    )
    if shown is not None and plan.cost is not None:
        room = f"{shown.needed_bytes / GIB:.1f} of {request.machine.usable_bytes / GIB:.1f} GiB"
        yield from ["", f"{shown.name}: {'fits' if shown.fits else 'does NOT fit'}, {room}"]
        stages = _shown_stages(shown)
        columns = ["", *(f"stage {stage.stage}" for stage in stages)]
        title = f"memory of a GPU, GiB ({LAYERS[shown.job.layers]})"
        yield from titled(title, columns, _memory_rows(shown, stages), "l" + "r" * len(stages))
        yield from titled("a training step", ["", "seconds", "share"], _time_rows(shown), "lrr")
        yield from ["", _cost_line(shown, plan.cost)]
        if rows := list(_stage_rows(request, plan.cost)):
            columns = ["", "from step", "steps", "tokens", "days", "learning rate"]
            yield from titled("stages of the data", columns, rows, "lrrrrr")
        if notice := request.config.decay_notice():
            yield from ["", notice]
        yield from ["", *table(["beyond the steps", ""], list(_beyond_steps(plan, shown)), align="ll")]
        yield from ["", "the layout, as lines of a configuration", *layout_lines(shown.config, request.config)]
    findings = plan.findings
    if len(findings.candidates) > 1:
        columns = ["layout", "seconds", "MFU", "GiB", ""]
        yield from titled("candidates", columns, map(_candidate_row, findings.candidates), "lrrrl")
    if plan.simulated:
        columns = ["rank", "stage", "peak GiB", "by formula", "calls", "GiB moved", ""]
        title = "simulated ranks (the local layers)"
        yield from titled(title, columns, map(_simulation_row, plan.simulated), "rrrrrrl")
    yield from ["", f"{findings.judged:,} layout{'s' * (findings.judged != 1)} judged, {findings.legal:,} legal."]
    if findings.rejected:
        rows = [(f"{each.count:,}", each.example, each.message) for each in findings.rejected]
        yield from titled("rejected", ["layouts", "of them", "what train says of it"], rows, "rll")
        yield ""
    yield from (f"- {sentence}" for sentence in assumptions(plan))


def _memory_rows(shown: Estimate, stages: list[RankMemory]) -> Iterator[Row]:
    purposes = list(dict.fromkeys(line.purpose for stage in stages for line in stage.lines))
    for purpose in purposes:
        yield purpose, *(_gib(_bytes_of(stage, purpose)) for stage in stages)
    yield "reserve", *(_gib(shown.reserve_bytes) for _ in stages)
    yield "total", *(_gib(stage.total_bytes + shown.reserve_bytes) for stage in stages)


def _shown_stages(shown: Estimate) -> list[RankMemory]:
    if len(shown.stages) <= MOST_STAGES:
        return list(shown.stages)
    numbers = {0, shown.heaviest.stage, len(shown.stages) - 1}
    return [stage for stage in shown.stages if stage.stage in numbers]


def _bytes_of(stage: RankMemory, purpose: str) -> int:
    return sum(line.bytes for line in stage.lines if line.purpose == purpose)


def _gib(count: int) -> str:
    size = count / GIB
    return f"{size:.2f}" if size >= 0.1 or not count else f"{size:.2g}"


def _time_rows(shown: Estimate) -> Iterator[Row]:
    time = shown.time
    for name, seconds in sorted(filter(itemgetter(1), time.parts.items()), key=itemgetter(1), reverse=True):
        yield name, f"{seconds:.3f}", f"{seconds / time.seconds:.1%}"
    yield "total", _with_error(time.seconds, time.relative_error, ".3f"), ""
    for group, seconds in time.exposed.items():
        yield f"exposed communication, {GROUPS.get(group, group)}", f"{seconds:.3f}", f"{seconds / time.seconds:.1%}"


def _with_error(value: float, relative_error: float, form: str) -> str:
    return f"{value:{form}}{f' ± {value * relative_error:{form}}' if relative_error else ''}"


def _cost_line(shown: Estimate, cost: Cost) -> str:
    time, error = shown.time, shown.time.relative_error
    price = "" if cost.price is None else f", price {_with_error(cost.price, error, ',.0f')}"
    return (
        f"model FLOPs utilization {time.model_flops_utilization:.1%}, {time.tokens_per_second:,.0f} tokens a second; "
        f"{cost.tokens:,} tokens: {_with_error(cost.days, error, ',.2f')} days, "
        f"{_with_error(cost.gpu_hours, error, ',.0f')} GPU hours{price}"
    )


def _stage_rows(request: PlanRequest, cost: Cost) -> Iterator[Row]:
    """Yield the length and the learning rates of each stage of `data.stages`, and of the first mix before them."""
    rates = _stage_rates(request)
    for name, (first, last) in _stage_spans(request).items():
        steps = max(0, last + 1 - first)
        tokens = steps * request.config.batch_tokens
        days = f"{cost.days * tokens / cost.tokens:,.2f}"
        of_steps = " to ".join(f"{rate:.3g}" for rate in rates.get(name, ()))
        yield name, f"{first:,}", f"{steps:,}", f"{tokens:,}", days, of_steps


def _stage_spans(request: PlanRequest) -> dict[str, tuple[int, int]]:
    """Return the first and the last step of each, over the tokens of the plan: a shorter run ends within or before a
    stage, a longer one within the last.
    """
    spans = request.config.stage_spans()
    return {
        name: (first, request.steps if name == [*spans][-1] else min(last, request.steps))
        for name, (first, last) in spans.items()
    }


def _stage_rates(request: PlanRequest) -> dict[str, list[float]]:
    """Return the learning rates of the first and the last step of each stage that the run comes to."""
    return {
        name: [request.config.learning_rate(step) for step in span]
        for name, span in _stage_spans(request).items()
        if span[0] <= span[1]
    }


def _beyond_steps(plan: Plan, shown: Estimate) -> Iterator[Row]:
    """Yield checkpoints, saves, failures, and the run's time with them."""
    held, spent, request, cost = plan.storage, plan.goodput, plan.request, plan.cost
    assert held is not None and cost is not None, "what is shown has checkpoints and a cost"
    size, disk = (held[name] / 10**9 for name in ("checkpoint_bytes", "disk_bytes"))
    yield "checkpoint", f"{size:,.1f} GB; {plural(held['saves'], 'save')}, {held['kept']:,} kept: up to {disk:,.1f} GB"
    if spent is None:
        yield "time of saves", "not known: give --save-rate, in GB/s; then failures and goodput are reckoned, too"
        return
    background = " in the background" if shown.config.checkpoint.async_save else ""
    best = f"{spent['best_interval_steps']:,} steps"
    yield "save", f"{spent['save_seconds']:,.1f} s{background}; one every {best} would cost least"
    often = f"a failure in {request.failure_hours:,.6g} hours of a GPU, and {request.restart_minutes:g} min to go on"
    in_all = f"{cost.days / spent['share']:,.2f} days" if spent["share"] else "it never ends"
    yield "goodput", f"{spent['share']:.1%} of the time, with {often}: {in_all} in all"


def _candidate_row(each: Estimate) -> Row:
    time = each.time
    fits = "fits" if each.fits else "too large"
    return (
        each.name,
        f"{time.seconds:.3f}",
        f"{time.model_flops_utilization:.1%}",
        f"{each.needed_bytes / GIB:.1f}",
        fits,
    )


def _simulation_row(each: SimulatedStage) -> Row:
    return (
        str(each.rank),
        str(each.stage),
        _gib(each.peak_bytes),
        f"{_gib(each.formula_peak_bytes)} ({each.formula_peak_bytes / each.peak_bytes - 1:+.1%})",
        f"{each.counted.calls:,}",
        _gib(each.counted.message_bytes),
        "DISAGREES" if each.differences else "as by formula",
    )


# -- for a file


def as_values(plan: Plan) -> dict[str, Any]:
    """Return the whole plan as plain values, for JSON; sizes in bytes, times in seconds."""
    request, shown, findings = plan.request, plan.shown, plan.findings
    model = request.config.model
    return {
        "megatron_fanformer": __version__,
        "config": str(request.file),
        "model": {**dataclasses.asdict(model), "num_parameters": model.num_parameters},
        "machine": {**dataclasses.asdict(request.machine), "gpus": request.gpus},
        "layout": None if shown is None else _layout(shown),
        "memory": None if shown is None else _memory(shown),
        "time": None if shown is None else dataclasses.asdict(shown.time),
        "stages": request.config.stage_steps(),
        "stage_learning_rates": _stage_rates(request),
        "cost": None if plan.cost is None else {**dataclasses.asdict(plan.cost), "gpu_hour_price": request.price},
        "checkpoints": plan.storage,
        "goodput": plan.goodput,
        "communication": None if shown is None else list(_communication(shown)),
        "candidates": [_candidate(each) for each in findings.candidates],
        "judged": findings.judged,
        "legal": findings.legal,
        "rejected": [dataclasses.asdict(each) for each in findings.rejected],
        "simulated": [_simulated(each) for each in plan.simulated],
        "assumptions": assumptions(plan),
    }


def layout_file(plan: Plan) -> Iterator[str]:
    """Yield the lines of a file with the shown layout, to be pasted into a configuration."""
    request, shown = plan.request, plan.shown
    assert shown is not None, "only what fits is written"
    yield (
        f"# plan: {shown.name} on {request.gpus:,} x {request.machine.name}; predicted {shown.time.seconds:.3f} s a "
        f"step, {shown.needed_bytes / GIB:.1f} of {request.machine.usable_bytes / GIB:.1f} GiB"
    )
    yield "# parallel takes the place of the whole section; the other lines, of those of their names."
    yield from layout_lines(shown.config, request.config)


def _layout(shown: Estimate) -> dict[str, Any]:
    job = shown.job
    return {
        "name": shown.name,
        "fits": shown.fits,
        "parallel": {**dataclasses.asdict(job.parallel), "data_parallel_size": job.data_parallel_size},
        "micro_batch_size": job.micro_batch_size,
        "num_micro_batches": job.num_micro_batches,
        "layers": job.layers,
        "precision": dataclasses.asdict(job.precision),
    }


def _memory(shown: Estimate) -> dict[str, Any]:
    return {
        "layers": shown.job.layers,
        "of_a_gpu": shown.machine.memory_bytes,
        "usable": shown.machine.usable_bytes,
        "needed": shown.needed_bytes,
        "reserve": shown.reserve_bytes,
        "stages": [
            {
                "stage": stage.stage,
                "total": stage.total_bytes,
                "lines": {line.purpose: line.bytes for line in stage.lines},
            }
            for stage in shown.stages
        ],
    }


def _communication(shown: Estimate) -> Iterator[dict[str, Any]]:
    """Return what one rank of each stage communicates in a step, as the local layers do."""
    for stage in range(len(shown.stages)):
        for line in communication(shown.job, stage):
            yield {"stage": stage, **dataclasses.asdict(line)}


def _candidate(each: Estimate) -> dict[str, Any]:
    return {
        "layout": each.name,
        "fits": each.fits,
        "memory": each.needed_bytes,
        "seconds": each.time.seconds,
        "model_flops_utilization": each.time.model_flops_utilization,
        "tokens_per_second": each.time.tokens_per_second,
    }


def _simulated(each: SimulatedStage) -> dict[str, Any]:
    values = dataclasses.asdict(each)
    return {**values, "counted": each.counted._asdict(), "formula": each.formula._asdict(), "layers": "local"}


# -- the picture


def plan_picture(shown: Estimate) -> bytes:
    """Return a layout's memory and time, as a PNG."""

    def draw(panels: Any) -> None:
        memory, time = panels[0]
        _draw_memory(shown, memory)
        _draw_time(shown, time)

    title = f"{shown.name} on {shown.job.world_size:,} x {shown.machine.name}: predicted, not measured"
    return drawn(draw, columns=2, widths=(3, 2), title=title)


def _draw_memory(shown: Estimate, axes: Any) -> None:
    stages = [stage.stage for stage in shown.stages]
    purposes = list(dict.fromkeys(line.purpose for stage in shown.stages for line in stage.lines))
    use_many_colours(axes)
    bottom = [0.0] * len(stages)
    for purpose in [*purposes, "reserve"]:
        held = [shown.reserve_bytes if purpose == "reserve" else _bytes_of(stage, purpose) for stage in shown.stages]
        heights = [size / GIB for size in held]
        colour = {"color": "lightgray"} if purpose == "reserve" else {}
        axes.bar(stages, heights, bottom=bottom, label=purpose, **colour)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.axhline(shown.machine.usable_bytes / GIB, linestyle="--", color="black", label="a GPU's memory")
    axes.set(xlabel="pipeline stage", ylabel="GiB", title="memory of a GPU", xlim=(-0.75, len(stages) - 0.25))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(fontsize="x-small", bbox_to_anchor=(1.01, 1), loc="upper left")


def _draw_time(shown: Estimate, axes: Any) -> None:
    parts = sorted(((seconds, name) for name, seconds in shown.time.parts.items() if seconds))
    bars = axes.barh([name for _, name in parts], [seconds for seconds, _ in parts])
    axes.bar_label(bars, [f" {seconds / shown.time.seconds:.1%}" for seconds, _ in parts], fontsize="small")
    axes.set_xlim(right=1.25 * parts[-1][0])  # room for the label
    error = f" ± {shown.time.relative_error:.0%}" if shown.time.relative_error else ""
    axes.set(xlabel="seconds", title=f"a step: {shown.time.seconds:.3f} s{error}")
