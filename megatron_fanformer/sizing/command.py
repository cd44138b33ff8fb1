"""Runs `megatron-fanformer plan`: judges or searches, simulates, prints, writes."""

import json
from collections.abc import Iterator

from megatron_fanformer.durable_files import file_problems, write_atomically
from megatron_fanformer.errors import DivergenceError, InputError
from megatron_fanformer.processes import usable_cores
from megatron_fanformer.sizing.estimate import cost
from megatron_fanformer.sizing.goodput import goodput, storage
from megatron_fanformer.sizing.report import Plan, as_values, layout_file, plan_lines, plan_picture
from megatron_fanformer.sizing.request import PlanRequest, read_request
from megatron_fanformer.sizing.search import Findings, judge, search
from megatron_fanformer.sizing.simulated import SimulatedStage, simulate_layout
from megatron_fanformer.sizing.verb import PlanOptions
from megatron_fanformer.terminal import phases, show

PICTURE = ".png"


def plan(options: PlanOptions) -> None:
    """Plan a run as requested, and write the report.

    Raises:
        InputError: the request is wrong, or nothing legal fits.
        DivergenceError: a simulated rank and the formulas disagree.
    """
    report = options.report
    if found := file_problems(report=report, write=options.write):
        raise InputError("\n".join(found))
    if options.write is not None and options.write.exists():
        raise InputError(f"--write {options.write} already exists; name another file, or remove it")
    if report is not None and report.suffix == PICTURE:
        raise InputError(f"--report {report} has the name of its picture; name it .json")
    request = read_request(options)
    answer = _answer(request)
    if answer.shown is not None:
        show(plan_lines(answer))
        if report is not None:
            write_atomically(report, json.dumps(as_values(answer), indent=1) + "\n")
            write_atomically(report.with_suffix(PICTURE), plan_picture(answer.shown))
    _check(answer)
    if options.write is not None:
        write_atomically(options.write, "\n".join(layout_file(answer)) + "\n")


def _answer(request: PlanRequest) -> Plan:
    if request.named:
        findings = judge(request.named, request.gpus, request.machine)
    else:
        findings = search(request.config, request.gpus, request.machine)
    shown = findings.candidates[0] if findings.candidates else None
    held = storage(shown, request.steps) if shown else None
    return Plan(
        request=request,
        findings=findings,
        cost=cost(shown, request.tokens, request.price) if shown else None,
        storage=held,
        goodput=goodput(shown, request, held) if shown and held else None,
        simulated=_simulated(findings, request),
    )


def _simulated(findings: Findings, request: PlanRequest) -> tuple[SimulatedStage, ...]:
    if not request.simulated_ranks or findings.best is None:
        return ()
    with phases(f"simulating {findings.best.name}"):
        processes = usable_cores()
        return tuple(simulate_layout(findings.best, request.simulated_ranks, processes=processes))


def _check(answer: Plan) -> None:
    findings = answer.findings
    if findings.best is None:
        raise InputError("\n".join(_nothing_fits(answer)))
    if differences := [line for each in answer.simulated for line in each.differences]:
        raise DivergenceError("\n".join(f"simulation and formula disagree: {line}" for line in differences))


def _nothing_fits(answer: Plan) -> Iterator[str]:
    """Yield one line a named layout, and a search's largest class; of those that are legal, what the smallest lacks."""
    findings, request = answer.findings, answer.request
    if request.named:
        yield from (f"layout {each.example!r}: {each.message}" for each in findings.rejected)
        return
    nearest = answer.shown.shortage if answer.shown else findings.rejected[0].message
    legal = f"{findings.legal:,} legal ones of " if findings.legal else ""
    yield f"none of {legal}{findings.judged:,} layouts {'fits' if findings.legal else 'is legal'}: {nearest}"
