"""The probes' settings, and the run of one: the paper's smaller experiments, each a file with a function `measure`.

    FOLDER/*.png, README.md     pictures and findings, to look at
    FOLDER/result.json          the same as data, written last: a folder that has it is whole
    FOLDER/runs/                finished runs of a probe that has many, so that it continues from there

The default settings are the laptop forms, whose minutes stand in `PROBES`; docs/experiments.md has their results.
"""

import dataclasses
import importlib
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from megatron_fanformer.checkpoint.remote import on_this_machine
from megatron_fanformer.configuration import build, read_overrides
from megatron_fanformer.errors import InputError, collect_problems
from megatron_fanformer.experiments.result import README, RESULT, Log, Measured, read_result, write_folder
from megatron_fanformer.experiments.verbs import ExperimentOptions
from megatron_fanformer.options import option_name
from megatron_fanformer.processes import ended_by_stop_signals
from megatron_fanformer.runtime import device
from megatron_fanformer.runtime.launch import report_stopped
from megatron_fanformer.terminal import show

FOLDER = "runs/experiments"
SHORT = {"seeds": "seeds", "checkpoint": "checkpoints"}
"""The options that stand for a field of the settings, by their name there."""
FROM_ZERO = ("cooldown",)
"""Numbers of the settings that may be 0."""

Task = Literal["modular", "linear"]


class Settings:
    """The settings of one probe; each is a frozen dataclass."""

    def stated(self) -> dict[str, Any]:
        """Return the fields that a result states and is known by, as plain values."""
        return asdict(self)  # type: ignore[call-overload]

    def problems(self) -> Iterator[str]:
        """Yield the rules that the fields of this probe break, where each number is valid by itself."""
        yield from ()


@dataclass(frozen=True, kw_only=True)
class LipschitzSettings(Settings):
    """Models at random weights that spread two near inputs, as the authors' notebook has it."""

    seeds: int = 1
    """Draws of weights and inputs: 0 is the notebook's."""
    depths: tuple[int, ...] = (1, 2, 4)
    """Layers; the notebook goes on with 8, 12, 16, 24, … 196. Its random numbers run through them in order."""
    hidden_size: int = 512
    """Width, of the convolutions too."""
    num_heads: int = 8
    """Attention heads."""
    samples: int = 10
    """Inputs; the constant is the largest of theirs."""
    grid: int = 32
    """Each input is a grid of this many points a side."""
    attention: Literal["heads", "points"] = "heads"
    """The items that attend to each other: the heads of one point, as in the notebook, or all points."""
    epsilon: float = 1e-7
    """Standard deviation of the difference of the two inputs."""

    def problems(self) -> Iterator[str]:
        """Yield the broken rules."""
        if not self.depths or min(self.depths) < 1 or list(self.depths) != sorted(self.depths):
            yield f"depths is {list(self.depths)}; name numbers of layers from 1 on, in order"
        if self.hidden_size % (4 * self.num_heads):
            yield f"hidden_size is {self.hidden_size}; it must be a multiple of four times num_heads {self.num_heads}"


@dataclass(frozen=True, kw_only=True)
class ModSettings(Settings):
    """The fit of t mod 5 (fig. 1a): controls on t as it is, and language models' layers on it."""

    seeds: int = 3
    """Seeds of the weights and the samples; every model has the same ones."""
    half_range: float = 100.0
    """Controls train on t within ± this; as far again on both sides is outside."""
    control_size: int = 128
    """Width of the FAN network; the MLP has as many parameters."""
    control_steps: int = 4000
    """AdamW steps of the controls, each on `batch_size` new samples."""
    control_rate: float = 3e-3
    """The learning rate of the controls at the start; it falls to 0 by a cosine."""
    model_half_range: float = 20.0
    """The same range for the Transformer and the FANformer."""
    model_scale: float = 0.25
    """Factor that multiplies t before it enters them."""
    model_layers: int = 2
    """Layers of the Transformer and the FANformer."""
    model_size: int = 64
    """Their hidden size; the FANformer has the Transformer's number of parameters."""
    model_steps: int = 1000
    """Their AdamW steps."""
    model_rate: float = 1e-3
    """Their learning rate at the start."""
    batch_size: int = 256
    """Samples per step."""


