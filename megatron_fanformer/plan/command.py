"""The work of `plan`: judge or search layouts, simulate ranks (only this imports torch), print and write the report."""

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from megatron_fanformer import __version__
from megatron_fanformer.durable_files import file_problems, write_atomically
from megatron_fanformer.errors import DivergenceError, InputError
from megatron_fanformer.plan.communication import communication
from megatron_fanformer.plan.estimate import GIB, Estimate, check_formats, cost, for_machine, goodput, storage
from megatron_fanformer.plan.machines import DRIVERS_SHARE, Machine, known_machines, load_machine
from megatron_fanformer.plan.memory import RankMemory
from megatron_fanformer.plan.search import Findings, judge, laid_out, layout_lines, layout_name, search
from megatron_fanformer.plan.verb import ALL_STAGES, PlanOptions
from megatron_fanformer.terminal import Row, phases, plural, show, table
from megatron_fanformer.train.config import RunConfig, load_config
from megatron_fanformer.train.preflight import with_steps, with_train_iters

if TYPE_CHECKING:  # imports torch, which takes seconds
    from megatron_fanformer.plan.simulation import SimulatedRank

Simulated = Sequence["SimulatedRank"]
MOST_STAGES = 4  # columns; the file has all
LAYERS = {"local": "the local layers", "transformer_engine": "Transformer Engine's layers"}


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """A run to plan."""

    options: PlanOptions
    config: RunConfig
    """The configuration, with fields left to the machine chosen for the requested one."""
    machine: Machine
    named: tuple[tuple[str, RunConfig], ...]
    """The layouts to judge, by their names; none: search all."""
    tokens: int

    @property
    def steps(self) -> int:
        """Return the steps of a run over its tokens."""
        return math.ceil(self.tokens / self.config.batch_tokens)


def plan(options: PlanOptions) -> None:
    """Plan a run as requested, and write the report.

    Raises:
        InputError: the request is wrong, or nothing legal fits.
        DivergenceError: a simulated rank and the formulas disagree.
    """
    if problems := file_problems(report=options.report, write=options.write):
        raise InputError("\n".join(problems))
    if options.write is not None and options.write.exists():
        raise InputError(f"--write {options.write} already exists; name another file, or remove it")
    request = read_request(options)
    if request.named:
        findings = judge(request.named, options.gpus, request.machine)
    else:
        findings = search(request.config, options.gpus, request.machine)
    simulated = _simulate(findings.best, options.simulate)
    if findings.candidates:
        show(plan_lines(request, findings, simulated))
        if options.report is not None:
            values = _report(request, findings, simulated)
            write_atomically(options.report, json.dumps(values, indent=1) + "\n")
    if findings.best is None:
        raise InputError("\n".join(_nothing_fits(findings, request)))
    if differences := [line for rank in simulated for line in rank.differences()]:
        raise DivergenceError("\n".join(f"simulation and formula disagree: {line}" for line in differences))
    if options.write is not None:
        write_atomically(options.write, "\n".join(_layout_file(request, findings.best)) + "\n")


def read_request(options: PlanOptions) -> PlanRequest:
    """Read the configuration, the machine and the layouts.

    Raises:
        InputError: something of it is wrong; every problem, one line each.
    """
    problems: list[str] = []
    try:
        machine = load_machine(options.gpu)
    except InputError as error:
        problems.append(str(error))
    config = load_config(options.config, options.overrides)
    problems += config.section_problems(leaving=("data", "parallel"))
    if not problems:
        config = _with_length(config, options.tokens)
    named: list[tuple[str, RunConfig]] = []
    for text in options.layouts:
        try:
            named.append((text, laid_out(config, text)))
        except InputError as error:
            problems.append(str(error))
    if ALL_STAGES in options.simulate and len(options.simulate) > 1:
        problems.append(f"--simulate names ranks beside {ALL_STAGES}, which is one of every stage; give one of the two")
    for rank in options.simulate:
        if isinstance(rank, int) and rank >= options.gpus:
            world = f"a world of {options.gpus} has the ranks 0 to {options.gpus - 1}"
            problems.append(f"--simulate {rank}: {world}; choose one of them")
    if problems:
        raise InputError("\n".join(problems))
    # A known machine is a GPU, whatever this one is; a file may also describe the CPUs that a configuration asks for.
    on_cpu = config.runtime.device == "cpu" and machine not in known_machines().values()
    if not named and not options.search:
        named = [(layout_name(config, config), config)]
    config = for_machine(config, machine, on_cpu=on_cpu)
    check_formats(config, machine)
    return PlanRequest(
        options=options,
        config=config,
        machine=machine,
        named=tuple((name, for_machine(layout, machine, on_cpu=on_cpu)) for name, layout in named),
        tokens=options.tokens or config.training.steps * config.batch_tokens,
    )


