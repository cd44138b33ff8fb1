"""Evaluates several checkpoints: finds and checks all without reading weights, then scores one after the other."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
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
from megatron_fanformer.evaluate.prepare import CONTEXT_LENGTH, prepare_requests
from megatron_fanformer.evaluate.requests import RequestFile, read_requests
from megatron_fanformer.evaluate.results import Result, SetResult, Settings
from megatron_fanformer.evaluate.scoring import choice_result, group_perplexities, perplexity_of_sets, scores_of_tasks
from megatron_fanformer.evaluate.survey import EvaluationSurvey, survey_evaluation
from megatron_fanformer.generate.models import ModelSource, TrainedModel, find_model
from megatron_fanformer.model.build import build_stages
from megatron_fanformer.model.config import torch_dtype
from megatron_fanformer.model.layout_rules import layout_problems
from megatron_fanformer.runtime.parallel import RankGrid
from megatron_fanformer.runtime.seeding import seed_everything
from megatron_fanformer.terminal import Report


@dataclass(kw_only=True)
class EvaluationJob:
    """One checkpoint with its tasks and perplexity sets."""

    source: ModelSource
    tokenizer: Path | None
    tokenizer_sha256: str | None
    survey: EvaluationSurvey = field(default_factory=EvaluationSurvey)


@dataclass(frozen=True, kw_only=True)
class Jobs:
    """The jobs of a command, and what all of them share."""

    jobs: list[EvaluationJob]
    """One job per checkpoint, in the order of the checkpoints."""
    texts: dict[str, list[dict[str, Any]]]
    """The documents of generation tasks, by the task's name."""
    requests: str | None
    """SHA-256 of the request file; None if no task was requested."""


# -- before weights are read


def find_jobs(request: EvaluationRequest) -> Jobs:
    """Find the models, tasks and sets, in one process for all ranks; without a request file, prepare the tasks.

    Raises:
        InputError: a model does not fit the layout, the tokenizer of the requests or the vocabulary of a set; or a task
            is missing in the request file, runs programs without permission, or leaves no room for prompts. The message
            has all problems, one line each.
        CorruptError: a checkpoint's configuration, the request file or token files are damaged.
    """
    problems: list[str] = []
    options, evaluation = request.options, request.evaluation
    jobs: list[EvaluationJob] = []
    for checkpoint in request.checkpoints:
        source = find_model(checkpoint, eod_id=options.eod_id)
        tokenizer = options.tokenizer or source.tokenizer
        problems += layout_problems(source.config, request.layout.parallel)
        if tokenizer is None and (options.tasks or options.requests):
            problems.append(f"{checkpoint} holds no tokenizer; name the one that it was trained with as --tokenizer")
        sha256 = None if tokenizer is None else sha256_of(tokenizer_file(tokenizer))
        jobs.append(EvaluationJob(source=source, tokenizer=tokenizer, tokenizer_sha256=sha256))
    if problems:
        raise InputError("\n".join(problems))
    file = _request_file(request, jobs)
    texts: dict[str, list[dict[str, Any]]] = {}
    if file is not None:
        names = evaluation.tasks or [*file.tasks, *file.texts]
        texts = {name: file.texts[name][: options.limit] for name in names if name in file.texts}
        choice_tasks = [name for name in names if name not in texts]
        evaluation = replace(evaluation, tasks=choice_tasks, requests=str(file.path) if choice_tasks else None)
    if texts and request.layout.world_size > 1:
        problems.append(
            f"{', '.join(texts)}: a model writes its answers in one process; leave these tasks out, or run in one "
            "process (without --layout and torchrun)"
        )
    surveys: dict[Any, EvaluationSurvey | None] = {}  # by all that a survey depends on; checkpoints of a run share it
    for job in jobs:
        source, config, tokenizer = job.source, job.source.config, job.tokenizer
        key = (config.seq_length, config.vocab_size, source.end_of_text_id, job.tokenizer_sha256)
        if key not in surveys:
            if texts and file is not None and tokenizer is not None:  # generation tasks, which need both
                encoder = load_tokenizer(tokenizer, eod_id=source.end_of_text_id)
                collect_problems(problems, partial(source.refuse_larger, encoder))
                problems += generation_tasks.text_problems(list(texts), options, config.seq_length)
                if evaluation.requests is None:  # with choice tasks, `survey_evaluation` checks the tokenizer
                    collect_problems(problems, partial(file.refuse_other_tokenizer, tokenizer_file(tokenizer)))
            find_survey = partial(
                survey_evaluation,
                evaluation,
                seq_length=config.seq_length,
                vocab_size=config.vocab_size,
                tokenizer=None if tokenizer is None else str(tokenizer),
                requests=file,
                end_of_text_id=source.end_of_text_id,
            )
            surveys[key] = collect_problems(problems, find_survey)
        job.survey = surveys[key] or job.survey  # None: `problems` has the reasons
    if problems:
        raise InputError("\n".join(dict.fromkeys(problems)))  # each once: checkpoints of a run have the same problems
    return Jobs(jobs=jobs, texts=texts, requests=file.sha256 if file else None)


