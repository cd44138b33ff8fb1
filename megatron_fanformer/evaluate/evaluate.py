"""The verb `evaluate`: reads the options, launches or joins ranks, and prints and writes the results."""

import re
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from megatron_fanformer.checkpoint import run_folder
from megatron_fanformer.checkpoint.remote import on_this_machine
from megatron_fanformer.convert.recognition import RUNNABLE, find_checkpoint
from megatron_fanformer.durable_files import file_problems
from megatron_fanformer.errors import InputError, collect_problems
from megatron_fanformer.evaluate.comparison import compare, comparison_lines
from megatron_fanformer.evaluate.config import SETS, EvaluationConfig, EvaluationRequest, PerplexityConfig
from megatron_fanformer.evaluate.prepare import CONTEXT_LENGTH, find_tasks, prepare_requests
from megatron_fanformer.evaluate.results import Result, read_result, result_lines, write_results
from megatron_fanformer.evaluate.survey import set_problems
from megatron_fanformer.evaluate.tasks import OWN, is_question_file, resolve
from megatron_fanformer.evaluate.verb import EvaluateOptions
from megatron_fanformer.model.layouts import Layout, layout_fields, parse_layout
from megatron_fanformer.options import option_name
from megatron_fanformer.processes import ended_by_stop_signals
from megatron_fanformer.runtime import device as devices
from megatron_fanformer.runtime.launch import (
    end_with_launcher,
    launch_ranks,
    read_payload,
    refuse_ranks_without_gpu,
    report_failure,
)
from megatron_fanformer.runtime.layout import RuntimeConfig
from megatron_fanformer.terminal import phases, show

if TYPE_CHECKING:
    from megatron_fanformer.evaluate.jobs import Jobs
    from megatron_fanformer.runtime.parallel import RankGrid


def evaluate(options: EvaluateOptions) -> None:
    """Evaluate checkpoints, compare two results, or write a request file.

    Raises:
        InputError: the input is wrong; the message has all problems that show before weights are read, one line each.
        CorruptError: a checkpoint, a request file or token files are damaged.
    """
    note_on_stop = "before the end; --output has the checkpoints that were done, and the same command starts anew"
    with report_failure(), ended_by_stop_signals(note_on_stop):
        end_with_launcher()
        devices.prepare_libraries()
        if sum(map(bool, (options.checkpoints, options.compare, options.prepare))) > 1:
            raise InputError("CHECKPOINT, --compare and --prepare are three commands; give one of them at a time")
        if options.prepare is not None:
            _prepare(options, options.prepare)
        elif options.compare:
            comparison = compare(*map(read_result, options.compare))
            if options.output is not None:
                write_results(options.output, comparison)
            show(comparison_lines(comparison))
        elif (address := devices.rank_address()) is not None:
            _evaluate_as_rank(options, address)
        else:
            _evaluate_on_new_ranks(read_request(options))


def _evaluate_on_new_ranks(request: EvaluationRequest) -> None:
    jobs = _find_jobs(request)
    options, ranks = request.options, request.layout.world_size
    runtime = RuntimeConfig(device=options.device)
    if ranks > 1:
        remedy = "change it, or start on several nodes with torchrun"
        refuse_ranks_without_gpu(ranks, runtime, origin="--layout", remedy=remedy)
        launch_ranks(ranks, options.command_line, threads=devices.threads_per_rank(ranks), payload=(request, jobs))
        return
    from megatron_fanformer.runtime.parallel import distributed

    with distributed(request.layout.parallel, None, runtime) as grid:  # None: this process is the only rank
        _evaluate_jobs(request, jobs, grid)


def _evaluate_as_rank(options: EvaluateOptions, address: devices.RankAddress) -> None:
    from megatron_fanformer.runtime.agreement import on_main
    from megatron_fanformer.runtime.parallel import process_group, rank_grid

    def find_request_and_jobs() -> "tuple[EvaluationRequest, Jobs]":
        if (launched := read_payload()) is not None:  # from `_evaluate_on_new_ranks`; torchrun gives none
            return cast("tuple[EvaluationRequest, Jobs]", launched)
        request = read_request(options, world_size=address.world_size)
        return request, _find_jobs(request)

    runtime = RuntimeConfig(device=options.device)
    with process_group(runtime, address) as device_kind:
        request, jobs = on_main(find_request_and_jobs)
        with rank_grid(request.layout.parallel, device_kind, runtime) as grid:
            _evaluate_jobs(request, jobs, grid)


def _find_jobs(request: EvaluationRequest) -> "Jobs":
    from megatron_fanformer.runtime import megatron_cpu  # imports torch; errors in the options are reported before

    megatron_cpu.install()
    from megatron_fanformer.evaluate.jobs import find_jobs

    try:
        return find_jobs(request)
    except InputError as error:
        raise InputError(as_options(str(error))) from None