def _with_length(config: RunConfig, tokens: int | None) -> RunConfig:
    """Add the steps of its epochs, by the conversations' lengths, or by the tokens that `plan` was given."""
    training = config.training
    if training.epochs is None:
        return config
    if tokens is not None:
        return with_train_iters(config, math.ceil(tokens / config.batch_tokens))
    if not config.data.is_chats:
        raise InputError(
            f"training.epochs is {training.epochs}, which counts conversations (data.format sft) alone; state "
            "training.train_iters"
        )
    try:
        return with_steps(config)
    except InputError as error:
        raise InputError(f"{error} (training.epochs is {training.epochs}; or give --tokens)") from None


def _simulate(best: Estimate | None, ranks: Sequence[int | str]) -> "list[SimulatedRank]":
    if not ranks or best is None:
        return []
    from megatron_fanformer.runtime import device, megatron_cpu

    device.hide_gpus()
    device.quieten_libraries()
    megatron_cpu.install()
    from megatron_fanformer.plan.simulation import simulate

    with phases(f"simulating {best.name}"):
        return list(simulate(best.config, best.job, [rank for rank in ranks if isinstance(rank, int)]))


def _nothing_fits(findings: Findings, request: PlanRequest) -> Iterator[str]:
    """Yield a line for each named layout; for a search the largest class, or of legal layouts the smallest's lack."""
    if request.named:
        yield from (f"layout {rejected.example!r}: {rejected.message}" for rejected in findings.rejected)
        return
    nearest = findings.candidates[0].shortage if findings.candidates else findings.rejected[0].message
    legal = f"{findings.legal:,} legal ones of " if findings.legal else ""
    yield f"none of {legal}{findings.judged:,} layouts {'fits' if findings.legal else 'is legal'}: {nearest}"


def _assumptions(request: PlanRequest, shown: Estimate) -> Iterator[str]:
    """Yield the assumptions of the figures, one sentence each."""
    machine, precision = request.machine, request.config.precision
    fp8 = f", products in FP8 ({precision.fp8_recipe})" if precision.fp8 else ""
    yield (
        f"Everything is predicted by formula, not measured: {request.options.gpus:,} chips {machine.name}, "
        f"{machine.domain_size} in a domain of fast links, {machine.node_size or machine.domain_size} a node; ranks in "
        "the order tensor, context, data, pipeline parallel."
    )
    yield (
        f"Numbers in {precision.dtype}{fp8}; communication of gradients and weights overlapped where the configuration "
        "leaves it open."
    )
    yield (
        f"Memory is of {LAYERS[shown.job.layers]}; {shown.reserve_bytes / GIB:.1f} GiB are left to the allocator, "
        f"communicators, the CUDA context and the formula's error, and {DRIVERS_SHARE:.0%} of a chip to its driver."
    )
    number_format = "fp8" if precision.fp8 else precision.dtype
    if error := machine.error_in(number_format):
        yield (
            f"± {error:.0%}: nine of ten steps that a source published of such chips and numbers are within it of the "
            "formula, predicted without any run of that source."
        )
    else:
        yield f"Nobody has compared steps of {machine.name} in {number_format} with the formula: its error is unknown."
    if not request.named:
        yield ("Of layouts that do not fit, the search counts those that would be faster than the last candidate.")


# -- for the terminal


def plan_lines(request: PlanRequest, findings: Findings, simulated: Simulated) -> Iterator[str]:
    """Yield the first candidate's memory, time and cost; the other candidates; the rejected layouts."""
    config, options, shown = request.config, request.options, findings.candidates[0]

    def titled(title: str, columns: Row, rows: Iterable[Row], align: str) -> Iterator[str]:
        yield from ["", title, *table(columns, rows, align=align)]

    yield (
        f"{options.config.name}: {config.model.num_parameters:,} parameters; a global batch of "
        f"{config.training.global_batch_size:,} samples of {config.model.seq_length:,} tokens, on {options.gpus:,} x "
        f"{request.machine.name}. Predicted, not measured."
    )
    room = f"{shown.needed_bytes / GIB:.1f} of {request.machine.usable_bytes / GIB:.1f} GiB"
    yield from ["", f"{shown.name}: {'fits' if shown.fits else 'does NOT fit'}, {room}"]
    numbers = [*range(len(shown.stages))]
    if len(numbers) > MOST_STAGES:
        numbers = sorted({0, shown.heaviest.stage, len(numbers) - 1})
    stages = [shown.stages[number] for number in numbers]
    columns = ["", *(f"stage {stage.stage}" for stage in stages)]
    title = f"memory of a GPU, GiB ({LAYERS[shown.job.layers]})"
    yield from titled(title, columns, _memory_rows(shown, stages), "l" + "r" * len(stages))
    yield from titled("a training step", ["", "seconds", "share"], _time_rows(shown), "lrr")
    yield from ["", _cost_line(request, shown)]
    if rows := list(_stage_rows(request, shown)):
        columns = ["", "from step", "steps", "tokens", "days", "learning rate"]
        yield from titled("stages of the data", columns, rows, "lrrrrr")
    yield from ["", *table(["beyond the steps", ""], list(_beyond_steps(request, shown)), align="ll")]
    yield from ["", "the layout, as lines of a configuration", *layout_lines(shown.config, config)]
    if len(findings.candidates) > 1:
        columns = ["layout", "seconds", "MFU", "GiB", ""]
        yield from titled("candidates", columns, map(_candidate_row, findings.candidates), "lrrrl")
    if simulated:
        columns = ["rank", "stage", "peak GiB", "by formula", "calls", "GiB moved", ""]
        title = "simulated ranks (the local layers)"
        yield from titled(title, columns, map(_simulation_row, simulated), "rrrrrrl")
    yield from ["", f"{plural(findings.judged, 'layout')} judged, {findings.legal:,} legal."]
    if findings.rejected:
        rows = [(f"{rejected.count:,}", rejected.example, rejected.message) for rejected in findings.rejected]
        yield from titled("rejected", ["layouts", "of them", "by train's message"], rows, "rll")
        yield ""
    yield from (f"- {sentence}" for sentence in _assumptions(request, shown))


