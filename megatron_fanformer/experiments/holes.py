"""Leave-Square-Out: does a model learn the rule of an arithmetic task, or its cases?

All pairs (a, b) of 0 to 112 have an answer; a square of them is never trained on (the hole), where a model that goes by
the cases around it fails. Tasks and holes are the paper's, after "Case-Based or Rule-Based: How Do Transformers Do the
Math?" (Hu et al., 2024). The paper fine-tunes models of a billion parameters; here small ones are trained from scratch
on sequences `a + b =` or `( a , b ) =`, each number a token, and checkpoints that were fine-tuned on the conversations
of `write_data` answer by their chat template.

Shapes: n pairs, b rows of a batch, s tokens, v vocabulary.
"""

import dataclasses
import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_fanformer.data.chat_template import encode_chat, find_template, refuse_spaces_between
from megatron_fanformer.durable_files import write_atomically
from megatron_fanformer.errors import CorruptError, InputError, collect_problems
from megatron_fanformer.experiments.intervals import above, mean_of
from megatron_fanformer.experiments.probe import HolesSettings, Task
from megatron_fanformer.experiments.result import Cell, Finding, Log, Measured, Table
from megatron_fanformer.experiments.twins import SAME_PARAMETERS, TRANSFORMER, fanformer_of, fresh_model, twins
from megatron_fanformer.generate.models import TrainedModel, find_model_and_tokenizer, load_model
from megatron_fanformer.pictures import draw_heat_map, drawn

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
CENTRE: dict[Task, int] = {"modular": 56, "linear": 50}  # both coordinates of the hole's middle
SCORED_PAIRS = 2048  # in a forward pass without gradients
WARM_UP = 0.01
LEAST_TRAINED = 0.99
ARCHITECTURES = (TRANSFORMER, SAME_PARAMETERS)
AXES = ("seeds", "tasks", "weight_decays", "checkpoints")
"""Settings with several values, of which a run has one, or none if the setting does not apply to it."""
MOST_TOKENS = 2048  # of a batch of conversations, whose logits are held whole


# -- the pairs


class Scores(NamedTuple):
    """The scores of a set of pairs, in shares of 1."""

    greedy: float
    probability: float


class Pairs(NamedTuple):
    """A task's pairs: as tokens, and which of them are in the hole."""

    tokens_ns: Tensor
    answers_n: Tensor
    in_hole_n: Tensor


def all_pairs(task: Task, half_side: int) -> Pairs:
    """Return all pairs by a, then b."""
    a, b = (grid.flatten() for grid in torch.meshgrid(torch.arange(NUMBERS), torch.arange(NUMBERS), indexing="ij"))
    plus, equals, left, comma, right = (
        torch.full_like(a, LARGEST_ANSWER + 1 + number) for number in range(len(SYMBOLS))
    )
    tokens = [a, plus, b, equals] if task == "modular" else [left, a, comma, b, right, equals]
    in_hole = ((a - CENTRE[task]).abs() <= half_side) & ((b - CENTRE[task]).abs() <= half_side)
    answers = (a + b) % NUMBERS if task == "modular" else a + 2 * b + 3
    return Pairs(torch.stack(tokens, dim=1), answers, in_hole)


def conversation(pairs: Pairs, task: Task, number: int) -> list[dict[str, str]]:
    """Return the question about a pair, and its answer, as messages."""
    a, b = divmod(number, NUMBERS)
    question = f"{a}+{b}=" if task == "modular" else f"({a},{b})="  # in the paper's words
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": str(pairs.answers_n[number].item())},
    ]


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
    return max(CENTRE[task] - reach, 0), min(CENTRE[task] + reach, NUMBERS - 1)


def _picture(task: Task, half_side: int, rows: Sequence[Sequence[tuple[str, Tensor]]]) -> bytes:
    """Draw probabilities on and around the hole, and its edge.

    Args:
        rows: the title of each panel, and its probabilities by a and b.
    """

    def draw(panels: Any) -> None:
        first, last = _around(task, half_side)
        near, far = CENTRE[task] - half_side - 0.5, CENTRE[task] + half_side + 0.5
        for axes, (title, map_ab) in zip(panels.flat, itertools.chain(*rows), strict=True):
            extent = (first - 0.5, last + 0.5, first - 0.5, last + 0.5)
            draw_heat_map(axes, map_ab.numpy(), vmin=0, vmax=1, extent=extent)
            axes.plot((near, far, far, near, near), (near, near, far, far, near), color="white", linewidth=1)
            axes.set_title(title, fontsize="small")
            axes.set(xlabel="b", ylabel="a")

    return drawn(draw, rows=len(rows), columns=len(rows[0]), size=PANEL)


