"""The verb `parity`: its options, and the layouts that it compares, checked before torch is imported."""

import dataclasses
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from megatron_fanformer.durable_files import file_problems
from megatron_fanformer.errors import InputError, collect_problems
from megatron_fanformer.model.config import TransformerImpl
from megatron_fanformer.options import ANY_FIELD, Verb, option
from megatron_fanformer.runtime import device

if TYPE_CHECKING:
    from megatron_fanformer.model.layouts import Layout
    from megatron_fanformer.train.config import RunConfig


@dataclass(frozen=True, kw_only=True)
class ParityConfig:
    """Options of `parity`."""

    file: Path = option(name="--config")
    """Configuration file (YAML)."""
    layouts: tuple[str, ...] = option((), metavar="LAYOUT")
    """Layouts to compare, such as tp=2,sp=true or "dp=2,distributed_optimizer=true,cp=2" (default: the configuration's
    own)"""
    steps: int = 20
    """Steps to train."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Number format of weights and activations."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device to run on, whatever the configuration says: a cluster's can be compared on a laptop, too."""
    transformer_impl: TransformerImpl = option("auto", metavar="LAYERS")
    """Implementation of the layers: local (megatron-core's and torch's), transformer_engine, or auto: Transformer
    Engine's if it can be imported."""
    report: Path | None = option(None, metavar="FILE")
    """Write everything as JSON."""
    overrides: tuple[str, ...] = ()


def _before(config: ParityConfig) -> "tuple[ParityConfig, RunConfig, dict[str, Layout]]":
    """Check the input before torch is imported; return the arguments of `parity`."""
    device.prepare_libraries()
    if problems := file_problems(report=config.report):
        raise InputError("\n".join(problems))
    run, named = read_layouts(config)
    from megatron_fanformer.runtime import megatron_cpu  # imports torch, so after errors are reported

    megatron_cpu.install()
    return config, run, named


def read_layouts(config: ParityConfig) -> "tuple[RunConfig, dict[str, Layout]]":
    """Read the configuration; return it with the layouts by name, which are checked for the model at its full size.

    Raises:
        InputError: the configuration or a layout is wrong; the message has one line for each problem.
    """
    from megatron_fanformer.model.layouts import configured_layout, parse_layout
    from megatron_fanformer.train.config import load_config

    run = load_config(config.file, config.overrides)
    run = dataclasses.replace(
        run,
        kernels=dataclasses.replace(run.kernels, transformer_impl=config.transformer_impl),
        # Runs are compared by bounds, not bit for bit, so a GPU's libraries need not be deterministic.
        runtime=dataclasses.replace(run.runtime, device=config.device, deterministic_mode=False),
    )
    problems = [] if config.steps >= 1 else [f"--steps is {config.steps}; it must be at least 1"]
    named = {} if config.layouts else dict([configured_layout(run.parallel, run.kernels)])
    for text in config.layouts:
        layout = collect_problems(problems, partial(parse_layout, text, config.transformer_impl))
        named |= {} if layout is None else {text: layout}
    for section in (run.model, run.runtime, run.optimizer, run.training):  # not of `data`, which parity does not read
        problems += section.problems()
    for text, layout in () if problems else named.items():  # the rules of layouts need valid sections
        problems += [f"layout {text!r}: {problem}" for problem in _layout_problems(run, layout)]
    if problems:
        raise InputError("\n".join(problems))
    return run, named


def _layout_problems(run: "RunConfig", layout: "Layout") -> list[str]:  # at the model's full size
    from megatron_fanformer.model.layout_rules import batch_problems

    batch, micro = run.training.global_batch_size, run.training.micro_batch_size
    # The rules for the model and the batch require a layout that is valid by itself.
    return layout.problems() or [
        *dataclasses.replace(run, parallel=layout.parallel, kernels=layout.kernels).problems_of_layout(),
        *batch_problems(layout.parallel, layout.parallel.data_parallel_size or 1, batch, micro),
    ]


PARITY = Verb(
    name="parity",
    help="Show that parallel layouts train the same model as one process.",
    options=ParityConfig,
    run="megatron_fanformer.parity.run:parity",
    before=_before,
    examples=(
        "parity --config examples/tiny-cpu.yaml\n--layouts tp=2 pp=2",
        "parity --config run.yaml --layouts tp=2,sp=true\n--dtype bf16 --transformer-impl local",
    ),
    notes=ANY_FIELD,
    removed={"--communication": "plan --report has the bytes of a layout's collectives, by formula"},
)
