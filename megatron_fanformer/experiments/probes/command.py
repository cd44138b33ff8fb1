"""Runs `megatron-fanformer experiment`: reads the options, runs the probe, and writes its folder.

    FOLDER/*.png, README.md     what was found, to look at
    FOLDER/result.json          the same as data, written last: a folder that has it is whole
    FOLDER/runs/                what a probe of many runs has finished, so that it goes on from there

One process at a time measures into a folder.
"""

import dataclasses
import importlib
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron_fanformer.configuration import build, read_overrides
from megatron_fanformer.durable_files import take_lock
from megatron_fanformer.errors import InputError, collect_problems
from megatron_fanformer.experiments.probes.settings import PROBES
from megatron_fanformer.experiments.report.page import README, write_folder
from megatron_fanformer.experiments.result import RESULT, Log, Measured, Result, read_result, this_machine
from megatron_fanformer.options import Verb, argument, option, option_name, overrides
from megatron_fanformer.processes import ended_by_stop_signals
from megatron_fanformer.runtime import device
from megatron_fanformer.terminal import show

FOLDER = "runs/experiments"
# The options that stand for a field of the settings, by their name there.
SHORT = {"seeds": "seeds", "checkpoint": "checkpoints"}

OPTIONS = ("output", *SHORT, "write_data")


@dataclass(frozen=True, kw_only=True)
class ExperimentOptions:
    """Options of `experiment`."""

    name: str | None = argument(None, metavar="NAME")
    """lipschitz, mod, holes, cost or inference; without one, they are listed with their minutes."""
    output: Path | None = option(None, metavar="FOLDER")
    """Folder for what it leaves (default: runs/experiments/NAME)"""
    seeds: int | None = option(None, metavar="N")
    """Number of seeds; every model has the same ones."""
    checkpoint: tuple[str, ...] | None = option(None, metavar="CHECKPOINT", repeated=True)
    """holes: a fine-tuned model; may be repeated."""
    write_data: Path | None = option(None, metavar="FOLDER")
    """holes: write conversations to fine-tune on, and end."""
    overrides: tuple[str, ...] = overrides()


def experiment(options: ExperimentOptions, ready: Callable[[], None], log: Log = print) -> None:
    """List the probes, or run one: measure, write its folder, and print its findings.

    If the folder already holds this probe's result with the same settings, print that and measure nothing.

    Args:
        ready: prepares the process for torch and megatron-core, once nothing is wrong with the request.

    Raises:
        InputError: there is no such probe or setting, or the folder holds something else.
    """
    if options.name is None:
        given = [*options.overrides, *(option_name(name) for name in OPTIONS if getattr(options, name) is not None)]
        if given:
            raise InputError(f"{given[0]} comes without an experiment before it; name one of {', '.join(PROBES)}")
        for name, probe in PROBES.items():
            log(f"{name:{max(map(len, PROBES))}}  {probe.minutes:>4} min  {probe.about}")
        return
    settings = read_settings(options)
    if options.write_data is not None and options.name != "holes":
        raise InputError(f"--write-data has no effect in {options.name}; leave it out")
    settings = _with_checkpoints(settings, options.name)
    ready()
    module = importlib.import_module(f"megatron_fanformer.experiments.probes.{options.name}")
    if options.write_data is not None:
        log("\n".join(module.write_data(settings, options.write_data)))
        return

    folder = options.output or Path(FOLDER, options.name)
    with _alone_in(folder):
        stated = json.loads(json.dumps(settings.counting()))
        if (folder / RESULT).exists():
            result = read_result(folder)
            if (result.experiment, result.settings) != (options.name, stated):
                raise InputError(
                    f"{folder} holds the result of {result.experiment} by other settings; name another --output, or "
                    f"remove its {RESULT} to measure again (finished runs are kept)"
                )
        else:
            started = time.perf_counter()
            measured: Measured = module.measure(settings, folder, log)
            result = Result(
                experiment=options.name,
                settings=stated,
                machine=this_machine(),
                seconds=time.perf_counter() - started if measured.seconds is None else measured.seconds,
                findings=measured.findings,
                tables=measured.tables,
                pictures=list(measured.pictures),
            )
            write_folder(folder, result, measured.pictures)
    log("\n".join([*(finding.sentence for finding in result.findings), f"{folder / README} has all of it"]))


def _with_checkpoints(settings: Any, probe: str) -> Any:
    """Return settings that name the checkpoints themselves: a run's folder means another one once the run goes on.

    Raises:
        InputError: there is no such checkpoint, or two names mean one.
    """
    if not getattr(settings, "checkpoints", ()):
        return settings
    problems: list[str] = []
    found = [collect_problems(problems, partial(_checkpoint, name)) for name in settings.checkpoints]
    if problems:
        raise InputError("\n".join(problems))
    settings = dataclasses.replace(settings, checkpoints=tuple(found))
    _refuse_problems(settings, probe)
    return settings


def _checkpoint(name: str) -> str:
    from megatron_fanformer.convert.recognition import MODELS, OURS, checkpoint_of, iteration_of, recognise

    target = recognise(name, MODELS)
    if target.kind in OURS:
        return str(checkpoint_of(target))
    return str(iteration_of(target) if target.kind == "megatron-lm" else target.path)


def read_settings(options: ExperimentOptions) -> Any:
    """Return the settings of the named probe: its defaults, the options, the fields.

    Raises:
        InputError: as `experiment`.
    """
    if options.name not in PROBES:
        raise InputError(f"{options.name!r} is no experiment; name one of {', '.join(PROBES)}")
    owner = PROBES[options.name].settings
    overrides = read_overrides(options.overrides)
    if stray := [name for name in overrides if name != options.name]:
        raise InputError(f"--{stray[0]}.… is not of this experiment; write --{options.name}.FIELD VALUE")
    values = dict(overrides.get(options.name, {}))
    known = {field.name for field in dataclasses.fields(owner)}
    for short, field in SHORT.items():
        if (value := getattr(options, short)) is None:
            continue
        if field not in known:
            raise InputError(f"{option_name(short)} has no effect in {options.name}; leave it out")
        values[field] = list(value) if isinstance(value, tuple) else value
    settings = build(values, owner, f"{options.name}.")
    _refuse_problems(settings, options.name)
    return settings


def _refuse_problems(settings: Any, name: str) -> None:
    if found := settings.problems():
        raise InputError("\n".join(f"{name}.{problem}" for problem in found))


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Keep other processes from measuring into this folder meanwhile."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = take_lock(folder / ".lock", wait=False)
    if lock is None:
        raise InputError(f"another process measures into {folder}; wait for it, or name another --output")
    try:
        yield
    finally:
        os.close(lock)


def _experiment(options: ExperimentOptions) -> None:
    from megatron_fanformer.runtime.launch import report_stopped

    with ended_by_stop_signals(report_stopped, outcome="before the end; the same command keeps the runs that are done"):
        from megatron_fanformer.checkpoint.remote import on_this_machine

        local = options.checkpoint and tuple(map(on_this_machine, options.checkpoint))
        options = dataclasses.replace(options, checkpoint=local)
        experiment(options, device.prepare_megatron, lambda text: show(text.split("\n")))


EXPERIMENT = Verb(
    name="experiment",
    help="One of the paper's smaller experiments, on this machine.",
    options=ExperimentOptions,
    run=_experiment,
    examples=(
        "experiment mod --output runs/mod",
        "experiment holes --seeds 2 --holes.weight_decays [0.0]",
    ),
    notes="Every setting of an experiment can be set as --NAME.FIELD VALUE; its result.json lists them.",
    results_are_files=True,
    takes_signals=True,
)
