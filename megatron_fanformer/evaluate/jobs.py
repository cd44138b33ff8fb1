"""Checkpoints to evaluate: find and check all of them without reading weights, then build and score each."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from megatron_fanformer import __version__
from megatron_fanformer.checkpoint import run_folder
from megatron_fanformer.data.tokenizer import load_tokenizer, tokenizer_file
from megatron_fanformer.durable_files import sha256_of
from megatron_fanformer.errors import DivergenceError, InputError, collect_problems
from megatron_fanformer.evaluate import generation_tasks
from megatron_fanformer.evaluate.config import EvaluationRequest
from megatron_fanformer.evaluate.prepare import CONTEXT_LENGTH, cached_requests
from megatron_fanformer.evaluate.requests import RequestFile, read_requests
from megatron_fanformer.evaluate.results import Result, Settings
from megatron_fanformer.evaluate.scoring import choice_result, group_perplexities, perplexity_of_sets, scores_of_tasks
from megatron_fanformer.evaluate.survey import EvaluationSurvey, survey_evaluation
from megatron_fanformer.evaluate.tasks import ULOGIC
from megatron_fanformer.generate.models import ModelSource, TrainedModel, find_model
from megatron_fanformer.model.build import build_stages
from megatron_fanformer.model.config import torch_dtype
from megatron_fanformer.model.layout_rules import layout_problems
from megatron_fanformer.runtime.parallel import RankGrid
from megatron_fanformer.runtime.seeding import seed_everything
from megatron_fanformer.terminal import Report

VERSIONED = ("torch", "megatron-core", "numpy")


@dataclass(kw_only=True)
class EvaluationJob:
    """One checkpoint with its tasks and perplexity sets."""

    source: ModelSource
    tokenizer: Path | None
    tokenizer_sha256: str | None
    survey: EvaluationSurvey


@dataclass(frozen=True, kw_only=True)
class Jobs:
    """All jobs of a command."""

    jobs: list[EvaluationJob]
    """One job per checkpoint, in the order of the checkpoints."""
    texts: dict[str, list[dict[str, Any]]]
    """The documents of generation tasks, by task."""
    requests: str | None
    """SHA-256 of the request file."""
    sources: dict[str, str]
    """SHA-256 of the files of the tasks of one's own, by task."""


# -- before weights are read


def find_jobs(request: EvaluationRequest) -> Jobs:
    """Find the models, their tasks and sets, in one process for all ranks; prepare tasks without a request file.

    Raises:
        InputError: a model cannot be laid out so, was trained with another tokenizer, or a set is not of its
            vocabulary; a task is not in the request file, may not be run, or leaves no room for its prompts: every
            problem, one line each.
        CorruptError: a checkpoint's configuration, the request file or token files are damaged.
    """
    problems: list[str] = []
    options = request.options
    jobs: list[EvaluationJob] = []
    for checkpoint in request.checkpoints:
        source = find_model(checkpoint, eod_id=options.eod_id)
        tokenizer = options.tokenizer or source.tokenizer
        problems += layout_problems(source.config, request.layout.parallel)
        if tokenizer is None and (options.tasks or options.requests or options.ulogic):
            problems.append(f"{checkpoint} holds no tokenizer; name the one that it was trained with as --tokenizer")
            continue
        sha256 = None if tokenizer is None else sha256_of(tokenizer_file(tokenizer))
        jobs.append(
            EvaluationJob(source=source, tokenizer=tokenizer, tokenizer_sha256=sha256, survey=EvaluationSurvey())
        )
    file = _request_file(request, jobs) if len(jobs) == len(request.checkpoints) else None
    choices, texts = _tasks(request, file, problems)
    evaluation = replace(request.evaluation, tasks=choices, requests=str(file.path) if file and choices else None)
    surveys: dict[Any, EvaluationSurvey | None] = {}  # checkpoints of a run share one, though each has a tokenizer
    for job in jobs:
        source, config, tokenizer = job.source, job.source.config, job.tokenizer
        key = (config.seq_length, config.vocab_size, source.end_of_text_id, job.tokenizer_sha256)
        if key not in surveys:
            if texts and tokenizer is not None:
                problems += source.tokenizer_problems(load_tokenizer(tokenizer, eod_id=source.end_of_text_id))
                problems += generation_tasks.text_problems(list(texts), options, config.seq_length)
                if file is not None and not choices:  # else the survey checks it
                    collect_problems(problems, partial(file.refuse_other_tokenizer, tokenizer_file(tokenizer)))
            survey = partial(
                survey_evaluation,
                evaluation,
                seq_length=config.seq_length,
                vocab_size=config.vocab_size,
                tokenizer=None if tokenizer is None else str(tokenizer),
                requests=file,
                end_of_text_id=source.end_of_text_id,
            )
            surveys[key] = collect_problems(problems, survey)
        job.survey = surveys[key] or job.survey
    if problems:
        raise InputError("\n".join(dict.fromkeys(problems)))  # checkpoints of a run have the same problems
    versions = file.versions if file else {}
    return Jobs(
        jobs=jobs,
        texts=texts,
        requests=file.sha256 if file else None,
        sources={name: versions[name] for name in choices if name in versions},
    )


