"""`evaluate`: reads its options, launches or joins ranks, and prints and writes the results."""

import glob
import re
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from megatron_fanformer.checkpoint import run_folder
from megatron_fanformer.checkpoint.remote import on_this_machine
from megatron_fanformer.convert.recognition import RUNNABLE, find_checkpoint
from megatron_fanformer.durable_files import file_problems, write_atomically
from megatron_fanformer.errors import InputError, collect_problems
from megatron_fanformer.evaluate.comparison import Comparison, compare, comparison_lines, comparison_values
from megatron_fanformer.evaluate.config import EvaluationConfig, EvaluationRequest, PerplexityConfig
from megatron_fanformer.evaluate.perplexity_sets import SETS, set_problems
from megatron_fanformer.evaluate.results import Result, read_results, result_lines, results_picture, write_results
from megatron_fanformer.evaluate.tasks import OWN, is_own, resolve
from megatron_fanformer.evaluate.verb import MODELS, EvaluateOptions
from megatron_fanformer.model.layouts import Layout, layout_fields, parse_layout
from megatron_fanformer.options import option_name
from megatron_fanformer.processes import ended_by_stop_signals
from megatron_fanformer.runtime import device as devices
from megatron_fanformer.runtime.launch import (
    end_with_launcher,
    launch_ranks,
    read_payload,
    refuse_ranks_without_gpu,
    report_stopped,
)
from megatron_fanformer.runtime.layout import RuntimeConfig
from megatron_fanformer.terminal import phases, print_loading, show

if TYPE_CHECKING:
    from megatron_fanformer.evaluate.jobs import Jobs
    from megatron_fanformer.runtime.parallel import RankGrid


def evaluate(options: EvaluateOptions) -> None:
    """Evaluate checkpoints, compare two results, or write a request file.

    Raises:
        InputError: the input is wrong; every problem that can be found before weights are read, one line each.
        CorruptError: a checkpoint, a request file or token files are damaged.
    """
    outcome = "before the end; --output has the checkpoints that were done, and the same command starts anew"
    with ended_by_stop_signals(report_stopped, outcome=outcome):
        end_with_launcher()
        devices.prepare_libraries()
        _evaluate(options)


def _evaluate(options: EvaluateOptions) -> None:
    address = devices.rank_address()
    if options.prepare is not None:
        if address is not None and address.world_size > 1:
            raise InputError(
                f"--prepare writes a file in one process, and {address.world_size} ranks were started; run it without "
                "torchrun or srun"
            )
        _prepare(options, options.prepare)
    elif address is not None:
        _join(options, address)
    elif (request := read_request(options)).checkpoints:
        _start(request)
    else:
        _print_results(request, [])


def _start(request: EvaluationRequest) -> None:
    first, *others = request.checkpoints
    print_loading(f"{first} and {len(others)} more" if others else str(first))
    jobs = _find_jobs(request)
    options, ranks = request.options, request.layout.world_size
    runtime = RuntimeConfig(device=options.device)
    if ranks > 1:
        remedy = "change it, or start on several nodes with torchrun"
        refuse_ranks_without_gpu(ranks, runtime, origin="--layout", remedy=remedy)
        launch_ranks(ranks, options.command_line, threads=devices.threads_per_rank(ranks), payload=(request, jobs))
        return
    from megatron_fanformer.runtime.parallel import distributed

    with distributed(request.layout.parallel, None, runtime) as grid:
        _run(request, jobs, grid)


def _join(options: EvaluateOptions, address: devices.RankAddress) -> None:
    from megatron_fanformer.runtime.agreement import on_main
    from megatron_fanformer.runtime.launch import report_failure
    from megatron_fanformer.runtime.parallel import process_group, rank_grid

    def find() -> "tuple[EvaluationRequest, Jobs]":
        if (launched := read_payload()) is not None:
            return cast("tuple[EvaluationRequest, Jobs]", launched)
        request = read_request(options, world_size=address.world_size)
        return request, _find_jobs(request)

    runtime = RuntimeConfig(device=options.device)
    with report_failure(), process_group(runtime, address) as kind:
        request, jobs = on_main(find)
        with rank_grid(request.layout.parallel, kind, runtime) as grid:
            _run(request, jobs, grid)


