"""Leave-Square-Out: does a model learn the rule, or the cases?

All pairs (a, b) of 0 to 112 with an answer to each; a square of them is never trained on (the hole). A model that
learned the rule answers there as elsewhere; one that goes by the cases around it does not. Tasks and holes are the
paper's, after "Case-Based or Rule-Based: How Do Transformers Do the Math?" (Hu et al., 2024). The paper fine-tunes
models of a billion parameters, trained on text; here small ones are trained from scratch, on pairs alone. `write_data`
writes the paper's conversations, to fine-tune a checkpoint on, whose answers `fine_tuned_holes` scores.

A sequence is `a + b =` or `( a , b ) =`, each number a token, and the answer is one more; the loss is on it alone. Of
each trained model: the share of pairs whose likeliest answer is right (greedy), and the mean probability of the right
answer at `temperature`, which is what the share of right answers among samples approaches. Each finished run is a file
of the folder, and a probe that was stopped goes on with the others.

Shapes: n pairs, s tokens, v vocabulary.
"""

import dataclasses
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_fanformer.durable_files import regular_file, write_atomically
from megatron_fanformer.errors import CorruptError
from megatron_fanformer.experiments.intervals import mean_of
from megatron_fanformer.experiments.probes.hole_pairs import (
    PANEL,
    PAPER,
    VOCABULARY,
    Pairs,
    Scores,
    all_pairs,
    conversation,
    draw_hole,
    map_around,
    scores,
)
from megatron_fanformer.experiments.probes.outcome import Log, Measured, above
from megatron_fanformer.experiments.probes.settings import HolesSettings, Task
from megatron_fanformer.experiments.probes.twins import SAME_PARAMETERS, TRANSFORMER, fanformer_of, fresh_model, twins
from megatron_fanformer.experiments.result import Cell, Finding, Table
from megatron_fanformer.model.config import FANformerConfig
from megatron_fanformer.pictures import drawn

SCORED_PAIRS = 2048  # in a forward pass without gradients
WARM_UP = 0.01
MOST_BYTES = 1 << 20  # of a finished run
LEAST_TRAINED = 0.99
ARCHITECTURES = (TRANSFORMER, SAME_PARAMETERS)
AXES = ("seeds", "tasks", "weight_decays", "checkpoints")
"""Settings with several values, of which a run has one, or none if the setting does not apply to it."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one trained model, as its file has it."""

    settings: dict[str, Any] = msgspec.field(name="asked")
    """All that determine it."""
    trained: Scores
    """Scores on all pairs that it was trained on."""
    hole: Scores
    curve: list[tuple[int, float, float]]
    """Step, and the greedy shares of the trained pairs and of the hole, at ten points of the training."""
    map: list[list[float]]
    """The probability of the right answer on and around the hole, by a and b."""
    parameters: int
    seconds: float


def measure(settings: HolesSettings, folder: Path, log: Log) -> Measured:
    """Train every model with every seed and weight decay, but for those that the folder has; or score checkpoints.

    Raises:
        InputError, CorruptError, DivergenceError: as `fine_tuned_holes.measure_checkpoints`.
        CorruptError: a file of the folder is no finished run.
    """
    if settings.checkpoints:
        from megatron_fanformer.experiments.probes.fine_tuned_holes import measure_checkpoints

        return measure_checkpoints(settings, log)
    runs: dict[tuple[Task, float, str], list[Run]] = {}
    axes = (settings.tasks, settings.weight_decays, range(settings.seeds), ARCHITECTURES)
    for number, (task, weight_decay, seed, architecture) in enumerate(itertools.product(*axes), start=1):
        run = _finished_or_new(settings, folder / "runs", task, weight_decay, seed, architecture)
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
        seconds=sum(run.seconds for own in runs.values() for run in own),
    )


# -- a run