def _request_file(request: EvaluationRequest, jobs: list[EvaluationJob]) -> RequestFile | None:
    """Return the file of --requests, or else a file prepared for --tasks now or earlier; None without either option.

    Prepared requests need one tokenizer and one end of text for all checkpoints. The end of text is that of --eod-id,
    else the one stated next to the weights, else the tokenizer's.
    """
    options = request.options
    if options.requests is not None:
        return read_requests(options.requests)
    if not options.tasks:
        return None
    stated = {(job.tokenizer_sha256, job.source.end_of_text_id): job.tokenizer for job in jobs if job.tokenizer}
    # The end of text may be stated for one checkpoint and be the tokenizer's for another, and still be the same.
    tokenizers = {(sha256, load_tokenizer(path, eod_id=end).eod_id): path for (sha256, end), path in stated.items()}
    if len(tokenizers) > 1:
        descriptions = ", ".join(f"{path} with end of text {eod_id}" for (_, eod_id), path in tokenizers.items())
        raise InputError(
            f"the checkpoints have {len(tokenizers)} tokenizers ({descriptions}), but requests are made with one; "
            "evaluate the checkpoints of each tokenizer by themselves"
        )
    (((_, eod_id), tokenizer),) = tokenizers.items()  # the only item
    length = options.context_length or CONTEXT_LENGTH
    return prepare_requests(
        None, tasks=options.tasks, tokenizer=tokenizer, eod_id=eod_id, context_length=length, limit=options.limit
    )


# -- on the ranks


def evaluate_jobs(request: EvaluationRequest, jobs: Jobs, grid: RankGrid, *, log: Report) -> Iterator[Result]:
    """Score one checkpoint after the other, and yield each result on every rank; taking one is a collective call.

    Args:
        log: called with the name of each phase when the phase begins.

    Raises:
        CorruptError: a checkpoint's weights or token files are damaged.
        DivergenceError: a model's numbers are not finite.
    """
    options, layout, set_config = request.options, request.layout, request.evaluation.perplexity
    versions = {name: version(name) for name in ("torch", "megatron-core", "numpy")}
    seed_everything(0)  # megatron-core cannot build layers on a GPU before its random states are seeded
    built: tuple[Any, ...] = ()  # the configuration and the type with which `stages` were built
    stages: list[Any] = []
    for job in jobs.jobs:
        source, path = job.source, job.source.path
        log(f"{path}: weights")
        default_dtype = source.dtype if grid.device == "cuda" else torch.float32
        dtype = default_dtype if options.dtype == "auto" else torch_dtype(options.dtype)
        if built != (source.config, dtype):  # checkpoints of one model share the stages
            stages.clear()  # frees their memory before the next stages are built
            built = (source.config, dtype)
            stages = build_stages(source.config, layout.parallel, grid, dtype=dtype, seed=None, kernels=layout.kernels)
        source.read_weights(stages, grid)
        if job.survey.sets:
            log(f"{path}: perplexity")
        set_results = perplexity_of_sets(stages, job.survey.sets, grid, batch_tokens=options.batch_tokens)
        _refuse_not_finite(set_results)
        if job.survey.tasks:
            log(f"{path}: tasks")
        scores = scores_of_tasks(stages, job.survey.tasks, grid, batch_tokens=options.batch_tokens, every_metric=True)
        tasks = {name: choice_result(task, scores[name]) for name, task in job.survey.tasks.items()}
        if jobs.texts:
            assert job.tokenizer is not None  # find_jobs requires one for tasks
            model = TrainedModel(stages[0], source.config, grid.torch_device)
            tokenizer = load_tokenizer(job.tokenizer, eod_id=source.end_of_text_id)
        for name, documents in jobs.texts.items():
            log(phase := f"{path}: {name}")
            tasks[name] = generation_tasks.evaluate(model, tokenizer, name, documents, options, log=partial(log, phase))
        yield Result(
            checkpoint=str(path),
            step=run_folder.step_of(path),
            versions={"megatron_fanformer": __version__, **versions},
            tokenizer=job.tokenizer_sha256,
            settings=Settings(
                chunk_tokens=set_config.chunk_tokens or source.config.seq_length,
                limit_tokens=set_config.limit_tokens,
                batch_tokens=options.batch_tokens,
                dtype=str(dtype).removeprefix("torch."),
                max_new_tokens=options.max_new_tokens,
            ),
            requests=jobs.requests,
            tasks=tasks,
            perplexity=set_results,
            groups={str(group): mean for group, mean in group_perplexities(set_results).items()},
        )


def _refuse_not_finite(results: dict[str, SetResult]) -> None:
    for name, result in results.items():  # the same on all ranks, so that all ranks raise, or none
        if not math.isfinite(result.loss):
            raise DivergenceError(
                f"set {name}: the loss is {result.loss}; the model diverged: evaluate an earlier checkpoint"
            )