def _memory_rows(shown: Estimate, stages: list[RankMemory]) -> Iterator[Row]:
    for purpose in dict.fromkeys(purpose for stage in stages for purpose in stage.lines):
        yield purpose, *(_gib(stage.lines.get(purpose, 0)) for stage in stages)
    yield "reserve", *(_gib(shown.reserve_bytes) for _ in stages)
    yield "total", *(_gib(stage.total_bytes + shown.reserve_bytes) for stage in stages)


def _gib(count: int) -> str:
    size = count / GIB
    return f"{size:.2f}" if size >= 0.1 or not count else f"{size:.2g}"


def _time_rows(shown: Estimate) -> Iterator[Row]:
    time = shown.time
    for name, seconds in sorted(filter(itemgetter(1), time.parts.items()), key=itemgetter(1), reverse=True):
        yield name, f"{seconds:.3f}", f"{seconds / time.seconds:.1%}"
    yield "total", _with_error(time.seconds, time.relative_error, ".3f"), ""


def _with_error(value: float, relative_error: float, form: str) -> str:
    return f"{value:{form}}{f' ± {value * relative_error:{form}}' if relative_error else ''}"


def _cost_line(request: PlanRequest, shown: Estimate) -> str:
    time, spent, error = shown.time, cost(shown, request.tokens), shown.time.relative_error
    per_hour = request.options.price
    price = "" if per_hour is None else f", price {_with_error(per_hour * spent['gpu_hours'], error, ',.0f')}"
    return (
        f"model FLOPs utilization {time.model_flops_utilization:.1%}, {time.tokens_per_second:,.0f} tokens a second; "
        f"{request.tokens:,} tokens: {_with_error(spent['days'], error, ',.2f')} days, "
        f"{_with_error(spent['gpu_hours'], error, ',.0f')} GPU hours{price}"
    )


def _stage_rows(request: PlanRequest, shown: Estimate) -> Iterator[Row]:
    """Yield the length and the learning rates of each stage of `data.stages`, and of the first data before them."""
    rates = _stage_rates(request)
    for name, (first, last) in _stage_spans(request).items():
        steps = max(0, last + 1 - first)
        tokens = steps * request.config.batch_tokens
        days = f"{cost(shown, tokens)['days']:,.2f}"
        rate_range = " to ".join(f"{rate:.3g}" for rate in rates.get(name, ()))
        yield name, f"{first:,}", f"{steps:,}", f"{tokens:,}", days, rate_range


def _stage_spans(request: PlanRequest) -> dict[str, tuple[int, int]]:
    """Return the first and the last step of each stage of the data, as far as the tokens of the plan reach."""
    spans = request.config.mix_spans()
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


def _beyond_steps(request: PlanRequest, shown: Estimate) -> Iterator[Row]:
    """Yield checkpoints, saves, failures, and the run's time with them."""
    options = request.options
    stored, spent = storage(shown, request.steps), goodput(shown, request.steps, options)
    size, disk = (stored[name] / 10**9 for name in ("checkpoint_bytes", "disk_bytes"))
    saves = plural(stored["saves"], "save")
    yield "checkpoint", f"{size:,.1f} GB; {saves}, {stored['kept']:,} kept: up to {disk:,.1f} GB"
    if spent is None:
        yield "time of saves", "not known: give --save-rate, in GB/s; then failures and goodput are reckoned, too"
        return
    background = " in the background" if shown.config.checkpoint.async_save else ""
    best = f"{spent['best_interval_steps']:,} steps"
    yield "save", f"{spent['save_seconds']:,.1f} s{background}; one every {best} would cost least"
    often = f"a failure in {options.failure_hours:,.6g} hours of a GPU, and {options.restart_minutes:g} min to go on"
    days = cost(shown, request.tokens)["days"]
    in_all = f"{days / spent['share']:,.2f} days" if spent["share"] else "it never ends"
    yield "goodput", f"{spent['share']:.1%} of the time, with {often}: {in_all} in all"