@dataclass(frozen=True, kw_only=True)
class HolesSettings(Settings):
    """Leave-Square-Out: arithmetic on pairs of numbers, with a square of them left out of the training."""

    seeds: int = 5
    """Seeds of the weights and of the order of samples; both architectures have the same ones."""
    tasks: tuple[Task, ...] = ("modular", "linear")
    """`modular`: (a + b) mod 113, the hole centred at (56, 56); `linear`: a + 2 b + 3, centred at (50, 50)."""
    weight_decays: tuple[float, ...] = (0.0, 1.0)
    """AdamW's weight decays to try, each on all weights."""
    half_side: int = 10
    """The hole has 2 · half_side + 1 numbers a side: 441 pairs, which leaves 12,328."""
    num_layers: int = 1
    """Layers."""
    hidden_size: int = 128
    """Width; the FANformer has the Transformer's number of parameters."""
    num_heads: int = 4
    """Attention heads."""
    batch_size: int = 512
    """Pairs per step."""
    steps: int = 4000
    """AdamW steps: 500 epochs are 12,000."""
    learning_rate: float = 1e-3
    """Learning rate after a warm-up over the first hundredth of the steps."""
    cooldown: float = 0.25
    """Share of the steps, at the end, over which the learning rate falls to 0; 0 keeps it. With weight decay FANformers
    do not settle without it."""
    temperature: float = 0.5
    """Temperature at which the probability of the right answer is computed."""
    checkpoints: tuple[str, ...] = ()
    """Models fine-tuned on the conversations of --write-data, to be evaluated; none is trained then."""

    def stated(self) -> dict[str, Any]:
        """Return the fields that count where checkpoints are measured in place of the probe's own models."""
        names = ("checkpoints", "tasks", "half_side", "temperature") if self.checkpoints else tuple(asdict(self))
        return {name: getattr(self, name) for name in names}

    def problems(self) -> Iterator[str]:
        """Yield the broken rules."""
        if not self.tasks:
            yield "tasks is empty; name modular, linear or both"
        if not self.weight_decays or min(self.weight_decays) < 0:
            yield f"weight_decays is {list(self.weight_decays)}; name numbers from 0 on"
        if not 0 <= self.cooldown <= 1:
            yield f"cooldown is {self.cooldown}; it must lie in [0, 1], a share of the steps"
        if self.half_side > 50:
            yield f"half_side is {self.half_side}; it must be at most 50, so that the hole lies within the pairs"
        if self.hidden_size % (2 * self.num_heads):
            yield f"hidden_size is {self.hidden_size}; it must be a multiple of twice num_heads {self.num_heads}"


@dataclass(frozen=True, kw_only=True)
class CostSettings(Settings):
    """The cost of a FANformer beside its Transformer: parameters, FLOPs, memory."""

    presets: tuple[str, ...] = ("fanformer-300m", "fanformer-1b", "fanformer-7b")
    """The paper's sizes, by their names in configurations."""
    sequence_length: int = 2048
    """Tokens of a sequence, for FLOPs a token."""
    inference_length: int = 4096
    """Tokens of the sequence whose memory is counted, one at a time in half precision, as in the paper's table."""

    def problems(self) -> Iterator[str]:
        """Yield the broken rules."""
        if not self.presets:
            yield "presets is empty; name sizes, such as fanformer-1b"


@dataclass(frozen=True, kw_only=True)
class InferenceSettings(Settings):
    """Seconds and memory of prefill and decoding, of a FANformer and its two twins in turns."""

    preset: str | None = None
    """One of the paper's sizes (the paper: fanformer-1b); null: the sizes below."""
    num_layers: int = 8
    """Layers."""
    hidden_size: int = 512
    """Width."""
    num_heads: int = 8
    """Attention heads."""
    vocab_size: int = 8192
    """Token ids."""
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Number format of weights and activations: bf16 on a GPU, fp32 on a CPU; the paper has fp16."""
    prompt_tokens: int = 512
    """Tokens of the prefill (the paper: 4096)."""
    new_tokens: int = 32
    """Tokens to decode, one at a time."""
    batch_size: int = 1
    """Sequences at once (the paper: 1)."""
    rounds: int = 10
    """Rounds of measurement; in each, all three models take a turn, in another order."""

    def problems(self) -> Iterator[str]:
        """Yield the broken rules."""
        if self.hidden_size % (2 * self.num_heads):
            yield f"hidden_size is {self.hidden_size}; it must be a multiple of twice num_heads {self.num_heads}"


class Probe(NamedTuple):
    """A line of the verb's list."""

    about: str
    minutes: str
    """Minutes with the defaults: measured on one core of a machine in use (lipschitz, mod, cost), estimated for the
    others."""
    settings: type[Any]


PROBES: dict[str, Probe] = {
    "lipschitz": Probe("how far near inputs spread, by depth: the authors' notebook", "6", LipschitzSettings),
    "mod": Probe("the fit of t mod 5 (fig. 1a), with a FAN network and an MLP as controls", "14", ModSettings),
    "holes": Probe("arithmetic beside a square that is never trained on", "150", HolesSettings),
    "cost": Probe("parameters, FLOPs and memory beside the paper's table, by formula and counted", "1", CostSettings),
    "inference": Probe("prefill and decoding, a FANformer and its two twins in turns", "3", InferenceSettings),
}


