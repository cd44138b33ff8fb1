"""Leave-Square-Out: tests whether a model learns the rule of an arithmetic task, or memorizes cases.

A task has an answer for each pair (a, b) of numbers from 0 to 112. A square of pairs, the hole, is left out of the
training: a model that has memorized cases fails there. The paper takes tasks and holes from "Case-Based or Rule-Based:
How Do Transformers Do the Math?" (Hu et al., 2024), and fine-tunes models of a billion parameters; here small models
are trained from scratch on sequences `a + b =` or `( a , b ) =`, in which each number and sign is a token.

Shapes: n pairs, s tokens, v vocabulary.
"""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_fanformer.durable_files import write_atomically
from megatron_fanformer.errors import CorruptError
from megatron_fanformer.experiments.intervals import mean_of
from megatron_fanformer.experiments.probe import HolesSettings, Task
from megatron_fanformer.experiments.result import Cell, Finding, Log, Measured, Table
from megatron_fanformer.experiments.twins import SAME_PARAMETERS, TRANSFORMER, fresh_model, small_fanformer, twins
from megatron_fanformer.pictures import render_png

NUMBERS = 113  # values of each operand, from 0
LARGEST_ANSWER = 3 * (NUMBERS - 1) + 3
SYMBOLS = ("+", "=", "(", ",", ")")
VOCABULARY = LARGEST_ANSWER + 1 + len(SYMBOLS)
MARGIN = 10  # numbers that the picture shows on each side of the hole
PAPER = "OLMo-1B, fine-tuned: about 0 in the hole; FANformer-1B, fine-tuned: no obvious hole"
PANEL = (3.6, 3.2)  # inches
CENTER: dict[Task, int] = {"modular": 56, "linear": 50}  # both coordinates of the hole's middle
SCORED_PAIRS = 2048  # pairs in one forward pass without gradients
WARM_UP = 0.01  # share of the steps
LEAST_TRAINED = 0.99  # accuracy on the training pairs above which a model has learned them
ARCHITECTURES = (TRANSFORMER, SAME_PARAMETERS)
AXES = ("seeds", "tasks", "weight_decays")  # settings with several values; a run has one of each


class Scores(NamedTuple):
    """Mean scores of a set of pairs, from 0 to 1."""

    greedy: float  # share of pairs whose likeliest answer is right
    probability: float  # of the right answer