def _candidate_row(candidate: Estimate) -> Row:
    time = candidate.time
    return (
        candidate.name,
        f"{time.seconds:.3f}",
        f"{time.model_flops_utilization:.1%}",
        f"{candidate.needed_bytes / GIB:.1f}",
        "fits" if candidate.fits else "too large",
    )


def _simulation_row(simulated: "SimulatedRank") -> Row:
    peak, formula = simulated.peak_bytes, simulated.formula_peak_bytes
    return (
        str(simulated.rank),
        str(simulated.stage),
        _gib(peak),
        f"{_gib(formula)} ({formula / peak - 1:+.1%})",
        f"{sum(line.calls for line in simulated.collectives):,}",
        _gib(sum(line.message_bytes for line in simulated.collectives)),
        "DISAGREES" if simulated.differences() else "as by formula",
    )


# -- for a file


def _report(request: PlanRequest, findings: Findings, simulated: Simulated) -> dict[str, Any]:
    """Return the whole plan as plain values, for JSON; sizes in bytes, times in seconds."""
    options, config, shown = request.options, request.config, findings.candidates[0]
    job, spent, price = shown.job, cost(shown, request.tokens), options.price
    return {
        "megatron_fanformer": __version__,
        "config": str(options.config),
        "model": {**dataclasses.asdict(config.model), "num_parameters": config.model.num_parameters},
        "machine": {**dataclasses.asdict(request.machine), "gpus": options.gpus},
        "layout": {
            "name": shown.name,
            "fits": shown.fits,
            "parallel": {**dataclasses.asdict(job.parallel), "data_parallel_size": job.data_parallel_size},
            "micro_batch_size": job.micro_batch_size,
            "num_micro_batches": job.num_micro_batches,
            "layers": job.layers,
            "precision": dataclasses.asdict(job.precision),
        },
        "memory": {
            "of_a_gpu": request.machine.memory_bytes,
            "usable": request.machine.usable_bytes,
            "needed": shown.needed_bytes,
            "reserve": shown.reserve_bytes,
            "stages": [
                {"stage": stage.stage, "total": stage.total_bytes, "lines": stage.lines} for stage in shown.stages
            ],
        },
        "time": dataclasses.asdict(shown.time),
        "stages": config.mix_steps(),
        "stage_learning_rates": _stage_rates(request),
        "cost": {
            "tokens": request.tokens,
            **spent,
            "price": None if price is None else price * spent["gpu_hours"],
            "gpu_hour_price": price,
        },
        "checkpoints": storage(shown, request.steps),
        "goodput": goodput(shown, request.steps, options),
        "communication": [
            {"stage": stage.stage, **dataclasses.asdict(line)}
            for stage in shown.stages
            for line in communication(job, stage.stage)  # of one rank of each stage, as the local layers do
        ],
        "candidates": [
            {
                "layout": candidate.name,
                "fits": candidate.fits,
                "memory": candidate.needed_bytes,
                "seconds": candidate.time.seconds,
                "model_flops_utilization": candidate.time.model_flops_utilization,
                "tokens_per_second": candidate.time.tokens_per_second,
            }
            for candidate in findings.candidates
        ],
        "judged": findings.judged,
        "legal": findings.legal,
        "rejected": [dataclasses.asdict(rejected) for rejected in findings.rejected],
        "simulated": [
            {
                "rank": rank.rank,
                "stage": rank.stage,
                "micro_batches": rank.job.num_micro_batches,
                "peak_bytes": rank.peak_bytes,
                "formula_peak_bytes": rank.formula_peak_bytes,
                "differences": rank.differences(),
            }
            for rank in simulated
        ],
        "assumptions": list(_assumptions(request, shown)),
    }


def _layout_file(request: PlanRequest, shown: Estimate) -> Iterator[str]:
    """Yield the lines of a file with the layout, to be pasted into a configuration."""
    yield (
        f"# plan: {shown.name} on {request.options.gpus:,} x {request.machine.name}; predicted "
        f"{shown.time.seconds:.3f} s a step, {shown.needed_bytes / GIB:.1f} of "
        f"{request.machine.usable_bytes / GIB:.1f} GiB"
    )
    yield "# parallel takes the place of the whole section; the other lines, of those of their names."
    yield from layout_lines(shown.config, request.config)