def _find_jobs(request: EvaluationRequest) -> "Jobs":
    from megatron_fanformer.runtime import megatron_cpu  # imports torch: after errors in the input were reported

    megatron_cpu.install()
    from megatron_fanformer.evaluate.jobs import find_jobs

    try:
        return find_jobs(request)
    except InputError as error:
        raise InputError(as_options(str(error))) from None


def _run(request: EvaluationRequest, jobs: "Jobs", grid: "RankGrid") -> None:
    from megatron_fanformer.evaluate.jobs import evaluate_jobs

    results: list[Result] = []
    try:
        with phases("reading") if grid.is_main else nullcontext(lambda *_: None) as log:
            for result in evaluate_jobs(request, jobs, grid, log=log):
                if grid.is_main:
                    results.append(result)
                    _write(request.options, results)  # now: whatever ends the next one
    except Exception:
        if results:
            _print_results(replace(request, compared=()), results)
        raise
    if grid.is_main:
        _print_results(request, results)


# -- options


def read_request(options: EvaluateOptions, *, world_size: int | None = None) -> EvaluationRequest:
    """Return the request that the options state, checked before torch is imported.

    Args:
        world_size: ranks that a launcher started; None where they are yet to be started here.

    Raises:
        InputError: every problem, one line each.
        CorruptError: the configuration of a checkpoint or an export cannot be read.
    """
    problems = [*file_problems(output=options.output, picture=options.picture), *options.problems()]
    compared = [collect_problems(problems, partial(_compared, name)) for name in options.compare]
    to_compare = [model for model in compared if isinstance(model, Path)]
    checkpoints = tuple(dict.fromkeys([*_checkpoints(options.checkpoints, problems), *to_compare]))
    evaluation = _evaluation(options, problems)
    layout = collect_problems(problems, lambda: _layout(options.layout, world_size))
    if checkpoints and evaluation.is_empty and not options.tasks and options.ulogic is None:
        problems.append("nothing is asked for; add --tasks TASK, --requests FILE, or --perplexity NAME=PATH")
    if options.picture is not None and not checkpoints:
        problems.append("--picture draws the results of checkpoints; name some")
    if not (checkpoints or options.compare or problems):
        problems.append("no checkpoint is named; name a run's folder, a checkpoint or an exported folder")
    if problems or layout is None:
        raise InputError("\n".join(problems))
    return EvaluationRequest(
        options=options,
        checkpoints=checkpoints,
        compared=tuple(model for model in compared if model is not None),
        evaluation=evaluation,
        layout=layout,
    )


def _checkpoints(names: Sequence[str], problems: list[str]) -> list[Path]:
    """Return the named checkpoints and exports: all of a run's for the folder of its checkpoints, a glob's matches."""
    paths: list[str] = []
    for name in names:
        path = Path(name)
        if path.name == run_folder.CHECKPOINTS and path.is_dir() and not run_folder.is_checkpoint(path):
            paths += map(str, run_folder.complete_checkpoints(path.parent) or [path])
        elif glob.has_magic(name) and not path.exists():
            paths += sorted(glob.glob(name)) or [name]
        else:
            paths.append(name)
    paths.sort(key=_is_pointer)  # `checkpoints/*` names the pointer to the latest of them, too: not out of turn
    return [checkpoint for path in paths if (checkpoint := collect_problems(problems, partial(_checkpoint, path)))]


def _checkpoint(path: str) -> Path:
    return find_checkpoint(on_this_machine(str(Path(path).parent) if _is_pointer(path) else path), RUNNABLE)


def _is_pointer(name: str) -> bool:
    path = Path(name)
    return path.name == run_folder.LATEST and path.parent.name == run_folder.CHECKPOINTS and path.is_file()


def _compared(name: str) -> Path | Result:
    """Return a file's only result, or the folder of a checkpoint."""
    path = Path(name)
    if not path.is_file() or _is_pointer(name):
        return _checkpoint(name)
    results = read_results(path)
    if len(results) != 1:
        raise InputError(f"{path} holds the results of {len(results)} checkpoints; compare files of one each")
    return results[0]