def _evaluate_jobs(request: EvaluationRequest, jobs: "Jobs", grid: "RankGrid") -> None:
    from megatron_fanformer.evaluate.jobs import evaluate_jobs

    results: list[Result] = []
    try:
        with phases("reading") if grid.is_main else nullcontext(lambda *_: None) as log:
            for result in evaluate_jobs(request, jobs, grid, log=log):
                results.append(result)
                if grid.is_main and request.options.output is not None:  # now, since the next checkpoint may fail
                    write_results(request.options.output, results[0] if len(results) == 1 else results)
    finally:
        if grid.is_main and results:
            show(result_lines(results))


def _prepare(options: EvaluateOptions, file: Path) -> None:
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
    print(f"{file}: {file.stat().st_size / 1e6:.1f} MB, SHA-256 {requests.sha256[:12]}…")


# -- options


def read_request(options: EvaluateOptions, *, world_size: int | None = None) -> EvaluationRequest:
    """Return the evaluation that the options request, after checks that need no torch.

    Args:
        world_size: the number of ranks that a launcher started; None if this process is to start the ranks.

    Raises:
        InputError: the options have problems; the message has all of them, one line each.
        CorruptError: the configuration of a checkpoint or an export cannot be read.
    """
    problems = file_problems(output=options.output)
    paths = [path for name in options.checkpoints for path in _expand_checkpoints(name)]
    checkpoints = filter(None, [collect_problems(problems, partial(_find_checkpoint, path)) for path in paths])
    evaluation = _evaluation(options, problems)
    layout = collect_problems(problems, lambda: _resolve_layout(options.layout, world_size))
    if not options.checkpoints:
        problems.append("no checkpoint is named; name a run's folder, a checkpoint or an exported folder")
    elif evaluation.is_empty and not options.tasks:
        problems.append("nothing is asked for; add --tasks TASK, --requests FILE, or --perplexity NAME=PATH")
    if problems or layout is None:
        raise InputError("\n".join(problems))
    return EvaluationRequest(
        options=options, checkpoints=tuple(dict.fromkeys(checkpoints)), evaluation=evaluation, layout=layout
    )


def _expand_checkpoints(name: str) -> list[str]:
    """Return the paths of all checkpoints in a run's folder `checkpoints`; return any other name as it is."""
    path = Path(name)
    names_all = path.name == run_folder.CHECKPOINTS and path.is_dir() and not run_folder.is_checkpoint(path)
    checkpoints = run_folder.complete_checkpoints(path.parent) if names_all else []
    return list(map(str, checkpoints)) or [name]


def _find_checkpoint(path: str) -> Path:
    return find_checkpoint(on_this_machine(path), RUNNABLE)


def _evaluation(options: EvaluateOptions, problems: list[str]) -> EvaluationConfig:
    """Return the tasks and sets that the options name; append the options' problems to `problems`."""
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
        chunk_tokens=options.chunk_tokens,
        limit_tokens=options.limit_tokens,
        npy_dtype=options.npy_dtype,
    )
    evaluation = EvaluationConfig(
        requests=None if options.requests is None else str(options.requests),
        tasks=collect_problems(problems, partial(_task_names, options)) or [],
        limit=options.limit,
        perplexity=perplexity,
    )
    # Without tasks and limit: options, unlike a run's configuration, may set both without a request file.
    field_problems = replace(evaluation, tasks=[], limit=None).problems()
    problems += map(as_options, field_problems or set_problems(perplexity))
    return evaluation


def _task_names(options: EvaluateOptions) -> list[str]:
    """Return the names of the tasks in the request file. Without the file, check that the tasks exist; return none."""
    if options.requests is None:
        find_tasks(options.tasks)
        return []
    if files := [name for name in options.tasks if is_question_file(name)]:
        raise InputError(
            f"--tasks {' '.join(files)} is a file of questions, and --requests is prepared already; leave --requests "
            f"out, or name a task of it as {OWN}{Path(files[0]).stem}"
        )
    return [task.name for task in resolve(options.tasks)]


OPTIONS = {"sets.": "perplexity ", "sets": "perplexity", "groups": "perplexity", "folder": "perplexity_folder"}
"""Fields of `evaluation.perplexity` whose options have other names: `sets.NAME` is `--perplexity NAME`."""
FIELD = re.compile(r"(?<![\w./~-])evaluation\.(?:perplexity\.)?(sets\.|\w+)")  # not within a path


def as_options(text: str) -> str:
    """Replace the names of fields in problems by those of the options that set them: evaluation.limit by --limit."""
    return FIELD.sub(lambda match: option_name(OPTIONS.get(match[1], match[1])), text)


def _resolve_layout(text: str, world_size: int | None) -> Layout:
    """Return the layout that a text describes; if it states no data parallel size, `world_size` ranks decide it."""
    layout = parse_layout(text)
    if world_size is None:
        return layout
    stated = replace(layout.parallel, data_parallel_size=layout_fields(text).get("data_parallel_size"))  # or None
    replicas = stated.resolve_data_parallel_size(world_size)
    return replace(layout, parallel=replace(stated, data_parallel_size=replicas))