def _request_file(request: EvaluationRequest, jobs: Sequence[EvaluationJob]) -> RequestFile | None:
    """Return the request file that is named, or that of the tasks: from the cache, or prepared now.

    It is for the tokenizer and the end of text of all checkpoints: that of --eod-id, or that stated next to the
    weights, or the tokenizer's.

    Raises:
        InputError: they have not the same tokenizer.
    """
    options = request.options
    if options.requests is not None:
        return read_requests(options.requests)
    if not options.tasks:
        return None
    tokenizers = {(job.tokenizer_sha256, job.source.end_of_text_id): job.tokenizer for job in jobs if job.tokenizer}
    ends = {(sha256, load_tokenizer(path, eod_id=end).eod_id): path for (sha256, end), path in tokenizers.items()}
    if len(ends) > 1:
        named = ", ".join(f"{path} with end of text {eod_id}" for (_, eod_id), path in ends.items())
        raise InputError(
            f"the checkpoints have {len(ends)} tokenizers ({named}), requests are of one; evaluate those of each by "
            "itself"
        )
    (((_, eod_id), tokenizer),) = ends.items()
    length = options.context_length or CONTEXT_LENGTH
    return cached_requests(
        tasks=options.tasks, tokenizer=tokenizer, eod_id=eod_id, context_length=length, limit=options.limit
    )


def _tasks(
    request: EvaluationRequest, file: RequestFile | None, problems: list[str]
) -> tuple[list[str], dict[str, list[dict[str, Any]]]]:
    """Return the names of the requested choice tasks, and the documents of the generation tasks."""
    texts: dict[str, list[dict[str, Any]]] = {}
    choices: list[str] = []
    limit = request.evaluation.limit
    if file is not None:
        names = (request.evaluation.tasks if request.options.requests else []) or [*file.tasks, *file.texts]
        texts = {name: file.texts[name][:limit] for name in names if name in file.texts}
        choices = [name for name in names if name not in texts]
    if request.options.ulogic is not None:
        rules = collect_problems(problems, partial(generation_tasks.ulogic_rules, request.options.ulogic))
        texts |= {} if rules is None else {ULOGIC: rules[:limit]}
    if texts and request.layout.world_size > 1:
        problems.append(
            f"{', '.join(texts)}: a model writes its answers in one process; leave them out, or run in one (without "
            "--layout and torchrun)"
        )
    return choices, texts


# -- on the ranks


def evaluate_jobs(request: EvaluationRequest, jobs: Jobs, grid: RankGrid, *, log: Report) -> Iterator[Result]:
    """Yield the result of each job, as soon as it is there, on every rank; each step is a collective call.

    Args:
        log: called with the phase that begins.

    Raises:
        CorruptError: a checkpoint's weights or token files are damaged.
        DivergenceError: a model's numbers are not finite.
    """
    batch_tokens, config = request.options.batch_tokens, request.evaluation.perplexity
    versions = {"megatron_fanformer": __version__} | {name: version(name) for name in VERSIONED}
    for job, stages in _built(request, jobs.jobs, grid, log):
        path = job.source.path
        if job.survey.sets:
            log(f"{path}: perplexity")
        losses = perplexity_of_sets(stages, job.survey.sets, grid, batch_tokens=batch_tokens)
        for name, loss in losses.items():  # the same on every rank
            if not math.isfinite(loss.loss):
                raise DivergenceError(
                    f"set {name}: the loss is {loss.loss}; the model diverged: evaluate an earlier checkpoint"
                )
        if job.survey.tasks:
            log(f"{path}: tasks")
        scores = scores_of_tasks(stages, job.survey.tasks, grid, batch_tokens=batch_tokens, every_metric=True)
        tasks = {
            name: choice_result(task, scores[name], made_of=jobs.sources.get(name))
            for name, task in job.survey.tasks.items()
        }
        if jobs.texts:
            assert job.tokenizer is not None  # find_jobs has seen to it
            model = TrainedModel(stages[0], job.source.config, grid.torch_device)
            tokenizer = load_tokenizer(job.tokenizer, eod_id=job.source.end_of_text_id)
        for name, documents in jobs.texts.items():
            log(phase := f"{path}: {name}")
            tasks[name] = generation_tasks.evaluate(
                model, tokenizer, name, documents, request.options, log=partial(log, phase)
            )
        yield Result(
            checkpoint=str(path),
            step=run_folder.step_of(path),
            versions=versions,
            tokenizer=job.tokenizer_sha256,
            settings=Settings(
                chunking=config.chunking,
                chunk_tokens=config.chunk_tokens or job.source.config.seq_length,
                limit_tokens=config.limit_tokens,
                batch_tokens=batch_tokens,
                dtype=str(_dtype(request, job.source, grid)).removeprefix("torch."),
                sampling=request.options.sampling,
            ),
            requests=jobs.requests,
            tasks=tasks,
            perplexity=losses,
            groups={str(group): mean for group, mean in group_perplexities(losses).items()},
        )


def _built(
    request: EvaluationRequest, jobs: Sequence[EvaluationJob], grid: RankGrid, log: Report
) -> Iterator[tuple[EvaluationJob, list[Any]]]:
    """Yield each job with the stages that hold its weights; models of one shape are built once."""
    seed_everything(0)  # megatron-core builds layers on a GPU from random states that must exist
    shape: tuple[Any, ...] = ()
    stages: list[Any] = []
    for job in jobs:
        log(f"{job.source.path}: weights")
        model, dtype = job.source.config, _dtype(request, job.source, grid)
        if shape != (model, dtype):
            stages.clear()  # before the next ones are made
            shape = (model, dtype)
            parallel, kernels = request.layout.parallel, request.layout.kernels
            stages = build_stages(model, parallel, grid, dtype=dtype, seed=None, kernels=kernels)
        job.source.fill(stages, grid)
        yield job, stages


def _dtype(request: EvaluationRequest, source: ModelSource, grid: RankGrid) -> torch.dtype:
    if request.options.dtype != "auto":
        return torch_dtype(request.options.dtype)
    return source.dtype if grid.device == "cuda" else torch.float32
