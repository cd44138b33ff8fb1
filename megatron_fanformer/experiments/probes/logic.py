"""ULogic's law of non-contradiction on trained models: by the user's file, or by 20 rules of our own without one.

`evaluation.ulogic` poses and scores: a rule counts if it is judged True, and its negation False. ULogic's own rules
state no licence, so that none of them is here; ours are of its form, with one to four premises. Figures by the two do
not compare, nor with the paper's, whose question was another.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_fanformer.data.tokenizer import load_tokenizer
from megatron_fanformer.durable_files import write_atomically
from megatron_fanformer.errors import InputError
from megatron_fanformer.evaluation import ulogic
from megatron_fanformer.evaluation.generated_texts import GenerationSettings
from megatron_fanformer.evaluation.report import STANDARD_ERRORS
from megatron_fanformer.experiments.probes.outcome import Log, Measured
from megatron_fanformer.experiments.probes.settings import LogicSettings
from megatron_fanformer.experiments.result import Finding, Table
from megatron_fanformer.generation.models import find_model, load_model
from megatron_fanformer.pictures import drawn

PAPER = "GPT-4 65.1, FANformer-1B 38.2, Qwen 7.1, OLMo-1B 0.0"
RULES = (
    (1, "If Person X owns Boat Y, then Person X can sail Boat Y."),
    (1, "If Person X has a ticket for Concert Y, then Person X can attend Concert Y."),
    (1, "If Person X is allergic to Food Y, then Person X cannot eat Food Y."),
    (1, "If Person X has read Book Y, then Person X can retell Book Y."),
    (1, "If Person X is banned from Shop Y, then Person X cannot enter Shop Y."),
    (2, "If Person X lives in Town A and Shop Y is in Town A, then Person X can walk to Shop Y."),
    (2, "If Person X is blind and Sign Y is printed in ink, then Person X cannot read Sign Y."),
    (2, "If Person X has Tool A and Tool A repairs Machine Y, then Person X can repair Machine Y."),
    (2, "If Room Y is locked with Key A and Person X lost Key A, then Person X cannot open Room Y."),
    (2, "If Person X speaks Language A and Person Y speaks Language A, then Person X can talk to Person Y."),
    (3, "If Ship Y needs Canal A, Canal A is frozen in Season B and it is Season B, then Ship Y cannot sail."),
    (3, "If Person X likes Dish A, Cook Y makes Dish A and Cook Y is open, then Person X can eat at Cook Y."),
    (3, "If Plant Y needs Light A, Room B has no Light A and Plant Y is in Room B, then Plant Y cannot grow."),
    (3, "If Person X has Visa A, Visa A admits to Country Y and Visa A is valid, then Person X can visit Country Y."),
    (3, "If Car Y needs Fuel A, Person X has no Fuel A and Car Y is empty, then Person X cannot drive Car Y."),
    (
        4,
        "If Person X is in City A, Train B leaves City A, Train B stops in City Y and Person X rides Train B, "
        "then Person X can reach City Y.",
    ),
    (
        4,
        "If Door Y opens by Code A, Guard B holds Code A, Guard B is away and Person X lacks Code A, then Person X "
        "cannot open Door Y.",
    ),
    (
        4,
        "If Person X earned Grade A, Course Y asks for Grade A, Course Y has places and Person X paid the fee, then "
        "Person X can join Course Y.",
    ),
    (
        4,
        "If Bridge A carries Weight B, Truck Y outweighs Weight B, Weight B is known and Truck Y is on Bridge A, "
        "then Truck Y cannot cross Bridge A.",
    ),
    (
        4,
        "If Person X has Ladder A, Ladder A has Length B, Roof Y has Height C and Length B exceeds it, then Person "
        "X can climb Roof Y.",
    ),
)
"""Premises and rule; all rules are true."""


def measure(settings: LogicSettings, folder: Path, log: Log) -> Measured:
    """Ask every checkpoint.

    Raises:
        InputError: one cannot be opened, has no tokenizer, or the rules are not as ULogic's.
        CorruptError: one is damaged.
        DivergenceError: logits are not finite.
    """
    path = Path(settings.rules) if settings.rules is not None else folder / "rules.json"
    if settings.rules is None:
        write_atomically(path, json.dumps([{"v_rule": rule, "length": length} for length, rule in RULES], indent=1))
    documents = ulogic.documents(path)
    found: dict[str, dict[str, Any]] = {}
    for name in settings.checkpoints:
        source = find_model(Path(name))
        if source.tokenizer is None:
            raise InputError(f"{name} holds no tokenizer; name a checkpoint that does")
        tokenizer = load_tokenizer(source.tokenizer, eod_id=source.end_of_text_id)
        with load_model(Path(name)) as model:
            judged = ulogic.evaluate(model, tokenizer, documents, GenerationSettings(), log=log)
        found[name] = judged["metrics"]
    return Measured(
        findings=[finding for name in found for finding in _findings(name, found[name], len(documents), settings)],
        tables=[_table(found)],
        pictures={"logic.png": drawn(lambda panels: _draw(panels[0, 0], found))},
    )


def _findings(name: str, metrics: dict[str, Any], rules: int, settings: LogicSettings) -> Iterator[Finding]:
    of = f"{rules} rules of {'our own' if settings.rules is None else settings.rules}"
    for way in ("likelihood", "generation"):
        share, error = 100 * metrics[way]["value"], 100 * STANDARD_ERRORS * metrics[way]["standard_error"]
        yield Finding(
            name=f"rules judged rightly with their negations by {way}, {name}",
            paper=PAPER,
            ours=share,
            interval=(max(0.0, share - error), min(100.0, share + error)),
            unit="%",
            shows=None,
            sentence=f"{name} judges {share:.1f}% of {of} rightly with their negations by {way}, and "
            f"{100 * metrics[f'{way}_alike']['value']:.1f}% as their negations.",
        )


def _table(found: dict[str, dict[str, Any]]) -> Table:
    rows = [
        [name, metric, 100 * value["value"], 100 * value["standard_error"], value["documents"]]
        for name, metrics in found.items()
        for metric, value in metrics.items()
    ]
    return Table(title="Shares of rules, in %", columns=["model", "metric", "share", "error", "rules"], rows=rows)


def _draw(axes: Any, found: dict[str, dict[str, Any]]) -> None:
    for name, metrics in found.items():
        lengths = {
            int(metric.rpartition("_")[2]): 100 * value["value"]
            for metric, value in metrics.items()
            if metric.startswith("likelihood_length_")
        }
        axes.plot(list(lengths), list(lengths.values()), marker="o", label=name)
    axes.set(xlabel="premises", ylabel="% judged rightly with their negations", ylim=(-2, 102))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend()
