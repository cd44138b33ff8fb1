"""Writes a sweep's file that compares the model of a run with others of as many parameters."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import yaml

from megatron_fanformer.configuration import by_dotted_names, dotted, overlaid, read_overrides, read_values
from megatron_fanformer.durable_files import write_atomically
from megatron_fanformer.errors import InputError
from megatron_fanformer.experiments.intervals import FEWEST_SEEDS
from megatron_fanformer.experiments.sweeps.config import LOSS, OVERRIDDEN
from megatron_fanformer.experiments.sweeps.file import Sweep, metrics_of, sweep_of
from megatron_fanformer.experiments.sweeps.verb import SweepOptions
from megatron_fanformer.experiments.variants import VARIANTS, variant_like
from megatron_fanformer.model.config import FANformerConfig
from megatron_fanformer.training.config import RunConfig, advice, config_from_dict

AXIS = "model"
COMPARED = ("transformer", "fanformer")  # where nothing is named
SUFFIXES = (".yaml", ".yml")
HEADER = """\
# {points}, from {base}: as many parameters, the same steps and data.
# All have one learning rate, which may suit one of them best: `tune` finds that of each (docs/experiments.md#sweeps).
#
# Start: megatron-fanformer sweep {file} run

"""


def write_sweep(options: SweepOptions) -> Sweep:
    """Write the file that `sweep FILE init` describes, checked as `run` would check it; returns the sweep.

    Raises:
        InputError: the file is there, nothing measures what is to be compared, or a cell could not be trained.
    """
    file, names = options.file, options.compare or COMPARED
    if options.config is None:
        raise InputError("init needs the configuration of a run; add --config RUN_YAML")
    if file.suffix not in SUFFIXES:
        raise InputError(f"{file} is no name for a sweep's file; name it NAME.yaml")
    if file.exists():
        raise InputError(f"{file} exists, and init replaces nothing; name another file")
    if len(names) < 2 or len({*names}) < len(names) or not {*names} <= VARIANTS.keys():
        raise InputError(f"--compare is {' '.join(names)}; name two or more of {', '.join(VARIANTS)}, each once")
    overrides = read_overrides(options.overrides, advice=advice)
    changes = dotted(overrides)
    if own := [name for name in OVERRIDDEN if name in changes]:
        raise InputError(f"--{own[0]} has no effect with init: each cell has its own; leave it out")
    values = overlaid(read_values(options.config), overrides)
    base = config_from_dict(values, report=lambda _notice: None)  # what it would say, the cells say
    metric = metrics_of(base)[0]
    if metric == LOSS:
        raise InputError(
            f"{options.config} has no validation, by which models are compared; set data.valid_data, or data.split "
            "such as '95,5,0'"
        )
    values = {
        "experiment": f"{names[0]} and {', '.join(names[1:])}",
        "folder": str(file.with_suffix("")),
        "base": os.path.relpath(os.path.realpath(options.config), os.path.realpath(file.parent)),  # through links, too
        **({"changes": changes} if changes else {}),
        "axes": {AXIS: {name: _changes(base, name) for name in names}},
        "seeds": FEWEST_SEEDS if options.seeds is None else options.seeds,
        "report": {
            "compare": AXIS,
            "baseline": names[0],
            "primary": [[name, names[0]] for name in names[1:]],
            "metric": metric,
        },
    }
    sweep = sweep_of(file, values, needs_data=False, base_file=options.config)
    header = HEADER.format(points=values["experiment"].capitalize(), base=values["base"], file=file)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, header + _as_yaml(values))
    except OSError as error:
        raise InputError(f"{file} cannot be written ({error.strerror}); name another file") from None
    return sweep


def _changes(base: RunConfig, name: str) -> dict[str, Any]:
    """Return the fields of the model in which a variant differs from the run's."""
    model = variant_like(base.model, name, divided_by=base.parallel.tensor_model_parallel_size)
    before, after = (_plain(each) for each in (base.model, model))
    return {f"model.{field}": value for field, value in after.items() if before[field] != value}


def _plain(model: FANformerConfig) -> Mapping[str, Any]:
    return by_dotted_names(dataclasses.asdict(model))


def _as_yaml(values: dict[str, Any]) -> str:
    """Return sections as blocks, and what one point changes on its line, as in the sweeps that ship."""
    return yaml.safe_dump(values, sort_keys=False, default_flow_style=None, width=110, allow_unicode=True)
