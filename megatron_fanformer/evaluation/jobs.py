"""Checkpoints to evaluate: found and checked without reading weights, then built and scored in a layout."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from megatron_fanformer import __version__
from megatron_fanformer.checkpoint import store
from megatron_fanformer.data.tokenizer import load_tokenizer, tokenizer_file
from megatron_fanformer.durable_files import sha256_of
from megatron_fanformer.errors import DivergenceError, InputError, collect_problems
from megatron_fanformer.evaluation import generation_tasks, ulogic
from megatron_fanformer.evaluation.config import EvaluationRequest
from megatron_fanformer.evaluation.generated_texts import GenerationSettings
from megatron_fanformer.evaluation.metrics import DIVISORS, document_sums, task_metrics
from megatron_fanformer.evaluation.perplexity import group_perplexities, perplexity_of_sets
from megatron_fanformer.evaluation.requests import RequestFile, TaskRequests, read_requests
from megatron_fanformer.evaluation.results import Result, SetResult, Settings, TaskResult
from megatron_fanformer.evaluation.scoring import scores_of_tasks
from megatron_fanformer.evaluation.survey import EvaluationSurvey, survey_evaluation
from megatron_fanformer.evaluation.tasks import ULOGIC
from megatron_fanformer.generation.models import ModelSource, TrainedModel, find_model
from megatron_fanformer.model.build import build_stages
from megatron_fanformer.model.dtypes import DTYPES
from megatron_fanformer.model.layout_rules import layout_problems
from megatron_fanformer.runtime.parallel import RankGrid
from megatron_fanformer.runtime.seeding import seed_everything
from megatron_fanformer.terminal import Report

Documents = dict[str, list[dict[str, Any]]]

VERSIONED = ("torch", "megatron-core", "numpy")


@dataclass(frozen=True, kw_only=True)
class EvaluationJob:
    """One checkpoint, and what it is evaluated on."""

    source: ModelSource
    tokenizer: Path | None
    tokenizer_sha256: str | None
    survey: EvaluationSurvey
    """Survey of its choice tasks and perplexity sets."""


@dataclass(frozen=True, kw_only=True)
class Jobs:
    """All jobs of a command."""

    jobs: list[EvaluationJob]
    """One job per checkpoint, in the order of the checkpoints."""
    texts: Documents
    """The documents of generation tasks, by task."""
    requests: str | None
    """SHA-256 of the request file."""
    made_of: dict[str, str]
    """What the tasks of one's own were made of, by task."""


# -- before weights are read


def find_jobs(request: EvaluationRequest) -> Jobs:
    """Find what is evaluated on what, in one process for all ranks.

    Raises:
        InputError: a model cannot be laid out so, was trained with another tokenizer, or a set is not of its
            vocabulary; a task is not in the request file, may not be run, or leaves no room for its prompts: every
            problem, one line each.
        CorruptError: a checkpoint's configuration, the request file or token files are damaged.
    """
    path = request.evaluation.requests
    request_file = None if path is None else read_requests(Path(path))
    found: list[str] = []
    choices, texts = _tasks(request, request_file, found)
    evaluation = replace(request.evaluation, tasks=choices, requests=path if choices else None)
    known: dict[Any, EvaluationSurvey | None] = {}  # checkpoints of a run share one, though each has a tokenizer
    jobs = []
    for checkpoint in request.checkpoints:
        source = find_model(checkpoint, eod_id=request.options.eod_id)
        tokenizer = request.options.tokenizer or source.tokenizer
        found += layout_problems(source.config, request.layout.parallel)
        if (choices or texts) and tokenizer is None:
            found.append(f"{checkpoint} holds no tokenizer; name the one that it was trained with as --tokenizer")
            continue
        digest = None if tokenizer is None else sha256_of(tokenizer_file(tokenizer))
        key = (source.config.seq_length, source.config.vocab_size, source.end_of_text_id, digest)
        if key not in known:
            if texts and tokenizer is not None:
                read = collect_problems(found, partial(load_tokenizer, tokenizer, eod_id=source.end_of_text_id))
                found += source.tokenizer_problems(read) if read is not None else ()
                if list(texts) != [ULOGIC]:  # whose answers have a length of their own
                    found += GenerationSettings(**request.sampling).length_problems(source.config.seq_length)
                    # where choice tasks are requested, too, their survey checks the file against the tokenizer
                    if request_file is not None and not choices:
                        check = partial(request_file.refuse_other_tokenizer, tokenizer_file(tokenizer))
                        collect_problems(found, check)
            survey = partial(
                survey_evaluation,
                evaluation,
                seq_length=source.config.seq_length,
                vocab_size=source.config.vocab_size,
                tokenizer=None if tokenizer is None else str(tokenizer),
                requests=request_file,
                end_of_text_id=source.end_of_text_id,
            )
            known[key] = collect_problems(found, survey)
        if (its := known[key]) is not None:
            jobs.append(EvaluationJob(source=source, tokenizer=tokenizer, tokenizer_sha256=digest, survey=its))
    if found:
        raise InputError("\n".join(dict.fromkeys(found)))  # checkpoints of a run have the same problems
    versions = {} if request_file is None else request_file.versions
    return Jobs(
        jobs=jobs,
        texts=texts,
        requests=None if request_file is None else request_file.sha256,
        made_of={name: versions[name] for name in choices if name in versions},
    )


