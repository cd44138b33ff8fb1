"""The verbs `train` and `config`; imports nothing that is slow."""

from dataclasses import dataclass
from pathlib import Path

from megatron_fanformer.errors import InputError
from megatron_fanformer.options import ANY_FIELD, PROGRAM, Verb, command_line, option, overrides, path_or_none
from megatron_fanformer.processes import ended_by_stop_signals
from megatron_fanformer.runtime import device
from megatron_fanformer.terminal import show, width


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Options of `train`."""

    config: Path
    """Configuration file (YAML)."""
    log_file: Path | None = option(None, metavar="PATH")
    """Log file; where there are several ranks, each has its own: PATH with the rank's number."""
    overrides: tuple[str, ...] = overrides()
    command_line: tuple[str, ...] = command_line()


@dataclass(frozen=True, kw_only=True)
class ConfigOptions:
    """Options of `config`."""

    schema: bool = option(False, exclusive="shown")
    """Print the JSON schema of configuration files."""
    resolved: bool = option(False, exclusive="shown")
    """Print all of --config, with presets and overrides applied, as YAML."""
    environment: bool = option(False, exclusive="shown")
    """Print what a run by --config sets in the environment of its ranks, and why."""
    config: Path | None = option(None, metavar="FILE", parse=path_or_none)
    """With --resolved and --environment: configuration file (YAML)."""
    gpus: int | None = option(None, metavar="N")
    """With --environment: ranks of the run (default: one replica's)"""
    overrides: tuple[str, ...] = overrides()


def _train(options: TrainOptions) -> None:
    from megatron_fanformer.runtime.heartbeat import report_stopped
    from megatron_fanformer.runtime.launch import end_with_launcher, report_failure

    with ended_by_stop_signals(report_stopped):  # from before what takes seconds to import
        end_with_launcher()
        device.quieten_libraries()  # the rest once the configuration is read
        from megatron_fanformer.training.last_lines import print_summary
        from megatron_fanformer.training.start import run_rank, start_run

        address = device.rank_address()
        if address is None:
            run = start_run(options.config, options.overrides, options.command_line, options.log_file)
        else:
            with report_failure():
                run = run_rank(options.config, options.overrides, address, options.log_file)
        if run is not None:
            print_summary(run)


def _config(options: ConfigOptions) -> None:
    from megatron_fanformer.training.config_reference import (
        WIDTH,
        environment_lines,
        field_list,
        resolved_text,
        schema_text,
    )

    stray = [*options.overrides, *(["--config"] if options.config else [])]
    shown = "--resolved" if options.resolved else "--environment" if options.environment else None
    if stray and not shown:
        raise InputError(
            f"{stray[0]} has no effect without --resolved or --environment; {PROGRAM} config --help lists the options"
        )
    if options.gpus is not None and not options.environment:
        raise InputError(f"--gpus has no effect without --environment; {PROGRAM} config --help lists the options")
    if shown and not options.config:
        raise InputError(f"{shown} needs --config FILE; name a configuration file")
    if options.environment and options.config:
        show(environment_lines(options.config, options.overrides, options.gpus, width()))
    elif options.config:
        show([resolved_text(options.config, options.overrides)], as_they_are=True)
    elif options.schema:
        show([schema_text()], as_they_are=True)
    else:
        show(field_list(width() or WIDTH).splitlines())


TRAIN = Verb(
    name="train",
    help="Train, or continue a run.",
    options=TrainOptions,
    run=_train,
    examples=(
        "train --config examples/tiny-cpu.yaml\n--training.train_iters 100",
        "train --config run.yaml\n--parallel.tensor_model_parallel_size 2",
    ),
    notes=ANY_FIELD,
    results_are_files=True,
    takes_signals=True,
)


CONFIG = Verb(
    name="config",
    help="List the configuration's fields; print its JSON schema, a resolved configuration, or a run's environment.",
    options=ConfigOptions,
    run=_config,
    examples=("config --resolved --config examples/tiny-cpu.yaml", "config --environment --config run.yaml --gpus 64"),
    notes="With --resolved and --environment, fields of the configuration can be set as --section.field VALUE.",
)
