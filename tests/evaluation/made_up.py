"""Requests of made-up tasks over a small vocabulary."""

from pathlib import Path

import numpy as np

from megatron_fanformer.evaluation.requests import LENGTHS, TaskRequests, write_requests

SHAPES = {"copa": (30, 2, "acc"), "piqa": (30, 2, "len_norm"), "hellaswag": (30, 4, "len_norm"), "mrpc": (30, 2, "f1")}
"""Documents, choices and metric by task: 300 requests of the names of four real ones."""


def made_up_tasks(vocab_size: int, most_tokens: int, *, documents: int | None = None) -> dict[str, TaskRequests]:
    """Tasks of random ids, of all lengths; hellaswag has unconditional requests, too, and piqa equal ones."""
    tasks = {
        name: _task(name, metric, vocab_size, most_tokens, documents or count, choices, seed=number)
        for number, (name, (count, choices, metric)) in enumerate(SHAPES.items())
    }
    return tasks


def _task(
    name: str, metric: str, vocab_size: int, most_tokens: int, documents: int, choices: int, *, seed: int
) -> TaskRequests:
    generator = np.random.default_rng(seed)
    contexts, continuations = [], []
    for _ in range(documents):
        context = generator.integers(vocab_size, size=generator.integers(1, most_tokens - 8))
        contexts += [context] * choices
        continuations += [generator.integers(vocab_size, size=generator.integers(1, 9)) for _ in range(choices)]
    if name == "piqa":
        continuations[-1] = continuations[-2]
    lengths = np.array([len(ids) for ids in continuations], dtype=np.int32)

    def requests(contexts: list[np.ndarray], unconditional: TaskRequests | None = None) -> TaskRequests:
        rows = [np.concatenate(parts) for parts in zip(contexts, continuations, strict=True)]
        return TaskRequests(
            name=name,
            metric=metric,
            documents=np.repeat(np.arange(documents, dtype=np.int32), choices),
            choices=np.tile(np.arange(choices, dtype=np.int32), documents),
            labels=np.repeat(generator.integers(choices, size=documents).astype(np.int32), choices),
            ids=np.concatenate(rows).astype(np.int32),
            offsets=np.cumsum([0, *map(len, rows)]),
            continuation_tokens=lengths,
            cut_tokens=np.zeros_like(lengths),
            lengths={kind: 4 * lengths - ("no_space" in kind) for kind in LENGTHS},
            unconditional=unconditional,
        )

    neutral = requests([np.array([7, 8])] * len(contexts)) if name == "hellaswag" else None
    return requests(contexts, neutral)


def write_made_up(path: Path, tasks: dict[str, TaskRequests], *, tokenizer_sha256: str, context_length: int) -> str:
    """A request file of them; returns its name."""
    write_requests(
        path,
        tokenizer_sha256=tokenizer_sha256,
        context_length=context_length,
        versions={},
        tasks=tasks,
        texts={},
    )
    return str(path)