class Pairs(NamedTuple):
    """All pairs of a task: as tokens, with their answers, and whether they are in the hole."""

    tokens_ns: Tensor
    answers_n: Tensor
    in_hole_n: Tensor


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one trained model, as stored in a file of the folder `runs`."""

    settings: dict[str, Any] = msgspec.field(name="asked")
    """All settings that determine the run."""
    trained: Scores
    """Scores on all pairs on which the model was trained."""
    hole: Scores
    map: list[list[float]]
    """The probability of the right answer on and around the hole: a row for each a, a column for each b."""
    seconds: float


Runs = dict[tuple[Task, float, str], list[Run]]  # by task, weight decay and architecture: a run for each seed


def measure(settings: HolesSettings, folder: Path, log: Log) -> Measured:
    """Train every model with every seed and weight decay, except for runs that are already in `folder`.

    Raises:
        CorruptError: a run's file in the folder is damaged.
    """
    runs: Runs = {}
    axes = (settings.tasks, settings.weight_decays, range(settings.seeds), ARCHITECTURES)
    common = {name: value for name, value in dataclasses.asdict(settings).items() if name not in AXES}
    for number, (task, weight_decay, seed, architecture) in enumerate(itertools.product(*axes), start=1):
        run_settings = {"task": task, "weight_decay": weight_decay, "seed": seed, "architecture": architecture}
        short = "transformer" if architecture == TRANSFORMER else "fanformer"
        file = folder / "runs" / f"{task}-decay-{weight_decay:g}-seed-{seed}-{short}.json"
        run = _read_run(file)
        if run is None or run.settings != common | run_settings:
            run = train(settings, common | run_settings)
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, msgspec.json.encode(run))
        runs.setdefault((task, weight_decay, architecture), []).append(run)
        log(
            f"run {number}: {task}, weight decay {weight_decay:g}, seed {seed}, {architecture}: trained "
            f"{run.trained.greedy:.1%}, hole {run.hole.greedy:.1%} greedy, {run.hole.probability:.1%} at temperature "
            f"{settings.temperature:g} ({run.seconds:.0f} s)"
        )
    return Measured(
        findings=[*_trained(runs), *_differences(settings, runs)],
        tables=[_table(runs)],
        pictures={f"holes-{task}.png": _picture(settings, task, runs) for task in settings.tasks},
        seconds=sum(run.seconds for by_seed in runs.values() for run in by_seed),
    )


def _read_run(file: Path) -> Run | None:  # None if the run was never finished
    if not file.exists():
        return None
    try:
        return msgspec.json.decode(file.read_bytes(), type=Run)
    except msgspec.MsgspecError as error:
        raise CorruptError(f"{file} is no finished run ({error}); remove it, and it is trained again") from None


def all_pairs(task: Task, half_side: int) -> Pairs:
    """Return all pairs of a task, ordered by a, then b; the hole has `half_side` numbers on each side of its center."""
    a, b = (grid.flatten() for grid in torch.meshgrid(torch.arange(NUMBERS), torch.arange(NUMBERS), indexing="ij"))
    plus, equals, left, comma, right = (  # in the order of SYMBOLS
        torch.full_like(a, LARGEST_ANSWER + 1 + number) for number in range(len(SYMBOLS))
    )
    tokens = [a, plus, b, equals] if task == "modular" else [left, a, comma, b, right, equals]
    in_hole = ((a - CENTER[task]).abs() <= half_side) & ((b - CENTER[task]).abs() <= half_side)
    answers = (a + b) % NUMBERS if task == "modular" else a + 2 * b + 3
    return Pairs(torch.stack(tokens, dim=1), answers, in_hole)


def train(settings: HolesSettings, run_settings: dict[str, Any]) -> Run:
    """Train one model on the pairs outside the hole, in an order that depends on the seed alone, and score the model.

    `run_settings` has all settings of this run: task, weight decay, seed, architecture, and those that all runs share.
    """
    started = time.perf_counter()
    task, weight_decay, seed = (run_settings[name] for name in ("task", "weight_decay", "seed"))
    shape = small_fanformer(settings.num_layers, settings.hidden_size, settings.num_heads, VOCABULARY)
    model = fresh_model(twins(shape)[run_settings["architecture"]], seed)
    pairs = all_pairs(task, settings.half_side)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=weight_decay)
    warm_up_steps = max(1, round(WARM_UP * settings.steps))
    cooldown_steps = max(1, round(settings.cooldown * settings.steps))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / warm_up_steps, (settings.steps - step) / cooldown_steps)
    )

    def logits(tokens_ns: Tensor) -> Tensor:
        logits_nv: Tensor = model(input_ids=tokens_ns, use_cache=False, logits_to_keep=1).logits[:, 0]
        return logits_nv

    for batch in _batches(pairs, settings, seed):
        loss = F.cross_entropy(logits(pairs.tokens_ns[batch]), pairs.answers_n[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    probability_n, is_right_n = score(logits, pairs, settings.temperature)
    first, last = _around(task, settings.half_side)
    map_ab = probability_n.view(NUMBERS, NUMBERS)[first : last + 1, first : last + 1]
    trained, hole = (
        Scores(is_right_n[scored_n].double().mean().item(), probability_n[scored_n].mean().item())
        for scored_n in (~pairs.in_hole_n, pairs.in_hole_n)
    )
    return Run(
        settings=run_settings,
        trained=trained,
        hole=hole,
        map=[[round(value, 4) for value in row] for row in map_ab.tolist()],
        seconds=time.perf_counter() - started,
    )


def _around(task: Task, half_side: int) -> tuple[int, int]:
    """Return the first and the last number in the picture, which shows the hole and, within all numbers, a margin."""
    reach = half_side + MARGIN
    return max(CENTER[task] - reach, 0), min(CENTER[task] + reach, NUMBERS - 1)


def _batches(pairs: Pairs, settings: HolesSettings, seed: int) -> Iterator[Tensor]:
    """Yield for each step a batch of indices of pairs outside the hole; every epoch has a new order."""
    outside = torch.nonzero(~pairs.in_hole_n)[:, 0]
    order = torch.Generator().manual_seed(seed)
    size = min(settings.batch_size, len(outside))
    step = 0
    while True:
        for batch in outside[torch.randperm(len(outside), generator=order)].split(size):
            if step == settings.steps:
                return
            if len(batch) == size:  # the last batch of an epoch may be smaller, and is left out
                step += 1
                yield batch


@torch.no_grad()
def score(logits: Callable[[Tensor], Tensor], pairs: Pairs, temperature: float) -> tuple[Tensor, Tensor]:
    """Return each pair's probability of the right answer at a temperature, and whether that answer is the likeliest.

    Args:
        logits: takes tokens [n, s], and returns the logits of the answer [n, v].
    """
    probabilities, is_right = [], []
    for tokens_ns, answers_n in zip(
        pairs.tokens_ns.split(SCORED_PAIRS), pairs.answers_n.split(SCORED_PAIRS), strict=True
    ):
        logits_nv = logits(tokens_ns).double()
        probabilities.append((logits_nv / temperature).softmax(-1).gather(1, answers_n[:, None])[:, 0])
        is_right.append(logits_nv.argmax(-1) == answers_n)
    return torch.cat(probabilities), torch.cat(is_right)


# -- findings


def _trained(runs: Runs) -> Iterator[Finding]:
    """Yield each model's least accuracy on its training pairs: if it is low, an error in the hole shows nothing."""
    for architecture in ARCHITECTURES:
        least = min(run.trained.greedy for key, by_seed in runs.items() if architecture in key for run in by_seed)
        yield Finding(
            name=f"pairs trained on, least accuracy, {architecture}",
            paper="about 100%",
            ours=100 * least,
            unit="%",
            shows=least > LEAST_TRAINED,
            sentence=f"The {architecture} answers at least {least:.1%} of the pairs that it was trained on.",
        )


