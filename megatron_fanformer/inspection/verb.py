"""The verb `inspect`, and its options; imports nothing that is slow."""

from dataclasses import dataclass, fields
from pathlib import Path

from megatron_fanformer.errors import InputError
from megatron_fanformer.options import PROGRAM, Verb, argument, option, overrides, path_or_none
from megatron_fanformer.runtime import device
from megatron_fanformer.stores import is_url


@dataclass(frozen=True, kw_only=True)
class InspectOptions:
    """Options of `inspect`."""

    path: str = argument(metavar="PATH")
    """Token files (a prefix, one of them, a blend file, a folder), a run or a checkpoint, or an exported folder; the
    URL of a prefix, a token file, a run or a checkpoint; with --step and --index a configuration file."""
    verify: bool = False
    """Check that all of it is present and undamaged."""
    json: bool = False
    """Print one JSON object."""
    index: bool = False
    """Make what a run of the configuration file PATH looks up at its start, on a login node beforehand: the largest
    ids of token files without a manifest, sample indices, the order of the first epoch."""
    follow: bool = False
    """Print the steps, evaluations and checkpoints of the run PATH while it goes on."""
    picture: str | None = option(None, metavar="FILE")
    """Draw the training and validation losses of the run PATH into this PNG."""
    phases: str | None = option(None, metavar="FILE")
    """Draw the phase health that a run has logged into this PNG."""
    step: int | None = None
    """Show the samples of this training step, of a run or of --config."""
    config: Path | None = option(None, metavar="FILE", parse=path_or_none)
    """With --step: the configuration that trains on PATH."""
    full: bool = False
    """With --step: show whole texts."""
    overrides: tuple[str, ...] = overrides()


def _inspect(options: InspectOptions) -> None:
    from megatron_fanformer.checkpoint.remote import on_this_machine
    from megatron_fanformer.inspection import command

    path, step, config = options.path, options.step, options.config
    if "--trace" in options.overrides:
        raise InputError("--trace is no option any more; a run's profiles are in its folder, traces/step-…/rank-….txt")
    if options.phases is not None:
        _refuse_others(options, "phases")
        command.draw_phases(path, Path(options.phases))
    elif options.picture is not None:
        _refuse_others(options, "picture")
        command.draw_losses(path, Path(options.picture))
    elif options.follow:
        _refuse_others(options, "follow")
        command.follow_run(path)
    elif options.index:
        _refuse_others(options, "index", "overrides")
        device.hide_gpus()
        device.prepare_libraries()
        command.index_data(path, options.overrides)
    elif step is None:
        if stray := [*options.overrides, *(["--config"] if config else []), *(["--full"] if options.full else [])]:
            remedy = f"{PROGRAM} inspect --help lists the options"
            if stray[0] == "--hang":
                remedy = "what ranks did when a run hung is on its last line, and in the log files of logging.folder"
            raise InputError(f"{stray[0]} has no effect without --step; {remedy}")
        is_remote_data = is_url(path) and (path.endswith((".npy", ".bin", ".idx")) or _has_manifest(path))
        command.inspect_path(
            path if is_remote_data else on_this_machine(path), verify=options.verify, json=options.json
        )
    elif options.verify:
        raise InputError("--verify checks files and --step shows samples; use one at a time")
    else:
        device.hide_gpus()
        device.prepare_libraries()
        command.inspect_step(
            on_this_machine(path), step, config, options.overrides, full=options.full, json=options.json
        )


def _refuse_others(options: InspectOptions, chosen: str, *beside: str) -> None:
    """Raise InputError where an option is given that has no effect with the chosen one."""
    for field in fields(options):
        value = getattr(options, field.name)
        is_given = value is not None and value is not False and value != ()
        if is_given and field.name not in ("path", chosen, *beside):
            given = value[0] if field.name == "overrides" else f"--{field.name}"
            raise InputError(f"{given} has no effect with --{chosen}; use one at a time")


def _has_manifest(url: str) -> bool:
    """Return whether a URL is that of a prefix which `prepare` has written."""
    from megatron_fanformer.data.manifest import read_any_manifest

    return "::" not in url and read_any_manifest(url) is not None


INSPECT = Verb(
    name="inspect",
    help="Describe or verify data, a run, a checkpoint or an export; follow a run; show the samples of a step.",
    options=InspectOptions,
    run=_inspect,
    examples=("inspect runs/demo/tokens/train --verify", "inspect runs/demo/run --step 200"),
    notes="With --step, fields of the configuration can be set as --section.field VALUE, after PATH.",
)
