"""Leave-Square-Out's pairs: the tasks, the hole in the middle of each, and how answers are scored and drawn.

Shapes: n pairs, s tokens.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_fanformer.experiments.probes.settings import Task
from megatron_fanformer.experiments.probes.twins import SAME_PARAMETERS, TRANSFORMER
from megatron_fanformer.pictures import draw_heat_map

NUMBERS = 113  # of each operand, from 0
LARGEST_ANSWER = 3 * (NUMBERS - 1) + 3
SYMBOLS = ("+", "=", "(", ",", ")")
VOCABULARY = LARGEST_ANSWER + 1 + len(SYMBOLS)
MARGIN = 10  # of the picture, around the hole
PAPER = {
    TRANSFORMER: "OLMo-1B, fine-tuned: about 0 in the hole",
    SAME_PARAMETERS: "FANformer-1B, fine-tuned: no obvious hole",
}
PANEL = (3.6, 3.2)


class Pairs(NamedTuple):
    """A task's pairs: as tokens, and which of them are in the hole."""

    tokens_ns: Tensor
    answers_n: Tensor
    in_hole_n: Tensor


class Scores(NamedTuple):
    """The scores of a set of pairs, in shares of 1."""

    greedy: float
    probability: float


def centre(task: Task) -> int:
    """Return both coordinates of the hole's middle."""
    return 56 if task == "modular" else 50


def answer(task: Task, a: Tensor, b: Tensor) -> Tensor:
    """Return the right answers, elementwise."""
    return (a + b) % NUMBERS if task == "modular" else a + 2 * b + 3


def question(task: Task, a: int, b: int) -> str:
    """Return the question in the paper's words."""
    return f"{a}+{b}=" if task == "modular" else f"({a},{b})="


def all_pairs(task: Task, half_side: int) -> Pairs:
    """Return all pairs by a, then b."""
    a, b = (grid.flatten() for grid in torch.meshgrid(torch.arange(NUMBERS), torch.arange(NUMBERS), indexing="ij"))
    plus, equals, left, comma, right = (
        torch.full_like(a, LARGEST_ANSWER + 1 + number) for number in range(len(SYMBOLS))
    )
    tokens = [a, plus, b, equals] if task == "modular" else [left, a, comma, b, right, equals]
    in_hole = ((a - centre(task)).abs() <= half_side) & ((b - centre(task)).abs() <= half_side)
    return Pairs(torch.stack(tokens, dim=1), answer(task, a, b), in_hole)


def conversation(pairs: Pairs, task: Task, number: int) -> list[dict[str, str]]:
    """Return the question about a pair, and its answer, as messages."""
    user = {"role": "user", "content": question(task, *divmod(number, NUMBERS))}
    return [user, {"role": "assistant", "content": str(pairs.answers_n[number].item())}]


def scores(probability_n: Tensor, right_n: Tensor, where_n: Tensor) -> Scores:
    """Score the pairs that `where_n` selects."""
    return Scores(right_n[where_n].double().mean().item(), probability_n[where_n].mean().item())


def map_around(task: Task, half_side: int, probability_n: Tensor) -> Tensor:
    """Return the probabilities of all pairs, on and around the hole alone, by a and b."""
    first, last = _around(task, half_side)
    return probability_n.view(NUMBERS, NUMBERS)[first : last + 1, first : last + 1]


def _around(task: Task, half_side: int) -> tuple[int, int]:
    """Return the first and the last number on and around the hole; a large hole has less than the margin around it."""
    reach = half_side + MARGIN
    return max(centre(task) - reach, 0), min(centre(task) + reach, NUMBERS - 1)


def draw_hole(axes: Any, task: Task, half_side: int, map_ab: Tensor, *, title: str) -> None:
    """Draw the probabilities on and around the hole, and its edge."""
    first, last = _around(task, half_side)
    draw_heat_map(axes, map_ab.numpy(), vmin=0, vmax=1, extent=(first - 0.5, last + 0.5, first - 0.5, last + 0.5))
    near, far = centre(task) - half_side - 0.5, centre(task) + half_side + 0.5
    axes.plot((near, far, far, near, near), (near, near, far, far, near), color="white", linewidth=1)
    axes.set_title(title, fontsize="small")
    axes.set(xlabel="b", ylabel="a")
