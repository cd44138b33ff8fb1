"""Made-up requests."""

from collections.abc import Sequence

import numpy as np

from megatron_fanformer.evaluation.requests import LENGTHS, TaskRequests

MOST_IDS = 600


def made_up_requests(
    choices: Sequence[int], *, metric: str = "acc", name: str = "made_up", seed: int = 0, neutral: bool = True
) -> TaskRequests:
    """A task whose document i has `choices[i]` choices, of random ids and lengths."""
    generator = np.random.default_rng(seed)
    n = sum(choices)
    labels = [generator.integers(count) for count in choices]
    continuation_tokens = generator.integers(1, 6, n)
    unconditional = None
    if neutral:
        unconditional = made_up_requests(choices, metric=metric, name=name, seed=seed, neutral=False)
    contexts = generator.integers(1, 9, n)
    return TaskRequests(
        name=name,
        metric=metric,
        documents=np.repeat(np.arange(len(choices)), choices).astype(np.int32),
        choices=np.concatenate([np.arange(count) for count in choices]).astype(np.int32),
        labels=np.repeat(labels, choices).astype(np.int32),
        ids=generator.integers(0, MOST_IDS, (contexts + continuation_tokens).sum()).astype(np.int32),
        offsets=np.cumsum([0, *(contexts + continuation_tokens)]),
        continuation_tokens=continuation_tokens.astype(np.int32),
        cut_tokens=np.zeros(n, np.int32),
        lengths={length: generator.integers(2, 30, n).astype(np.int32) for length in LENGTHS},
        unconditional=unconditional,
    )


def rows(requests: TaskRequests) -> list[list[int]]:
    """The ids of each request."""
    return [part.tolist() for part in np.split(requests.ids, requests.offsets[1:-1])]