# -- models trained from scratch


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one trained model, as its file has it."""

    settings: dict[str, Any] = msgspec.field(name="asked")
    """All that determine it."""
    trained: Scores
    """Scores on all pairs that it was trained on."""
    hole: Scores
    map: list[list[float]]
    """The probability of the right answer on and around the hole, by a and b."""
    seconds: float


Runs = dict[tuple[Task, float, str], list[Run]]
"""Runs by task, weight decay and architecture, one for each seed."""


def measure(settings: HolesSettings, folder: Path, log: Log) -> Measured:
    """Train every model with every seed and weight decay, but for those that the folder has; or score checkpoints.

    Raises:
        InputError, CorruptError, DivergenceError: as `measure_checkpoints`.
        CorruptError: a file of the folder is no finished run.
    """
    if settings.checkpoints:
        return measure_checkpoints(settings, log)
    runs: Runs = {}
    axes = (settings.tasks, settings.weight_decays, range(settings.seeds), ARCHITECTURES)
    common = {name: value for name, value in dataclasses.asdict(settings).items() if name not in AXES}
    for number, (task, weight_decay, seed, architecture) in enumerate(itertools.product(*axes), start=1):
        run_settings = {
            **common,
            **{"task": task, "weight_decay": weight_decay, "seed": seed, "architecture": architecture},
        }
        short = "transformer" if architecture == TRANSFORMER else "fanformer"
        file = folder / "runs" / f"{task}-decay-{weight_decay:g}-seed-{seed}-{short}.json"
        run = _read_run(file)
        if run is None or run.settings != run_settings:
            run = train(settings, run_settings)
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
        pictures={f"holes-{task}.png": _picture_of_runs(settings, task, runs) for task in settings.tasks},
        seconds=sum(run.seconds for of_runs in runs.values() for run in of_runs),
    )


def _read_run(file: Path) -> Run | None:
    if not file.exists():
        return None
    try:
        return msgspec.json.decode(file.read_bytes(), type=Run)
    except msgspec.MsgspecError as error:
        raise CorruptError(f"{file} is no finished run ({error}); remove it, and it is trained again") from None


def train(settings: HolesSettings, run_settings: dict[str, Any]) -> Run:
    """Train one model on the pairs outside the hole, in an order that the seed alone decides."""
    started = time.perf_counter()
    task, weight_decay, seed = (run_settings[name] for name in ("task", "weight_decay", "seed"))
    shape = fanformer_of(settings.num_layers, settings.hidden_size, settings.num_heads, VOCABULARY)
    model = fresh_model(twins(shape)[run_settings["architecture"]], seed)
    pairs = all_pairs(task, settings.half_side)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=weight_decay)
    warm_up, cooldown = (max(1, round(share * settings.steps)) for share in (WARM_UP, settings.cooldown))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / warm_up, (settings.steps - step) / cooldown)
    )

    def logits(tokens_ns: Tensor) -> Tensor:
        """Return those of the answer, [n, v]."""
        logits_nv: Tensor = model(input_ids=tokens_ns, use_cache=False, logits_to_keep=1).logits[:, 0]
        return logits_nv

    for batch in _batches(pairs, settings, seed):
        loss = F.cross_entropy(logits(pairs.tokens_ns[batch]), pairs.answers_n[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    probability, right = score(logits, pairs, settings.temperature)
    return Run(
        settings=run_settings,
        trained=scores(probability, right, ~pairs.in_hole_n),
        hole=scores(probability, right, pairs.in_hole_n),
        map=[[round(value, 4) for value in row] for row in map_around(task, settings.half_side, probability).tolist()],
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


# -- findings


def _trained(runs: Runs) -> Iterator[Finding]:
    """Yield the accuracy on the pairs trained on: without that the hole says nothing."""
    for architecture in ARCHITECTURES:
        shares = {
            key: min(run.trained.greedy for run in of_runs) for key, of_runs in runs.items() if key[2] == architecture
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
        difference, interval = mean_of(apart)
        means = {architecture: float(np.mean(values)) for architecture, values in in_hole.items()}
        spread = "" if interval is None else f" (difference {interval[0]:+.1f} to {interval[1]:+.1f} points)"
        yield Finding(
            name=f"hole of {task} at weight decay {weight_decay:g}, FANformer less Transformer",
            paper="; ".join(PAPER.values()),
            ours=difference,
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
        for key, of_runs in runs.items()
        for seed, run in enumerate(of_runs)
    ]
    return Table(title="Runs, in %", columns=[*of_a_run, *shares, "seconds"], rows=rows)


def _picture_of_runs(settings: HolesSettings, task: Task, runs: Runs) -> bytes:
    """Draw the mean over the seeds: a model a row, a weight decay a column."""
    rows = []
    for architecture in ARCHITECTURES:
        title = f"{architecture}\nweight decay {{:g}}, {settings.seeds} seeds"
        maps = {decay: [run.map for run in runs[task, decay, architecture]] for decay in settings.weight_decays}
        rows.append([(title.format(decay), torch.tensor(of_runs).mean(0)) for decay, of_runs in maps.items()])
    return _picture(task, settings.half_side, rows)


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


# -- checkpoints that were fine-tuned on the conversations, as the paper's were

Row = tuple[np.ndarray, np.ndarray]
"""A conversation's ids, [s], and a mask of its answer, [s]."""


