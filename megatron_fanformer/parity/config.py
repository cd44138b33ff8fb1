"""Configuration and layouts of `megatron-fanformer parity`, read and checked before torch is imported."""

import dataclasses

from megatron_fanformer.errors import InputError
from megatron_fanformer.model.layout_rules import batch_problems, document_problems, layout_problems, z_loss_problems
from megatron_fanformer.model.layouts import Layout, own_layout, parse_layout
from megatron_fanformer.parity.verb import ParityConfig
from megatron_fanformer.training.config import RunConfig, load_config


def read_layouts(config: ParityConfig) -> tuple[RunConfig, dict[str, Layout]]:
    """Return the configuration, and the layouts by their names, each checked on the configuration at its full size.

    Raises:
        InputError: the configuration or a layout is wrong; every problem, one line each.
    """
    run = load_config(config.file, config.overrides)
    run = dataclasses.replace(
        run,
        kernels=dataclasses.replace(run.kernels, transformer_impl=config.transformer_impl),
        # Layouts are checked against bounds, not bit for bit: a GPU's libraries need not be deterministic.
        runtime=dataclasses.replace(run.runtime, device=config.device, deterministic_mode=False),
    )
    found = []
    if config.steps < 1:
        found.append(f"--steps is {config.steps}; it must be at least 1")
    named: dict[str, Layout] = {}
    if not config.layouts:
        named = dict([own_layout(run.parallel, run.kernels)])
    for text in config.layouts:
        try:
            named[text] = parse_layout(text, config.transformer_impl)
        except InputError as error:
            found.append(str(error))
    for section in (run.model, run.runtime, run.optimizer, run.training):  # data is not read
        found += section.problems()
    for text, layout in named.items() if not found else ():
        found += [f"layout {text!r}: {problem}" for problem in _problems(run, layout)]
    if found:
        raise InputError("\n".join(found))
    return run, named


def _problems(run: RunConfig, layout: Layout) -> list[str]:
    batch, micro = run.training.global_batch_size, run.training.micro_batch_size
    if found := layout.problems():  # the rules of a model and a batch take a layout that is valid by itself
        return found
    return [
        *layout_problems(run.model, layout.parallel),
        *run.optimizer.joint_problems(layout.parallel),
        *z_loss_problems(run.training.z_loss_coefficient, layout.kernels),
        *(document_problems(layout.parallel, layout.kernels) if run.data.reset_attention_mask else ()),
        *batch_problems(layout.parallel, layout.parallel.data_parallel_size or 1, batch, micro),
    ]
