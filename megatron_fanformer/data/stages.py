"""Stages of a run: from a step or a token on, its samples come from another mix of sources (`data.stages`).

Each source goes on from its own place: what one stage has read of it, the next does not read again before its epoch
ends.
"""

import os.path
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_fanformer.data.blends import Blend, Source, Word, blend_problems, parse_blend
from megatron_fanformer.errors import InputError, redacted
from megatron_fanformer.options import count_of

START = re.compile(r"from (?P<unit>step|token) (?P<number>\S+)")
FIRST_STAGE = "train_data"
"""The name of the stage that `data.train_data` is."""


@dataclass(frozen=True)
class Stage:
    """A part of a run whose samples come from one mix."""

    name: str
    """FIRST_STAGE, or as `data.stages` has it."""
    first_step: int
    """The step that it begins with, from 1."""
    first_sample: int
    """The sample that it begins with, from 0."""
    blend: Blend


def first_step(name: str, *, batch_tokens: int) -> int:
    """Return the step that a stage begins with: the one it names, or the first after as many tokens as it names.

    Args:
        name: a key of `data.stages`.
        batch_tokens: tokens of a step's samples.

    Raises:
        InputError: it names neither.
    """
    if (start := START.fullmatch(name)) is None:
        raise InputError(
            f"data.stages: {name!r} does not say where the stage begins; write it as 'from step 9001' or "
            "'from token 3.9T'"
        )
    try:
        number = count_of(start["number"])
    except InputError as error:
        raise InputError(f"data.stages: {name!r} does not say where the stage begins: {error}") from None
    return number if start["unit"] == "step" else -(-number // batch_tokens) + 1


def ordered(first: Blend, later: Mapping[str, Blend], *, global_batch_size: int, seq_length: int) -> list[Stage]:
    """Return the stages of a run in their order.

    Args:
        first: the mix of `data.train_data`.
        later: those of `data.stages`, by their names.

    Raises:
        InputError: a name does not say where its stage begins.
    """
    stages = [Stage(FIRST_STAGE, 1, 0, first)]
    for name, blend in later.items():
        step = first_step(name, batch_tokens=global_batch_size * seq_length)
        stages.append(Stage(name, step, (step - 1) * global_batch_size, blend))
    return sorted(stages, key=lambda stage: stage.first_step)


def with_ends(stages: Sequence[Any], samples: int) -> list[tuple[Any, int]]:
    """Return each stage with the sample that it ends before, of a run of so many."""
    return list(zip(stages, [*(stage.first_sample for stage in stages[1:]), samples], strict=True))


def stage_problems(stages: Mapping[str, Sequence[Word]]) -> list[str]:
    """List the problems of the names and mixes of `data.stages`; token files are not opened."""
    problems = []
    for name, items in stages.items():
        try:
            first_step(name, batch_tokens=1)
        except InputError as error:
            problems.append(str(error))
        problems += blend_problems(f"data.stages.{name}", items)
    return problems


def overlap_problems(mixes: Sequence[Sequence[Word]]) -> list[str]:
    """Return a line for the first file that two sources of a run share: neither could go on where the other is."""
    owners: dict[str, Source] = {}
    for items in mixes:
        sources = parse_blend(items).sources
        if len(set(sources)) < len(sources):
            (twice, _), *_ = Counter(sources).most_common()
            return [f"data.stages: a mix names {twice.name} twice; give it one weight"]
        of_files = [
            (name, source) for source in sources for name in (*map(os.path.realpath, source.files), *source.urls)
        ]
        for file, source in of_files:
            if (owner := owners.setdefault(file, source)) != source:
                return [
                    f"data.stages: {redacted(file)} is in two sources, {owner.name} and {source.name}, so that no "
                    "stage could go on where the other was; name the same files as one source, in the same words, in "
                    "all stages (files without weights are one)"
                ]
    return []


def step_problems(names: Sequence[str], *, train_iters: int, batch_tokens: int) -> list[str]:
    """List the stages that begin where they cannot: with the first step or at once with another, or after the last."""
    problems = []
    begins: dict[int, str] = {1: "data.train_data"}
    for name in names:
        step = first_step(name, batch_tokens=batch_tokens)
        if (other := begins.setdefault(step, name)) != name:
            problems.append(f"data.stages: {name!r} begins with step {step:,}, as {other} does; leave one out")
        elif step > train_iters:
            problems.append(
                f"data.stages: {name!r} begins with step {step:,}, after the last of {train_iters:,}; "
                "leave it out, or raise training.train_iters"
            )
    return problems
