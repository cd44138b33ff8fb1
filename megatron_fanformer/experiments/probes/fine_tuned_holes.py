"""Leave-Square-Out of checkpoints that were fine-tuned on `holes.write_data`'s conversations, as the paper's were.

Each answers all pairs, by the chat template that lies with it, in the token ids that `prepare --chat` makes of them.
An answer is several tokens, the end of text the last. It is the greedy one if each of its tokens is the likeliest
behind those before it; its probability at a temperature is the product of theirs, which the share of it among samples
approaches. (The same digits in other tokens are another answer.)

Shapes: n pairs, b rows of a batch, s tokens, v vocabulary.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_fanformer.data.chat_template import encode_chat, find_template, refuse_spaces_between
from megatron_fanformer.errors import InputError, collect_problems
from megatron_fanformer.experiments.probes import hole_pairs
from megatron_fanformer.experiments.probes.outcome import Log, Measured
from megatron_fanformer.experiments.probes.settings import HolesSettings, Task
from megatron_fanformer.experiments.result import Finding, Table
from megatron_fanformer.generation.models import TrainedModel, find_model_and_tokenizer, load_model
from megatron_fanformer.pictures import drawn

MOST_TOKENS = 2048  # of a batch, whose logits are held whole


class Answers(NamedTuple):
    """A checkpoint's answers to the pairs of a task."""

    pairs: hole_pairs.Pairs
    probability_n: Tensor
    right_n: Tensor

    def scores(self, *, in_hole: bool) -> hole_pairs.Scores:
        """Return the scores of the pairs in the hole, or of those that were trained on."""
        return hole_pairs.scores(self.probability_n, self.right_n, self.pairs.in_hole_n == in_hole)


def measure_checkpoints(settings: HolesSettings, log: Log) -> Measured:
    """Make every checkpoint answer the pairs of every task.

    Raises:
        InputError: one cannot be opened, or has no tokenizer or chat template; all problems, before any answers.
        CorruptError: one is damaged.
        DivergenceError: logits are not finite.
    """
    problems: list[str] = []
    conversations = {name: _formed(name, settings, problems) for name in settings.checkpoints}
    if problems:
        raise InputError("\n".join(problems))
    found: dict[tuple[Task, str], Answers] = {}
    for name, by_task in conversations.items():
        with load_model(Path(name)) as model:
            for task, rows in by_task.items():
                pairs = hole_pairs.all_pairs(task, settings.half_side)
                found[task, name] = answers = Answers(pairs, *answered(model, rows, settings.temperature))
                trained, hole = answers.scores(in_hole=False), answers.scores(in_hole=True)
                log(f"{name}, {task}: {trained.greedy:.1%} outside the hole, {hole.greedy:.1%} in it, greedy")
    return Measured(
        findings=[_finding(name, task, answers, settings) for (task, name), answers in found.items()],
        tables=[_table(found)],
        pictures={f"holes-{task}.png": _picture(settings, task, found) for task in settings.tasks},
    )


# -- the conversations


Row = tuple[np.ndarray, np.ndarray]
"""A conversation's ids, [s], and a mask of its answer, [s]."""


def _formed(name: str, settings: HolesSettings, problems: list[str]) -> dict[Task, list[Row]]:
    """Return the conversations of each task, pair by pair, as the checkpoint was fine-tuned on them."""
    of_this: list[str] = []
    source, tokenizer = find_model_and_tokenizer(name, None, of_this)
    template = None
    if source is not None and tokenizer is not None:
        template = collect_problems(of_this, lambda: find_template(tokenizer.path, eod_id=source.end_of_text_id))
        collect_problems(of_this, lambda: refuse_spaces_between(tokenizer))
    problems += of_this
    if tokenizer is None or template is None or of_this:
        return {}
    conversations = {}
    for task in settings.tasks:
        pairs = hole_pairs.all_pairs(task, settings.half_side)
        chats = (hole_pairs.conversation(pairs, task, number) for number in range(len(pairs.answers_n)))
        conversations[task] = [encode_chat(tokenizer, template.render(chat)) for chat in chats]
    return conversations


# -- the answers


@torch.no_grad()
def answered(model: TrainedModel, rows: list[Row], temperature: float) -> tuple[Tensor, Tensor]:
    """Return each row's probability of its answer at a temperature, and whether it is the greedy one, [n] each."""
    probability_n, right_n = torch.zeros(len(rows), dtype=torch.float64), torch.zeros(len(rows), dtype=torch.bool)
    for numbers in _of_one_length(rows):
        ids_bs = torch.tensor(np.stack([rows[number][0] for number in numbers]))
        learned_bs = torch.tensor(np.stack([rows[number][1] for number in numbers]))[:, 1:]
        logits_bsv = model.logits(ids_bs)[:, :-1].double().cpu()
        labels_bs = ids_bs[:, 1:]
        chosen_bs = (logits_bsv / temperature).log_softmax(-1).gather(2, labels_bs[..., None])[..., 0]
        probability_n[numbers] = (chosen_bs * learned_bs).sum(1).exp()
        right_n[numbers] = ((logits_bsv.argmax(-1) == labels_bs) | ~learned_bs).all(1)
    return probability_n, right_n


def _of_one_length(rows: list[Row]) -> Iterator[list[int]]:
    """Yield the numbers of all rows, in batches of one length."""
    by_length: dict[int, list[int]] = {}
    for number, (ids, _) in enumerate(rows):
        by_length.setdefault(len(ids), []).append(number)
    for length, numbers in by_length.items():
        size = max(1, MOST_TOKENS // length)
        yield from (numbers[first : first + size] for first in range(0, len(numbers), size))


# -- what it says


def _finding(name: str, task: Task, answers: Answers, settings: HolesSettings) -> Finding:
    trained, hole = answers.scores(in_hole=False), answers.scores(in_hole=True)
    return Finding(
        name=f"hole of {task}, {name}",
        paper="; ".join(hole_pairs.PAPER.values()),
        ours=100 * hole.probability,
        unit="% of probability",
        shows=None,
        sentence=f"{name} gives the right answers in the hole of {task} a probability of {hole.probability:.1%} at "
        f"temperature {settings.temperature:g}, and {hole.greedy:.1%} of them are its greedy ones; outside the hole "
        f"these are {trained.probability:.1%} and {trained.greedy:.1%}.",
    )


def _table(found: dict[tuple[Task, str], Answers]) -> Table:
    return Table(
        title="Right answers, in %",
        columns=["task", "checkpoint", "outside, greedy", "outside, probability", "hole, greedy", "hole, probability"],
        rows=[
            [task, name, *(100 * score for in_hole in (False, True) for score in answers.scores(in_hole=in_hole))]
            for (task, name), answers in found.items()
        ],
    )


def _picture(settings: HolesSettings, task: Task, found: dict[tuple[Task, str], Answers]) -> bytes:
    """Draw the probability of the right answer on and around the hole: a checkpoint a panel."""

    def draw(panels: Any) -> None:
        for axes, name in zip(panels[0], settings.checkpoints, strict=True):
            values = hole_pairs.map_around(task, settings.half_side, found[task, name].probability_n)
            hole_pairs.draw_hole(axes, task, settings.half_side, values, title=name)

    return drawn(draw, columns=len(settings.checkpoints), size=hole_pairs.PANEL)