def _finished_or_new(
    settings: HolesSettings, folder: Path, task: Task, weight_decay: float, seed: int, architecture: str
) -> Run:
    own = {name: value for name, value in dataclasses.asdict(settings).items() if name not in AXES}
    all_settings = {**own, "task": task, "weight_decay": weight_decay, "seed": seed, "architecture": architecture}
    short = "transformer" if architecture == TRANSFORMER else "fanformer"
    file = folder / f"{task}-decay-{weight_decay:g}-seed-{seed}-{short}.json"
    if file.exists():
        try:
            found = msgspec.json.decode(regular_file(file, most_bytes=MOST_BYTES).read_bytes(), type=Run)
        except msgspec.MsgspecError as error:
            raise CorruptError(f"{file} is no finished run ({error}); remove it, and it is trained again") from None
        if found.settings == all_settings:
            return found
    folder.mkdir(parents=True, exist_ok=True)
    run = train(settings, task, weight_decay, seed, architecture, all_settings)
    write_atomically(file, msgspec.json.encode(run))
    return run


def model_config(settings: HolesSettings, architecture: str) -> FANformerConfig:
    """Return the model of a run."""
    shape = fanformer_of(settings.num_layers, settings.hidden_size, settings.num_heads, VOCABULARY)
    return twins(shape)[architecture]