def _differences(settings: HolesSettings, runs: Runs) -> Iterator[Finding]:
    """Compare, in the hole, the FANformer's probability of the right answer with the Transformer's, seed by seed."""
    for task, weight_decay in itertools.product(settings.tasks, settings.weight_decays):
        transformer, fan = (
            np.array([run.hole.probability for run in runs[task, weight_decay, architecture]])
            for architecture in ARCHITECTURES
        )
        difference, interval = mean_of((100 * (fan - transformer)).tolist())
        spread = "" if interval is None else f" (difference {interval[0]:+.1f} to {interval[1]:+.1f} points)"
        yield Finding(
            name=f"hole of {task} at weight decay {weight_decay:g}, FANformer less Transformer",
            paper=PAPER,
            ours=difference,
            interval=interval,
            unit="points of probability",
            shows=None if interval is None else interval[0] > 0,
            sentence=f"In the hole of {task} at weight decay {weight_decay:g} the right answer has a probability of "
            f"{fan.mean():.1%} in the FANformer and {transformer.mean():.1%} in the Transformer, in the mean of "
            f"{len(fan)} seeds{spread}.",
        )


def _table(runs: Runs) -> Table:
    columns = ["task", "weight decay", "model", "seed", "trained, greedy", "hole, greedy", "hole, probability"]
    rows: list[list[Cell]] = []
    for key, by_seed in runs.items():
        for seed, run in enumerate(by_seed):
            shares = (run.trained.greedy, run.hole.greedy, run.hole.probability)
            rows.append([*key, seed, *(100 * share for share in shares), run.seconds])
    return Table(title="Runs, in %", columns=[*columns, "seconds"], rows=rows)


def _picture(settings: HolesSettings, task: Task, runs: Runs) -> bytes:
    """Draw mean probabilities on and around the hole, with its edge; a row for each model, a column for each decay."""
    first, last = _around(task, settings.half_side)
    near, far = CENTER[task] - settings.half_side - 0.5, CENTER[task] + settings.half_side + 0.5

    def draw(panels: Any) -> None:
        for axes, (architecture, decay) in zip(
            panels.flat, itertools.product(ARCHITECTURES, settings.weight_decays), strict=True
        ):
            maps = [run.map for run in runs[task, decay, architecture]]
            extent = (first - 0.5, last + 0.5, first - 0.5, last + 0.5)
            axes.imshow(np.mean(maps, axis=0), origin="lower", cmap="viridis", vmin=0, vmax=1, extent=extent)
            axes.grid(visible=False)
            axes.plot((near, far, far, near, near), (near, near, far, far, near), color="white", linewidth=1)
            axes.set_title(f"{architecture}\nweight decay {decay:g}, {settings.seeds} seeds", fontsize="small")
            axes.set(xlabel="b", ylabel="a")

    return render_png(draw, rows=len(ARCHITECTURES), columns=len(settings.weight_decays), size=PANEL)
