"""Runs the probes, which are the paper's smaller experiments: each is a module with a function `measure`.

    FOLDER/*.png, README.md     pictures and findings, to look at
    FOLDER/result.json          the same as data, written last: a folder with result.json is complete
    FOLDER/runs/                finished runs of a probe that has many, which the next start does not repeat

The default settings are for a laptop: `PROBES` has the minutes that they take, docs/experiments.md their results.
"""

import dataclasses
import importlib
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from megatron_fanformer.configuration import build, read_overrides
from megatron_fanformer.errors import InputError
from megatron_fanformer.experiments.result import README, RESULT, Measured, read_result, write_folder
from megatron_fanformer.experiments.verbs import ExperimentOptions
from megatron_fanformer.processes import ended_by_stop_signals
from megatron_fanformer.runtime import device
from megatron_fanformer.terminal import show

FOLDER = "runs/experiments"
FROM_ZERO = ("cooldown",)
"""Settings that may be 0; every other number must be above 0."""

Task = Literal["modular", "linear"]


@dataclass(frozen=True, kw_only=True)
class LipschitzSettings:
    """How far models with random weights spread two near inputs, as the authors' notebook measures it."""

    seeds: int = 1  # seeds of weights and inputs; the notebook's is 0
    depths: tuple[int, ...] = (1, 2, 4)
    """Numbers of layers, which draw from one random generator in this order; the notebook goes on to 8, 12, … 196."""
    hidden_size: int = 512  # also the channels of the convolutions; a multiple of four times num_heads
    num_heads: int = 8
    samples: int = 10  # pairs of inputs; the constant is the largest of their ratios
    grid: int = 32  # each input is a grid of this many points a side
    epsilon: float = 1e-7  # standard deviation of the difference of the two inputs


@dataclass(frozen=True, kw_only=True)
class ModSettings:
    """The fit of t mod 5 (fig. 1a) by controls, which read t itself, and by the layers of language models."""

    seeds: int = 3  # of the weights and the samples; every model has the same ones
    half_range: float = 100.0
    """Controls are trained on |t| up to this number; outside is |t| from this number to twice the number."""
    control_size: int = 128  # width of the FAN network; the MLP has as many parameters
    control_steps: int = 4000  # AdamW steps, each on `batch_size` new samples
    control_rate: float = 3e-3  # the learning rate at the start; it falls to 0 by a cosine
    model_half_range: float = 20.0  # half_range of the Transformer and the FANformer
    model_scale: float = 0.25  # multiplies t before t enters the Transformer and the FANformer
    model_layers: int = 2
    model_size: int = 64  # the hidden size; the FANformer has the Transformer's number of parameters
    model_steps: int = 1000
    model_rate: float = 1e-3
    batch_size: int = 256


@dataclass(frozen=True, kw_only=True)
class HolesSettings:
    """Leave-Square-Out: arithmetic on pairs of numbers, with a square of them left out of the training."""

    seeds: int = 5  # of the weights and of the order of samples; both architectures have the same ones
    tasks: tuple[Task, ...] = ("modular", "linear")
    """`modular`: (a + b) mod 113, the hole centered at (56, 56); `linear`: a + 2 b + 3, centered at (50, 50)."""
    weight_decays: tuple[float, ...] = (0.0, 1.0)  # AdamW's, each on all weights
    half_side: int = 10  # the hole has 2 · half_side + 1 numbers a side: 441 of the 12,769 pairs; at most 50
    num_layers: int = 1
    hidden_size: int = 128  # the FANformer has the Transformer's number of parameters
    num_heads: int = 4
    batch_size: int = 512
    steps: int = 4000  # of AdamW: 500 epochs are 12,000
    learning_rate: float = 1e-3  # after a warm-up over the first hundredth of the steps
    cooldown: float = 0.25
    """Share of the steps, at the end, over which the learning rate falls to 0; 0: it does not fall. With weight decay,
    FANformers do not settle unless the rate falls."""
    temperature: float = 0.5  # at which the probability of the right answer is computed