def _tasks(
    request: EvaluationRequest, request_file: RequestFile | None, problems: list[str]
) -> tuple[list[str], Documents]:
    """Return the names of the requested choice tasks, and the documents of the generation tasks."""
    texts: Documents = {}
    choices: list[str] = []
    limit = request.evaluation.limit
    if request_file is not None:
        names = request.evaluation.tasks or [*request_file.tasks, *request_file.texts]
        texts = {name: request_file.texts[name][:limit] for name in names if name in request_file.texts}
        choices = [name for name in names if name not in texts]
        collect_problems(problems, partial(request_file.selected, choices))
    if request.options.ulogic is not None:
        rules = collect_problems(problems, partial(ulogic.documents, request.options.ulogic))
        texts |= {} if rules is None else {ULOGIC: rules[:limit]}
    if texts and request.layout.world_size > 1:
        problems.append(
            f"{', '.join(texts)}: a model writes its answers in one process; leave them out, or run in one (without "
            "--layout and torchrun)"
        )
    for name in texts:
        collect_problems(problems, partial(generation_tasks.check, name, GenerationSettings(**request.sampling)))
    return [name for name in choices if request_file is not None and name in request_file.tasks], texts


# -- on the ranks


def evaluate_jobs(request: EvaluationRequest, jobs: Jobs, grid: RankGrid, *, log: Report) -> Iterator[Result]:
    """Yield the result of each job, as soon as it is there, on every rank; each step is a collective call.

    Args:
        log: called with what runs now.

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
            name: choice_result(task, *scores[name], made_of=jobs.made_of.get(name))
            for name, task in job.survey.tasks.items()
        }
        if jobs.texts:
            assert job.tokenizer is not None  # find_jobs has seen to it
            model = TrainedModel(stages[0], job.source.config, grid.torch_device)
            tokenizer = load_tokenizer(job.tokenizer, eod_id=job.source.end_of_text_id)
        for name, documents in jobs.texts.items():
            log(phase := f"{path}: {name}")
            sampling = GenerationSettings(**request.sampling)
            written = generation_tasks.evaluate(model, tokenizer, name, documents, sampling, log=partial(log, phase))
            tasks[name] = msgspec.convert({"cut": written.pop("prompts_cut", 0), **written}, TaskResult)
        yield Result(
            checkpoint=str(path),
            step=store.step_of(path),
            versions=versions,
            tokenizer=job.tokenizer_sha256,
            settings=Settings(
                chunking=config.chunking,
                chunk_tokens=config.chunk_tokens or job.source.config.seq_length,
                limit_tokens=config.limit_tokens,
                batch_tokens=batch_tokens,
                dtype=str(_dtype(request, job.source, grid)).removeprefix("torch."),
                sampling=request.sampling,
            ),
            requests=jobs.requests,
            tasks=tasks,
            perplexity={name: msgspec.convert(loss, SetResult, from_attributes=True) for name, loss in losses.items()},
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
        return DTYPES[request.options.dtype]
    return source.dtype if grid.device == "cuda" else torch.float32


def choice_result(
    task: TaskRequests, found: np.ndarray, unconditional: np.ndarray | None = None, *, made_of: str | None = None
) -> TaskResult:
    """Return a task's metrics and documents from the log-probabilities of its requests, and of its unconditional
    ones.
    """
    sums = document_sums(task, found, unconditional)[task.metric]
    divisors = task.lengths[DIVISORS[task.metric]] if task.metric in DIVISORS else task.continuation_tokens
    begins = np.flatnonzero(np.diff(task.documents, prepend=-1))
    rows = zip(begins.tolist(), [*begins[1:].tolist(), len(task)], sums.tolist(), strict=True)
    return TaskResult(
        metric=task.metric,
        metrics=task_metrics(task, found, unconditional),
        documents=[
            {
                "doc_id": int(task.documents[first]),
                "label": int(task.labels[first]),
                "log_probabilities": found[first:end].tolist(),
                **({} if unconditional is None else {"unconditional": unconditional[first:end].tolist()}),
                "lengths": divisors[first:end].tolist(),
                "score": score,
                "weight": weight,
            }
            for first, end, (score, weight) in rows
        ],
        cut=task.cut,
        made_of=made_of,
    )
