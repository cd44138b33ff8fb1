"""Survey of a run's evaluation, found and checked by one process for all ranks before anything is loaded."""

import logging
from dataclasses import dataclass, field
from pathlib import Path

from megatron_fanformer.data.fingerprint import another_tokenizer
from megatron_fanformer.data.tokenizer import load_tokenizer, tokenizer_file
from megatron_fanformer.durable_files import sha256_of
from megatron_fanformer.errors import InputError
from megatron_fanformer.evaluate.config import EvaluationConfig
from megatron_fanformer.evaluate.perplexity_sets import PerplexitySet, find_sets
from megatron_fanformer.evaluate.requests import RequestFile, TaskRequests, cut_to_context, read_requests
from megatron_fanformer.evaluate.tasks import resolve

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class EvaluationSurvey:
    """The tasks and sets that a run is evaluated on."""

    tasks: dict[str, TaskRequests] = field(default_factory=dict)
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
    """Find and check all that `config`, which has no problems by itself, names.

    Args:
        seq_length: of the model: requests that are longer are cut, as ai2-olmo-eval cuts them.
        vocab_size: of the model.
        tokenizer: that the run's tokens were made with.
        requests: the file that `config` names, where it has been read; None: it is read here.
        end_of_text_id: what the model states to end a document, for sets of which nothing else says it.

    Raises:
        InputError: every problem, one line each.
        CorruptError: a file is damaged.
    """
    problems: list[str] = []
    tasks: dict[str, TaskRequests] = {}
    sets: list[PerplexitySet] = []
    if config.requests is not None:
        try:
            file = requests or read_requests(Path(config.requests))
            tasks = _tasks(config, file, seq_length=seq_length, vocab_size=vocab_size, tokenizer=tokenizer)
        except InputError as error:
            problems += [f"evaluation.requests: {line}" for line in str(error).splitlines()]
    if not config.perplexity.is_empty:
        end = config.perplexity.eod_id
        try:
            sets = find_sets(
                config.perplexity,
                seq_length=seq_length,
                vocab_size=vocab_size,
                end_of_text_id=end_of_text_id,
                # which need not say what ends a document: sets that need it ask
                tokenizer=None if tokenizer is None else load_tokenizer(tokenizer, eod_id=end, needs_eod=False),
            )
        except InputError as error:
            problems += str(error).splitlines()
    if problems:
        raise InputError("\n".join(problems))
    for of_set in sets if tokenizer is not None else ():
        stated = (manifest[0].tokenizer.sha256 for file in of_set.files if (manifest := file.stated) is not None)
        if other := another_tokenizer(stated, sha256_of(tokenizer_file(str(tokenizer))), "the model's"):
            logger.warning(
                "perplexity set %s was made with %s; unless both give the same ids, its perplexity says nothing",
                of_set.name,
                other,
            )
    return EvaluationSurvey(tasks=tasks, sets=tuple(sets))


def _tasks(
    config: EvaluationConfig, requests: RequestFile, *, seq_length: int, vocab_size: int, tokenizer: str | None
) -> dict[str, TaskRequests]:
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
        largest = max(
            int(requests_of.ids.max()) for requests_of in (task, task.unconditional) if requests_of is not None
        )
        if largest >= vocab_size:
            raise InputError(
                f"task {name} has token id {largest}, beyond model.vocab_size {vocab_size}; raise the latter"
            )
        if task.cut:
            logger.info("task %s: the contexts of %d requests are cut, to %d tokens", name, task.cut, seq_length)
    return tasks
