"""The verb `inspect`: describes a path, verifies it, draws what a run has logged, or shows the samples of a step.

Nothing slow is imported before it is needed: data are described without torch.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_fanformer.durable_files import write_atomically
from megatron_fanformer.errors import InputError
from megatron_fanformer.options import PROGRAM, Verb, argument, option, overrides, path_or_none
from megatron_fanformer.runtime import device
from megatron_fanformer.stores import is_url
from megatron_fanformer.terminal import show

if TYPE_CHECKING:
    from megatron_fanformer.convert.recognition import Target
    from megatron_fanformer.inspect.report import Report

REMOVED = {
    "--trace": "a run's profiles are in its folder, traces/step-…/rank-….txt",
    "--follow": "use tail -f RUN/metrics.jsonl",
    "--hang": "what ranks did when a run hung is on its last line, and in the log files of logging.folder",
}
"""Options of before, and what to do instead."""


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
    """Make the sample indices and the order of the first epoch that a run of the configuration file PATH needs."""
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


USED_WITH: dict[str | None, tuple[str, ...]] = {
    "picture": (),
    "phases": (),
    "index": ("overrides",),
    "step": ("config", "full", "overrides", "json"),
    None: ("verify", "json"),
}
"""The options that go with one that chooses what to do; None: with none of these."""


def _inspect(options: InspectOptions) -> None:
    given = {field.name for field in fields(options) if getattr(options, field.name) != field.default}
    chosen = next((name for name in USED_WITH if name in given), None)
    if stray := sorted(given - {"path", chosen, *USED_WITH[chosen]}):
        name = options.overrides[0] if stray[0] == "overrides" else f"--{stray[0]}"
        condition = "without --step" if chosen is None else f"with --{chosen}"
        raise InputError(f"{name} has no effect {condition}; {PROGRAM} inspect --help lists the options")
    if chosen in ("index", "step"):
        device.hide_gpus()
        device.prepare_libraries()
    actions = {"picture": _draw_losses, "phases": _draw_phases, "index": _index_data, "step": inspect_step}
    actions.get(chosen or "", inspect_path)(options)


# -- what a path is


def inspect_path(options: InspectOptions) -> None:
    """Print what a dataset, a checkpoint or an export is; with --verify, whether it is intact.

    Raises:
        InputError: it is none of these, there is nothing to verify it against, or its run has removed it meanwhile.
        CorruptError: it cannot be read, or fails its verification.
    """
    from megatron_fanformer.checkpoint.remote import on_this_machine
    from megatron_fanformer.convert.recognition import Target, recognise
    from megatron_fanformer.data.manifest import read_any_manifest
    from megatron_fanformer.inspect.report import lines

    path = options.path
    if is_url(path) and (
        path.endswith((".npy", ".bin", ".idx")) or ("::" not in path and read_any_manifest(path) is not None)
    ):
        target = Target("token files", Path(path), (re.sub(r"\.(npy|bin|idx)$", "", path),))
    else:
        target = recognise(on_this_machine(path))
    report = _report(target, verify=options.verify)
    if options.json:
        _show_json(report)
    else:
        show(lines(report))


def _report(target: "Target", *, verify: bool) -> "Report":
    """Describe a target; with `verify`, check it first and add `verified`."""
    if target.is_data:
        from megatron_fanformer.inspect.dataset import check_data, describe_data

        verified = {"verified": check_data(target)} if verify else {}
        return {**describe_data(target), **verified}
    from megatron_fanformer.convert.checkpoints import removed_means_input_error
    from megatron_fanformer.convert.recognition import OURS, checkpoint_of
    from megatron_fanformer.inspect import checkpoint, export

    if target.kind == "megatron-lm":
        verified = {"verified": checkpoint.check_megatron_lm(target)} if verify else {}
        return {**checkpoint.describe_megatron_lm(target), **verified}
    if target.kind not in OURS:
        verified = {"verified": export.check_export(target)} if verify else {}
        return {**export.describe_export(target), **verified}
    # Looked up once: a run that goes on has others later. One that has none yet can be described.
    newest = checkpoint_of(target) if verify or target.kind == "checkpoint" else target.path
    with removed_means_input_error([newest]):
        verified = {"verified": checkpoint.check_checkpoint(newest)} if verify else {}
        describe = checkpoint.describe_run if target.kind == "run" else checkpoint.describe_checkpoint
        return {**describe(target.path), **verified}


def _show_json(value: "Report") -> None:
    show([json.dumps(value, indent=2, ensure_ascii=False)])


# -- what a run has logged


def _draw_losses(options: InspectOptions) -> None:
    from megatron_fanformer.train.metrics import loss_picture, points_of

    _draw(
        options,
        "picture",
        lambda run, metrics: loss_picture(metrics, title=str(run)) if points_of(metrics, "loss") else None,
        "loss: the run has not taken a step; draw it later",
    )


def _draw_phases(options: InspectOptions) -> None:
    from megatron_fanformer.inspect.phase_picture import phase_picture

    _draw(
        options,
        "phases",
        lambda run, metrics: phase_picture(metrics, title=f"{run}: phases of the FAN map"),
        "phase health: the run has not reached a step that logging.phase_interval divides, or its model has no phases",
    )


def _draw(
    options: InspectOptions, name: str, draw: Callable[[Path, list["Report"]], bytes | None], missing: str
) -> None:
    """Draw a run's metrics into the PNG that option `name` gives.

    Raises:
        InputError: the path is not a run's folder, its metrics are `missing`, or the picture cannot be written.
    """
    from megatron_fanformer.checkpoint.remote import on_this_machine
    from megatron_fanformer.checkpoint.run_folder import METRICS
    from megatron_fanformer.convert.recognition import recognise
    from megatron_fanformer.train.metrics import read_metrics

    target, picture = recognise(on_this_machine(options.path)), Path(getattr(options, name))
    if target.kind != "run":
        raise InputError(f"--{name} draws what a run has logged, but {options.path} is not a run's folder; name that")
    file = target.path / METRICS
    content = draw(target.path, read_metrics(target.path) if file.is_file() else [])
    if content is None:
        raise InputError(f"{file} has no {missing}")
    try:
        write_atomically(picture, content)
    except OSError as error:
        raise InputError(f"--{name} {picture} cannot be written ({error.strerror}); name another file") from error
    show([f"{picture}: the {'losses' if name == 'picture' else name} of {options.path}"])


# -- what a run reads


def _index_data(options: InspectOptions) -> None:
    """Make what a start of a run looks up of its data, in the folder of the index cache.

    Raises:
        InputError: the configuration is wrong, or its data are not what it needs.
        CorruptError: token files are damaged.
    """
    from megatron_fanformer.train.config import load_config

    if Path(options.path).suffix not in (".yaml", ".yml"):
        raise InputError(f"{options.path} is no configuration file (.yaml), as --index takes it; name one")
    run = load_config(Path(options.path), options.overrides)
    problems = [*run.model.problems(), *run.data.problems(), *run.training.problems()] or run.problems_of_steps(1)
    if problems:
        raise InputError("\n".join(problems))
    from megatron_fanformer.runtime import megatron_cpu  # imports torch: after errors in the input were reported

    megatron_cpu.install()
    from megatron_fanformer.train.preflight import check_data, with_steps
    from megatron_fanformer.train.run_log import run_log
    from megatron_fanformer.train.samples import run_datasets

    with run_log(rank=0):
        run = with_steps(run)
        run_datasets(run, check_data(run))
    show([f"{run.data.index_cache()}: ready for {options.path}"])


def inspect_step(options: InspectOptions) -> None:
    """Print the samples of a training step, and the documents that they come from.

    The path is a run, a checkpoint or a configuration file; or, with --config, token files that it trains on: samples
    without tokens of these are left out.

    Raises:
        InputError: the configuration, the step or the path is wrong; the run took the step's samples of other data.
        CorruptError: token files or a ledger are damaged, or a checkpoint is.
    """
    from megatron_fanformer.checkpoint import run_folder
    from megatron_fanformer.checkpoint.remote import on_this_machine
    from megatron_fanformer.convert.recognition import DESCRIPTIONS, OURS, recognise
    from megatron_fanformer.train.config import load_config

    path, config, step = on_this_machine(options.path), options.config, options.step
    assert step is not None
    run = only = None
    if Path(path).suffix in (".yaml", ".yml") and Path(path).is_file():
        config = config or Path(path)
    else:
        target = recognise(path)
        if target.kind in OURS:
            run = None if config else target
        elif not target.is_data:
            kind = DESCRIPTIONS[target.kind]
            raise InputError(f"{path} is {kind}, which does not say what it was trained on; name a run's folder")
        elif config is None:
            raise InputError(
                f"{path} is token files, and --step needs the configuration that trains on them; add --config FILE"
            )
        else:
            only = target
        config = config or target.path / run_folder.CONFIG
    loaded = load_config(config, options.overrides)
    from megatron_fanformer.runtime import megatron_cpu  # imports torch: after errors in the input were reported

    megatron_cpu.install()
    from megatron_fanformer.inspect.step import describe_step, refuse_former_data, step_lines

    folder = None
    if run is not None:
        refuse_former_data(run, step)
        folder = run.path if run.kind == "run" else run.path.parent.parent
    report = describe_step(loaded, step, only=only, folder=folder, full=options.full)
    if options.json:
        _show_json(report)
    else:
        show(step_lines(report))


INSPECT = Verb(
    name="inspect",
    help="Describe or verify data, a run, a checkpoint or an export; show the samples of a step.",
    options=InspectOptions,
    run=_inspect,
    examples=("inspect runs/demo/tokens/train --verify", "inspect runs/demo/run --step 200"),
    notes="With --step, fields of the configuration can be set as --section.field VALUE, after PATH.",
    removed=REMOVED,
)