@dataclass(frozen=True, kw_only=True)
class CostSettings:
    """The cost of a FANformer beside its Transformer: parameters, FLOPs, memory."""

    presets: tuple[str, ...] = ("fanformer-300m", "fanformer-1b", "fanformer-7b")
    sequence_length: int = 2048  # tokens, for FLOPs a token
    inference_length: int = 4096  # tokens whose memory is counted, one sequence in half precision, as in the paper


class Probe(NamedTuple):
    """A probe, as `experiment` lists it."""

    about: str
    minutes: str
    """Minutes with the defaults: measured on one core of a machine in use, estimated for holes."""
    settings: type[Any]


PROBES: dict[str, Probe] = {
    "lipschitz": Probe("how far near inputs spread, by depth: the authors' notebook", "6", LipschitzSettings),
    "mod": Probe("the fit of t mod 5 (fig. 1a), with a FAN network and an MLP as controls", "14", ModSettings),
    "holes": Probe("arithmetic beside a square that is never trained on", "150", HolesSettings),
    "cost": Probe("parameters, FLOPs and memory beside the paper's table, by formula and counted", "1", CostSettings),
}


def experiment(options: ExperimentOptions) -> None:
    """List the probes, or run one: measure, write its folder, and print its findings.

    If the folder already holds this probe's result with the same settings, print that result and measure nothing.

    Raises:
        InputError: there is no such probe or setting, or the folder holds something else.
    """
    if options.name is None:
        show(f"{name:9}  {probe.minutes:>4} min  {probe.about}" for name, probe in PROBES.items())
        return
    with ended_by_stop_signals("before the end; the same command keeps the runs that are done"):
        settings = read_settings(options)
        device.prepare_megatron()
        module = importlib.import_module(f"megatron_fanformer.experiments.{options.name}")
        folder = options.output or Path(FOLDER, options.name)
        settings_in_json = json.loads(json.dumps(asdict(settings)))  # as in result.json: lists, not tuples
        if (folder / RESULT).exists():
            result = read_result(folder)
            if (result.experiment, result.settings) != (options.name, settings_in_json):
                raise InputError(
                    f"{folder} holds the result of {result.experiment} by other settings; name another --output, or "
                    f"remove its {RESULT} to measure again (finished runs are kept)"
                )
        else:
            started = time.perf_counter()
            measured: Measured = module.measure(settings, folder, lambda line: show([line]))
            if measured.seconds is None:
                measured = dataclasses.replace(measured, seconds=time.perf_counter() - started)
            result = write_folder(folder, options.name, settings_in_json, measured)
        show([*(finding.sentence for finding in result.findings), f"{folder / README} has all of it"])


def read_settings(options: ExperimentOptions) -> Any:
    """Return the settings of the named probe: the values on the command line, and the defaults of all other settings.

    Raises:
        InputError: there is no such probe or setting, or a setting has a value that it cannot have.
    """
    name = str(options.name)
    if name not in PROBES:
        raise InputError(f"{name!r} is no experiment; name one of {', '.join(PROBES)}")
    overrides = read_overrides(options.overrides)
    if stray := [dotted_name for dotted_name in overrides if not dotted_name.startswith(f"{name}.")]:
        raise InputError(f"--{stray[0]} is not of this experiment; write --{name}.FIELD VALUE")
    values = {dotted_name.removeprefix(f"{name}."): value for dotted_name, value in overrides.items()}
    if options.seeds is not None:
        values["seeds"] = options.seeds
    settings = build(values, PROBES[name].settings, f"{name}.")
    for field, value in asdict(settings).items():
        if isinstance(value, int | float) and value <= 0 and field not in FROM_ZERO:
            raise InputError(f"{name}.{field} is {value}; it must be above 0")
        if value == ():
            raise InputError(f"{name}.{field} is empty; name one or more")
    # Settings without a hidden size, or without heads, get a default that breaks no rule.
    width, heads = getattr(settings, "hidden_size", 4), getattr(settings, "num_heads", 1)
    if width % (4 * heads):
        raise InputError(f"{name}.hidden_size is {width}; it must be a multiple of four times num_heads {heads}")
    return settings