def experiment(options: ExperimentOptions) -> None:
    """List the probes, or run one: measure, write its folder, and print its findings.

    If the folder already holds this probe's result with the same settings, print that and measure nothing.

    Raises:
        InputError: there is no such probe or setting, or the folder holds something else.
    """
    with ended_by_stop_signals(report_stopped, outcome="before the end; the same command keeps the runs that are done"):
        local = options.checkpoint and tuple(map(on_this_machine, options.checkpoint))
        _experiment(dataclasses.replace(options, checkpoint=local), lambda text: show(text.split("\n")))


def _experiment(options: ExperimentOptions, log: Log) -> None:
    if options.name is None:
        given = [option_name(name) for name in ("output", *SHORT, "write_data") if getattr(options, name) is not None]
        if given := [*options.overrides, *given]:
            raise InputError(f"{given[0]} comes without an experiment before it; name one of {', '.join(PROBES)}")
        for name, probe in PROBES.items():
            log(f"{name:{max(map(len, PROBES))}}  {probe.minutes:>4} min  {probe.about}")
        return
    settings = read_settings(options)
    if getattr(settings, "checkpoints", ()):
        # A run's folder means another checkpoint once the run goes on: the settings name the checkpoint itself.
        problems: list[str] = []
        paths = [collect_problems(problems, partial(_checkpoint, name)) for name in settings.checkpoints]
        settings = dataclasses.replace(settings, checkpoints=tuple(paths))
        _raise_problems(problems or _problems(settings, options.name))
    device.prepare_megatron()
    module = importlib.import_module(f"megatron_fanformer.experiments.{options.name}")
    if options.write_data is not None:
        log("\n".join(module.write_data(settings, options.write_data)))
        return

    folder = options.output or Path(FOLDER, options.name)
    stated = json.loads(json.dumps(settings.stated()))
    if (folder / RESULT).exists():
        result = read_result(folder)
        if (result.experiment, result.settings) != (options.name, stated):
            raise InputError(
                f"{folder} holds the result of {result.experiment} by other settings; name another --output, or remove "
                f"its {RESULT} to measure again (finished runs are kept)"
            )
    else:
        started = time.perf_counter()
        measured: Measured = module.measure(settings, folder, log)
        if measured.seconds is None:
            measured = dataclasses.replace(measured, seconds=time.perf_counter() - started)
        result = write_folder(folder, options.name, stated, measured)
    log("\n".join([*(finding.sentence for finding in result.findings), f"{folder / README} has all of it"]))


def _checkpoint(name: str) -> str:
    from megatron_fanformer.convert.recognition import MODELS, find_checkpoint

    return str(find_checkpoint(name, MODELS))


def read_settings(options: ExperimentOptions) -> Any:
    """Return the settings of the named probe: its defaults, the options, the fields.

    Raises:
        InputError: as `experiment`.
    """
    name = str(options.name)
    if name not in PROBES:
        raise InputError(f"{name!r} is no experiment; name one of {', '.join(PROBES)}")
    owner = PROBES[name].settings
    overrides = read_overrides(options.overrides)
    if stray := [given for given in overrides if not given.startswith(f"{name}.")]:
        raise InputError(f"--{stray[0]} is not of this experiment; write --{name}.FIELD VALUE")
    values = {given.removeprefix(f"{name}."): value for given, value in overrides.items()}
    for short in (*SHORT, "write_data"):
        if (value := getattr(options, short)) is None:
            continue
        field = SHORT.get(short, "checkpoints")  # only a probe of checkpoints has data to fine-tune on
        if field not in {entry.name for entry in dataclasses.fields(owner)}:
            raise InputError(f"{option_name(short)} has no effect in {name}; leave it out")
        if short in SHORT:
            values[field] = list(value) if isinstance(value, tuple) else value
    settings = build(values, owner, f"{name}.")
    _raise_problems(_problems(settings, name))
    return settings


def _problems(settings: Any, name: str) -> list[str]:
    """Return the rules that settings break, one line each: numbers are above 0, lists name each thing once."""
    problems = []
    for field, value in asdict(settings).items():
        if isinstance(value, int | float) and value <= 0 and field not in FROM_ZERO:
            problems.append(f"{name}.{field} is {value}; it must be above 0")
        elif isinstance(value, tuple) and len(set(value)) < len(value):
            problems.append(f"{name}.{field} is {list(value)}; name each once")
    return problems or [f"{name}.{problem}" for problem in settings.problems()]


def _raise_problems(problems: list[str]) -> None:
    if problems:
        raise InputError("\n".join(problems))
