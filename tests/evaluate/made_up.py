"""Made-up requests over a small vocabulary."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron_fanformer.evaluate.requests import LENGTHS, TaskRequests, write_requests

SHAPES = {"copa": (2, "acc"), "piqa": (2, "len_norm"), "hellaswag": (4, "len_norm"), "mrpc": (2, "f1")}
"""Choices and metric by task, of the names of four real ones."""
DOCUMENTS = 8


def made_up_requests(
    choices: Sequence[int],
    *,
    metric: str = "acc",
    name: str = "made_up",
    seed: int = 0,
    neutral: bool = True,
    vocab_size: int = 600,
    most_context: int = 8,
) -> TaskRequests:
    """A task whose document i has `choices[i]` choices, of random ids and lengths; piqa has two equal requests."""
    generator = np.random.default_rng(seed)
    n = sum(choices)
    labels = [generator.integers(count) for count in choices]
    contexts = [generator.integers(vocab_size, size=generator.integers(1, most_context + 1)) for _ in choices]
    continuations = [generator.integers(vocab_size, size=generator.integers(1, 6)) for _ in range(n)]
    if name == "piqa":
        continuations[-1] = continuations[-2]
    lengths = {length: generator.integers(2, 30, n).astype(np.int32) for length in LENGTHS}

    def task(contexts: Sequence[np.ndarray], unconditional: TaskRequests | None = None) -> TaskRequests:
        of_requests = [context for context, count in zip(contexts, choices, strict=True) for _ in range(count)]
        rows = [np.concatenate(parts) for parts in zip(of_requests, continuations, strict=True)]
        return TaskRequests(
            name=name,
            metric=metric,
            documents=np.repeat(np.arange(len(choices)), choices).astype(np.int32),
            choices=np.concatenate([np.arange(count) for count in choices]).astype(np.int32),
            labels=np.repeat(labels, choices).astype(np.int32),
            ids=np.concatenate(rows).astype(np.int32),
            offsets=np.cumsum([0, *map(len, rows)]),
            continuation_tokens=np.array([len(ids) for ids in continuations], np.int32),
            cut_tokens=np.zeros(n, np.int32),
            lengths=lengths,
            unconditional=unconditional,
        )

    return task(contexts, task([np.array([7, 8, 9])] * len(choices)) if neutral else None)


def rows(requests: TaskRequests) -> list[list[int]]:
    """The ids of each request."""
    return [part.tolist() for part in np.split(requests.ids, requests.offsets[1:-1])]


def made_up_tasks(vocab_size: int, most_tokens: int) -> dict[str, TaskRequests]:
    """Tasks of random ids, 80 requests of all lengths up to that; hellaswag has unconditional requests, too."""
    return {
        name: made_up_requests(
            [choices] * DOCUMENTS,
            metric=metric,
            name=name,
            seed=number,
            neutral=name == "hellaswag",
            vocab_size=vocab_size,
            most_context=most_tokens - 5,
        )
        for number, (name, (choices, metric)) in enumerate(SHAPES.items())
    }


def write_made_up(path: Path, tasks: dict[str, TaskRequests], *, tokenizer_sha256: str, context_length: int) -> str:
    """A request file of them; returns its name."""
    about = {"tokenizer_sha256": tokenizer_sha256, "context_length": context_length, "versions": {}}
    write_requests(path, **about, tasks=tasks, texts={})
    return str(path)