def _evaluation(options: EvaluateOptions, problems: list[str]) -> EvaluationConfig:
    """Return the tasks and sets to measure; add problems under the names of the options."""
    sets: dict[str, list[str]] = {}
    groups = []
    for item in options.perplexity:
        name, is_named, path = item.partition("=")
        if is_named:
            sets.setdefault(name, []).append(path)
        elif item in SETS:
            groups.append(item)
        else:
            problems.append(f"--perplexity {item} is no group ({', '.join(SETS)}); write NAME=PATH for a set of yours")
    perplexity = PerplexityConfig(
        sets=sets,
        groups=groups,
        folder=options.perplexity_folder,
        chunking=options.chunking,
        chunk_tokens=options.chunk_tokens,
        limit_tokens=options.limit_tokens,
        npy_dtype=options.npy_dtype,
        eod_id=options.eod_id,
    )
    evaluation = EvaluationConfig(
        requests=None if options.requests is None else str(options.requests),
        tasks=collect_problems(problems, partial(_task_names, options)) or [],
        limit=options.limit,
        perplexity=perplexity,
    )
    # a run's configuration may not name generation tasks, nor limit tasks without a request file
    problems += map(as_options, [*replace(evaluation, tasks=[], limit=None).problems(), *set_problems(perplexity)])
    return evaluation


def _task_names(options: EvaluateOptions) -> list[str]:
    """Return the tasks of --tasks by name; where they are to be prepared, once it is known that they can be."""
    if options.requests is None and options.tasks:
        from megatron_fanformer.evaluate.prepare import find_tasks

        return [task.name for task in find_tasks(options.tasks)[0]]
    if files := [name for name in options.tasks if is_own(name)]:
        raise InputError(
            f"--tasks {' '.join(files)} is prepared, and --requests has been; leave that out, or name a task of it as "
            f"{OWN}{Path(files[0]).stem}"
        )
    return [task.name for task in resolve(options.tasks)]


OPTIONS = {"sets.": "perplexity ", "sets": "perplexity", "groups": "perplexity", "folder": "perplexity_folder"}
"""Fields of `evaluation.perplexity` whose options have other names."""
FIELD = re.compile(r"(?<![\w./~-])evaluation\.(?:perplexity\.)?(sets\.|\w+)")  # not within a path


def as_options(text: str) -> str:
    """Return problems with the names of options in place of the fields that they set."""
    return FIELD.sub(lambda match: option_name(OPTIONS.get(match[1], match[1])), text)


def _layout(text: str, world_size: int | None) -> Layout:
    layout = parse_layout(text)
    if world_size is None:
        return layout
    stated = replace(layout.parallel, data_parallel_size=layout_fields(text).get("data_parallel_size"))
    replicas = stated.resolve_data_parallel_size(world_size)
    return replace(layout, parallel=replace(stated, data_parallel_size=replicas))


# -- the output


def _print_results(request: EvaluationRequest, results: list[Result]) -> None:
    """Draw and print the results, then compare two of them; files come first, for nobody may read the output."""
    options, comparison = request.options, None
    try:
        if options.picture is not None:
            write_atomically(options.picture, results_picture(results))
        if request.compared:
            by_path = {result.checkpoint: result for result in results}
            a, b = (by_path[str(model)] if isinstance(model, Path) else model for model in request.compared)
            comparison = compare(a, b, seed=options.seed)
            _write(options, results, comparison)
    finally:
        if results:
            show(result_lines(results))
    if comparison is not None:
        show(comparison_lines(comparison))


def _write(options: EvaluateOptions, results: Sequence[Result], comparison: Comparison | None = None) -> None:
    if options.output is not None:
        write_results(options.output, results, None if comparison is None else comparison_values(comparison))


def _prepare(options: EvaluateOptions, file: Path) -> None:
    """Write a request file."""
    from megatron_fanformer.evaluate.prepare import CONTEXT_LENGTH, prepare_requests, prepared_lines

    if any(getattr(options, name) for name in MODELS):
        raise InputError("--prepare writes a request file and reads no model; leave out checkpoints and --compare")
    if problems := file_problems(prepare=file):
        raise InputError("\n".join(problems))
    if not options.tasks or options.tokenizer is None:
        raise InputError("--prepare needs --tasks and --tokenizer; name the tasks or groups, and the models' tokenizer")
    if file.exists():
        raise InputError(f"{file} already exists; name another file, or remove it")
    requests = prepare_requests(
        file,
        tasks=options.tasks,
        tokenizer=options.tokenizer,
        eod_id=options.eod_id,
        context_length=options.context_length or CONTEXT_LENGTH,
        limit=options.limit,
    )
    show(prepared_lines(requests))
