"""Runs `megatron-fanformer plan`: reads the request, judges or searches, simulates, prints, writes.

torch is not imported, unless ranks are simulated.
"""

import json
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from megatron_fanformer.durable_files import file_problems, write_atomically
from megatron_fanformer.errors import DivergenceError, InputError
from megatron_fanformer.plan.candidates import laid_out, layout_name
from megatron_fanformer.plan.estimate import check_formats, for_machine
from megatron_fanformer.plan.machines import known_machines, load_machine
from megatron_fanformer.plan.report import PlanRequest, as_values, layout_file, plan_lines
from megatron_fanformer.plan.search import Findings, judge, search
from megatron_fanformer.plan.verb import ALL_STAGES, PlanOptions
from megatron_fanformer.terminal import phases, show
from megatron_fanformer.train.config import RunConfig, load_config
from megatron_fanformer.train.preflight import with_steps, with_train_iters

if TYPE_CHECKING:  # imports torch, which takes seconds
    from megatron_fanformer.plan.rank import SimulatedRank


def plan(options: PlanOptions) -> None:
    """Plan a run as requested, and write the report.

    Raises:
        InputError: the request is wrong, or nothing legal fits.
        DivergenceError: a simulated rank and the formulas disagree.
    """
    if found := file_problems(report=options.report, write=options.write):
        raise InputError("\n".join(found))
    if options.write is not None and options.write.exists():
        raise InputError(f"--write {options.write} already exists; name another file, or remove it")
    request = read_request(options)
    if request.named:
        findings = judge(request.named, options.gpus, request.machine)
    else:
        findings = search(request.config, options.gpus, request.machine)
    simulated = _simulated(findings, request)
    if findings.candidates:
        show(plan_lines(request, findings, simulated))
        if options.report is not None:
            values = as_values(request, findings, simulated)
            write_atomically(options.report, json.dumps(values, indent=1) + "\n")
    if findings.best is None:
        raise InputError("\n".join(_nothing_fits(findings, request)))
    if differences := [line for rank in simulated for line in rank.differences()]:
        raise DivergenceError("\n".join(f"simulation and formula disagree: {line}" for line in differences))
    if options.write is not None:
        write_atomically(options.write, "\n".join(layout_file(request, findings.best)) + "\n")


def read_request(options: PlanOptions) -> PlanRequest:
    """Read the configuration, the machine and the layouts.

    Raises:
        InputError: something of it is wrong; every problem, one line each.
    """
    found: list[str] = []
    try:
        machine = load_machine(options.gpu)
    except InputError as error:
        found.append(str(error))
    config = load_config(options.config, options.overrides)
    found += config.section_problems(leaving=("data", "parallel"))
    if not found:
        config = _of_known_length(config, options.tokens)
    named: list[tuple[str, RunConfig]] = []
    for text in options.layouts:
        try:
            named.append((text, laid_out(config, text)))
        except InputError as error:
            found.append(str(error))
    if found := [*found, *_simulation_problems(options.simulate, options.gpus)]:
        raise InputError("\n".join(found))
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
        named=tuple((name, for_machine(laid, machine, on_cpu=on_cpu)) for name, laid in named),
        tokens=options.tokens or config.training.steps * config.batch_tokens,
    )


def _simulation_problems(ranks: Sequence[int | str], gpus: int) -> Iterator[str]:
    if ALL_STAGES in ranks and len(ranks) > 1:
        yield f"--simulate names ranks beside {ALL_STAGES}, which is one of every stage; give one of the two"
    for rank in ranks:
        if isinstance(rank, int) and rank >= gpus:
            yield f"--simulate {rank}: a world of {gpus} has the ranks 0 to {gpus - 1}; choose one of them"


def _of_known_length(config: RunConfig, tokens: int | None) -> RunConfig:
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


def _simulated(findings: Findings, request: PlanRequest) -> "list[SimulatedRank]":
    ranks, best = request.options.simulate, findings.best
    if not ranks or best is None:
        return []
    from megatron_fanformer.plan.ranks import simulate

    with phases(f"simulating {best.name}"):
        return list(simulate(best.config, best.job, [rank for rank in ranks if isinstance(rank, int)]))


def _nothing_fits(findings: Findings, request: PlanRequest) -> Iterator[str]:
    """Yield one line a named layout, and a search's largest class; of those that are legal, what the smallest lacks."""
    if request.named:
        yield from (f"layout {rejected.example!r}: {rejected.message}" for rejected in findings.rejected)
        return
    nearest = findings.candidates[0].shortage if findings.candidates else findings.rejected[0].message
    legal = f"{findings.legal:,} legal ones of " if findings.legal else ""
    yield f"none of {legal}{findings.judged:,} layouts {'fits' if findings.legal else 'is legal'}: {nearest}"