def train(
    settings: HolesSettings, task: Task, weight_decay: float, seed: int, architecture: str, all_settings: dict[str, Any]
) -> Run:
    """Train one model on the pairs outside the hole, in an order that the seed alone decides."""
    started = time.perf_counter()
    model = fresh_model(model_config(settings, architecture), seed)
    pairs = all_pairs(task, settings.half_side)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=weight_decay)
    warm_up, cooldown = (max(1, round(share * settings.steps)) for share in (WARM_UP, settings.cooldown))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / warm_up, (settings.steps - step) / cooldown)
    )
    curve: list[tuple[int, float, float]] = []

    def logits(tokens_ns: Tensor) -> Tensor:
        """Return those of the answer, [n, v]."""
        found: Tensor = model(input_ids=tokens_ns, use_cache=False, logits_to_keep=1).logits[:, 0]
        return found

    def measured() -> tuple[Scores, Scores, Tensor]:
        """Return the scores of the trained pairs and of the hole, and the probabilities of all right answers, [n]."""
        probability, right = score(logits, pairs, settings.temperature)
        trained, hole = (scores(probability, right, where) for where in (~pairs.in_hole_n, pairs.in_hole_n))
        return trained, hole, probability

    for step, batch in enumerate(_batches(pairs, settings, seed), start=1):
        loss = F.cross_entropy(logits(pairs.tokens_ns[batch]), pairs.answers_n[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % max(1, settings.steps // 10) == 0:
            trained, hole, _ = measured()
            curve.append((step, trained.greedy, hole.greedy))
    trained, hole, probability = measured()
    return Run(
        settings=all_settings,
        trained=trained,
        hole=hole,
        curve=curve,
        map=[[round(each, 4) for each in row] for row in map_around(task, settings.half_side, probability).tolist()],
        parameters=sum(weight.numel() for weight in model.parameters()),
        seconds=time.perf_counter() - started,
    )


def _batches(pairs: Pairs, settings: HolesSettings, seed: int) -> Iterator[Tensor]:
    """Yield numbers of pairs outside the hole, as many batches as there are steps; every epoch in a new order."""
    outside = torch.nonzero(~pairs.in_hole_n)[:, 0]
    order = torch.Generator().manual_seed(seed)
    size = min(settings.batch_size, len(outside))
    step = 0
    while True:
        for batch in outside[torch.randperm(len(outside), generator=order)].split(size):
            if step == settings.steps:
                return
            if len(batch) == size:
                step += 1
                yield batch


@torch.no_grad()
def score(logits: Callable[[Tensor], Tensor], pairs: Pairs, temperature: float) -> tuple[Tensor, Tensor]:
    """Return each pair's probability of the right answer at a temperature, and whether it is the likeliest.

    Args:
        logits: gives those of the answer, [n, v], to tokens [n, s].
    """
    probabilities, right = [], []
    for tokens_ns, answers_n in zip(
        pairs.tokens_ns.split(SCORED_PAIRS), pairs.answers_n.split(SCORED_PAIRS), strict=True
    ):
        logits_nv = logits(tokens_ns).double()
        probabilities.append((logits_nv / temperature).softmax(-1).gather(1, answers_n[:, None])[:, 0])
        right.append(logits_nv.argmax(-1) == answers_n)
    return torch.cat(probabilities), torch.cat(right)


# -- what it says


Runs = dict[tuple[Task, float, str], list[Run]]


def _trained(runs: Runs) -> Iterator[Finding]:
    """Check whether the models learned what they were shown: without that the hole says nothing."""
    for architecture in ARCHITECTURES:
        shares = {
            key: min(run.trained.greedy for run in found) for key, found in runs.items() if key[2] == architecture
        }
        (task, decay, _), least = min(shares.items(), key=lambda item: item[1])
        yield Finding(
            name=f"pairs trained on, least accuracy, {architecture}",
            paper="about 100%",
            ours=100 * least,
            unit="%",
            shows=least > LEAST_TRAINED,
            sentence=f"The {architecture} answers at least {least:.1%} of the pairs that it was trained on (least: "
            f"{task}, weight decay {decay:g}).",
        )


def _differences(settings: HolesSettings, runs: Runs) -> Iterator[Finding]:
    """Compare, in the hole, the FANformer's probability of the right answer with the Transformer's, seed by seed."""
    for task, weight_decay in itertools.product(settings.tasks, settings.weight_decays):
        in_hole = {
            architecture: [run.hole.probability for run in runs[task, weight_decay, architecture]]
            for architecture in ARCHITECTURES
        }
        apart = [100 * (fan - none) for fan, none in zip(in_hole[SAME_PARAMETERS], in_hole[TRANSFORMER], strict=True)]
        interval = mean_of(apart).interval
        means = {architecture: statistics.fmean(values) for architecture, values in in_hole.items()}
        spread = "" if interval is None else f" (difference {interval[0]:+.1f} to {interval[1]:+.1f} points)"
        yield Finding(
            name=f"hole of {task} at weight decay {weight_decay:g}, FANformer less Transformer",
            paper="; ".join(PAPER.values()),
            ours=statistics.fmean(apart),
            interval=interval,
            unit="points of probability",
            shows=above(interval, 0.0),
            sentence=f"In the hole of {task} at weight decay {weight_decay:g} the right answer has a probability of "
            f"{means[SAME_PARAMETERS]:.1%} in the FANformer and {means[TRANSFORMER]:.1%} in the Transformer, in the "
            f"mean of {len(apart)} seeds{spread}.",
        )


def _table(runs: Runs) -> Table:
    of_a_run = ["task", "weight decay", "model", "seed"]
    shares = ["trained, greedy", "hole, greedy", "hole, probability"]
    rows: list[list[Cell]] = [
        [
            *(*key, seed),
            *(100 * share for share in (run.trained.greedy, run.hole.greedy, run.hole.probability)),
            run.seconds,
        ]
        for key, found in runs.items()
        for seed, run in enumerate(found)
    ]
    return Table(title="Runs, in %", columns=[*of_a_run, *shares, "seconds"], rows=rows)


def _picture(settings: HolesSettings, task: Task, runs: Runs) -> bytes:
    """Draw the probability of the right answer on and around the hole: a model a row, a weight decay a column."""

    def draw(panels: Any) -> None:
        for row, architecture in zip(panels, ARCHITECTURES, strict=True):
            for axes, decay in zip(row, settings.weight_decays, strict=True):
                found = runs[task, decay, architecture]
                mean = torch.tensor([run.map for run in found]).mean(0)
                title = f"{architecture}\nweight decay {decay:g}, {len(found)} seeds"
                draw_hole(axes, task, settings.half_side, mean, title=title)

    return drawn(draw, rows=len(ARCHITECTURES), columns=len(settings.weight_decays), size=PANEL)


# -- for a fine-tuning


def write_data(settings: HolesSettings, folder: Path) -> list[str]:
    """Write each task's conversations, outside and inside the hole, as JSON lines; returns a line a file."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for task in settings.tasks:
        pairs = all_pairs(task, settings.half_side)
        for name, where in (("train", ~pairs.in_hole_n), ("hole", pairs.in_hole_n)):
            file = folder / f"{task}-{name}.jsonl"
            numbers = torch.nonzero(where)[:, 0].tolist()
            chats = ({"messages": conversation(pairs, task, number)} for number in numbers)
            write_atomically(file, "".join(json.dumps(chat) + "\n" for chat in chats))
            lines.append(f"{file}: {len(numbers):,} conversations")
    return lines
