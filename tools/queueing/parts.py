"""The parts of the queue, read from `parts.yaml`: their commands, and the comparison of their figures with goals."""

import json
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).resolve().parents[2]
ON_GPU = "--device cuda --alone --seq-length 2048 --rounds 2 --steps 4 --warm-up 3"
REHEARSED = "--device cuda --alone --config examples/tiny-cpu.yaml --seq-length 64 --micro-batch-size 1 --rounds 1"
ONLY_ON_GPU = ("kernels.cuda_graph_impl", "training.global_batch_size", "model.num_layers")
GLOO = "runtime.distributed_backend=gloo"  # of a rehearsal: NCCL needs a GPU


class Command(NamedTuple):
    """A command of a part, run by this Python interpreter."""

    name: str
    """The name of the log, without `.log`."""
    arguments: list[str]


class Setting(NamedTuple):
    """The settings on which a part's commands depend."""

    folder: Path
    """The folder that the part writes."""
    rehearses: bool = False

    def resolve(self, text: str) -> str:
        """Replace FOLDER, CLAIM and SWEEP in a text by the paths of these folders."""
        ending = "-rehearsal" if self.rehearses else ""
        sweep = f"runs/sweeps/claim{ending or '-30m'}"
        return text.replace("FOLDER", str(self.folder)).replace("CLAIM", f"runs/claim{ending}").replace("SWEEP", sweep)


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of the queue."""

    name: str
    decides: str
    minutes: float
    """The limit of all its commands together."""
    commands: dict[str, str] = field(default_factory=dict)
    rehearsed: dict[str, str] = field(default_factory=dict)
    size: str = ""
    cases: dict[str, list[str]] = field(default_factory=dict)
    """Cases of `tools/bench_train.py`, with the options `size`."""
    tests: str | None = None
    """A folder of tests, whose files run side by side."""
    output: str | None = None
    """A file for the commands' standard output; by default their logs."""
    goals: list[dict[str, Any]] = field(default_factory=list)
    needs: tuple[str, ...] = ("machine",)
    """Parts that must be done before."""
    goes_on: bool = False
    """Whether the next call continues the part after its limit has ended it."""
    is_repeated: bool = False
    """Whether each call runs the part, even if it is done."""
    kept: tuple[str, ...] = ()
    """Files elsewhere that are copied into the part's folder at the end."""
    on_stand_in: bool = True
    """Whether a rehearsal uses the stand-in for Transformer Engine; otherwise it uses the CPU alone."""

    def made(self, setting: Setting) -> list[Command]:
        """Return the part's commands."""
        if self.tests is not None:  # without tests/conftest.py, whose imports a machine for GPU checks may lack
            options = [f"--confcutdir={self.tests}", "-p", "no:cacheprovider", "-v", "--color=no"]
            files = sorted((ROOT / self.tests).glob("test_*.py"))
            return [Command(file.stem, ["-m", "pytest", str(file), *options]) for file in files]
        texts = self.rehearsed if setting.rehearses else self.commands
        commands = [Command(name, shlex.split(setting.resolve(text))) for name, text in texts.items()]
        if self.cases:
            size = (
                f"{REHEARSED}{' --rates' * ('--rates' in self.size)}" if setting.rehearses else f"{ON_GPU} {self.size}"
            )
            arguments = ["tools/bench_train.py", *size.split(), "--json", str(setting.folder / "step.json")]
            for name, settings in self.cases.items():
                model = "transformer" if name.startswith("T") else "fanformer"
                small = [GLOO, *(setting for setting in settings if not setting.startswith(ONLY_ON_GPU))]
                arguments += ["--case", name, model, *(small if setting.rehearses else settings)]
            commands.append(Command("step", arguments))
        return commands

    def judged(self, setting: Setting) -> list[list[str]]:
        """Return name, figure, rule and verdict of each goal."""
        return [_judge(goal, setting) for goal in self.goals]


def rule_of(goal: dict[str, Any]) -> str:
    """Return a goal's bounds in words."""
    bounds = (("at least", goal.get("at_least")), ("at most", goal.get("at_most")))
    return ", ".join(f"{words} {bound:,.4g}" for words, bound in bounds if bound is not None)


def _judge(goal: dict[str, Any], setting: Setting) -> list[str]:
    figure, over = goal.get("figure"), goal.get("over")
    if "steps" in goal:
        figure, over = (["step.json", "cases", {"case": case}, "step_seconds"] for case in goal["steps"])
    try:
        value = _figure(setting.folder, figure) / (1.0 if over is None else _figure(setting.folder, over))
    except (OSError, LookupError, ValueError, TypeError, ArithmeticError):
        return [goal["name"], "none", rule_of(goal), "not judged"]
    met = goal.get("at_least", value) <= value <= goal.get("at_most", value)
    is_judged = goal.get("everywhere") or not setting.rehearses
    return [goal["name"], f"{value:,.4g}", rule_of(goal), ("yes" if met else "no") if is_judged else "not judged"]


def _figure(folder: Path, keys: list[Any]) -> float:
    """Read a number from a JSON file by keys from outside in; a mapping chooses the list entry that has its values."""
    file, *others = keys
    text = (folder / file).read_text()
    value = [json.loads(line) for line in text.splitlines()] if file.endswith(".jsonl") else json.loads(text)
    for key in others:
        if isinstance(key, dict):
            [value] = [entry for entry in value if key.items() <= entry.items()]
        else:
            value = value[key]
    return float(value)


PARTS = tuple(
    Part(**values) for values in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
)