def measure_checkpoints(settings: HolesSettings, log: Log) -> Measured:
    """Make every checkpoint answer the pairs of every task.

    Raises:
        InputError: one cannot be opened, or has no tokenizer or chat template; all problems, before any answers.
        CorruptError: one is damaged.
        DivergenceError: logits are not finite.
    """
    problems: list[str] = []
    conversations = {name: _conversations(name, settings, problems) for name in settings.checkpoints}
    if problems:
        raise InputError("\n".join(problems))
    findings, rows = [], list[list[Cell]]()
    panels: dict[Task, list[tuple[str, Tensor]]] = {task: [] for task in settings.tasks}
    for name, by_task in conversations.items():
        with load_model(Path(name)) as model:
            for task, chats in by_task.items():
                probability, right = answered(model, chats, settings.temperature)
                in_hole = all_pairs(task, settings.half_side).in_hole_n
                outside, hole = (scores(probability, right, where) for where in (~in_hole, in_hole))
                log(f"{name}, {task}: {outside.greedy:.1%} outside the hole, {hole.greedy:.1%} in it, greedy")
                rows.append([task, name, *(100 * share for share in (*outside, *hole))])
                panels[task].append((name, map_around(task, settings.half_side, probability)))
                findings.append(
                    Finding(
                        name=f"hole of {task}, {name}",
                        paper="; ".join(PAPER.values()),
                        ours=100 * hole.probability,
                        unit="% of probability",
                        shows=None,
                        sentence=f"{name} gives the right answers in the hole of {task} a probability of "
                        f"{hole.probability:.1%} at temperature {settings.temperature:g}, and {hole.greedy:.1%} of "
                        f"them are its greedy ones; outside the hole these are {outside.probability:.1%} and "
                        f"{outside.greedy:.1%}.",
                    )
                )
    shares = ["outside, greedy", "outside, probability", "hole, greedy", "hole, probability"]
    return Measured(
        findings=findings,
        tables=[Table(title="Right answers, in %", columns=["task", "checkpoint", *shares], rows=rows)],
        pictures={f"holes-{task}.png": _picture(task, settings.half_side, [panels[task]]) for task in settings.tasks},
    )


def _conversations(name: str, settings: HolesSettings, problems: list[str]) -> dict[Task, list[Row]]:
    """Return the conversations of each task, pair by pair, as the checkpoint was fine-tuned on them."""
    source, tokenizer = find_model_and_tokenizer(name, None, problems)
    if source is None or tokenizer is None:
        return {}
    template = collect_problems(problems, lambda: find_template(tokenizer.path, eod_id=source.end_of_text_id))
    collect_problems(problems, lambda: refuse_spaces_between(tokenizer))
    if template is None or problems:
        return {}
    conversations = {}
    for task in settings.tasks:
        pairs = all_pairs(task, settings.half_side)
        chats = (conversation(pairs, task, number) for number in range(len(pairs.answers_n)))
        conversations[task] = [encode_chat(tokenizer, template.render(chat)) for chat in chats]
    return conversations


@torch.no_grad()
def answered(model: TrainedModel, rows: list[Row], temperature: float) -> tuple[Tensor, Tensor]:
    """Return each row's probability of its answer at a temperature, and whether it is the greedy one, [n] each."""
    probability_n, right_n = torch.zeros(len(rows), dtype=torch.float64), torch.zeros(len(rows), dtype=torch.bool)
    lengths = [len(ids) for ids, _ in rows]
    for length, same in itertools.groupby(sorted(range(len(rows)), key=lengths.__getitem__), key=lengths.__getitem__):
        for batch in torch.tensor(list(same)).split(max(1, MOST_TOKENS // length)):
            numbers = batch.tolist()
            ids_bs = torch.tensor(np.stack([rows[number][0] for number in numbers]))
            learned_bs = torch.tensor(np.stack([rows[number][1] for number in numbers]))[:, 1:]
            logits_bsv = model.logits(ids_bs)[:, :-1].double().cpu()
            labels_bs = ids_bs[:, 1:]
            chosen_bs = (logits_bsv / temperature).log_softmax(-1).gather(2, labels_bs[..., None])[..., 0]
            probability_n[numbers] = (chosen_bs * learned_bs).sum(1).exp()
            right_n[numbers] = ((logits_bsv.argmax(-1) == labels_bs) | ~learned_bs).all(1)
    return probability_n, right_n
