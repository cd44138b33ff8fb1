"""The verbs `train` and `config`; imports nothing slow."""

from dataclasses import dataclass
from pathlib import Path

from megatron_fanformer.durable_files import file_problems, write_atomically
from megatron_fanformer.errors import InputError
from megatron_fanformer.options import ANY_FIELD, Verb, option
from megatron_fanformer.processes import ended_by_stop_signals
from megatron_fanformer.runtime import device
from megatron_fanformer.terminal import show


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Options of `train`."""

    config: Path
    """Configuration file (YAML)."""
    overrides: tuple[str, ...] = ()
    command_line: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ConfigOptions:
    """Options of `config`."""

    resolved: bool = False
    """Print all of --config, with presets and overrides applied, as YAML."""
    from_megatron: tuple[str, ...] | None = option(None, metavar="ARGS", nargs="...")
    """Convert arguments of Megatron-LM's pretrain_gpt.py, which follow this option, to a configuration. Print it, and
    the arguments that it lacks. Put this command in the place of `torchrun … pretrain_gpt.py` in a launch script."""
    config: Path | None = option(None, metavar="FILE", needs=("resolved",))
    """With --resolved: configuration file (YAML)."""
    output: Path | None = option(None, metavar="FILE", needs=("from_megatron",))
    """With --from-megatron: new file for the configuration; only what it lacks is printed."""
    overrides: tuple[str, ...] = option((), needs=("resolved",))


def train(options: TrainOptions) -> None:
    """Run `train`."""
    from megatron_fanformer.runtime.launch import end_with_launcher, report_failure

    with report_failure(), ended_by_stop_signals():  # also while slow modules are imported
        end_with_launcher()
        device.quieten_libraries()
        from megatron_fanformer.train.start import run_rank, start_run

        address = device.rank_address()
        if address is None:
            start_run(options.config, options.overrides, options.command_line)
        else:
            run_rank(options.config, options.overrides, address)


def config(options: ConfigOptions) -> None:
    """Run `config`."""
    if options.from_megatron is not None:
        from megatron_fanformer.train.megatron_arguments import convert

        if options.output is not None and (problems := file_problems(output=options.output)):
            raise InputError("\n".join(problems))
        if options.output is not None and options.output.exists():
            raise InputError(f"{options.output} exists already; name another file, or remove it")
        converted = convert(options.from_megatron)
        if options.output is None:
            show([converted.text().rstrip()])
        else:
            write_atomically(options.output, converted.text())
            show([f"wrote {options.output}", *converted.lines()])
        return
    from megatron_fanformer.train.config_reference import field_list, resolved_text

    if options.resolved and not options.config:
        raise InputError("--resolved needs --config FILE; name a configuration file")
    show([resolved_text(options.config, options.overrides) if options.config else field_list()])


TRAIN = Verb(
    name="train",
    help="Train, or continue a run.",
    options=TrainOptions,
    run="megatron_fanformer.train.verbs:train",
    examples=(
        "train --config examples/tiny-cpu.yaml\n--training.train_iters 100",
        "train --config run.yaml\n--parallel.tensor_model_parallel_size 2",
    ),
    notes=ANY_FIELD,
    removed={"--log-file": "set logging.folder, in which every rank has a log file"},
)

CONFIG = Verb(
    name="config",
    help="List the configuration's fields; print a resolved configuration; or turn arguments of Megatron-LM into one.",
    options=ConfigOptions,
    run="megatron_fanformer.train.verbs:config",
    examples=(
        "config --resolved --config examples/tiny-cpu.yaml",
        "config --output run.yaml --from-megatron\n--num-layers 16 --hidden-size 2048 --model.vocab_size 128256",
    ),
    removed={
        "--schema": "config lists every field with its type",
        "--environment": "megatron_fanformer/runtime/environment.py has the variables that a run sets, and why",
    },
    notes="With --resolved and --from-megatron, fields of the configuration can be set as --section.field VALUE.",
)
