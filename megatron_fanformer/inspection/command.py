"""The verb `inspect`: says what a path is, verifies it, or shows the samples of a training step."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from megatron_fanformer.checkpoint import store
from megatron_fanformer.durable_files import write_atomically
from megatron_fanformer.errors import InputError, escaped
from megatron_fanformer.formats.recognition import DESCRIPTIONS, OURS, Target, checkpoint_of, recognise
from megatron_fanformer.inspection.report import Advance, Progress, Report, as_json
from megatron_fanformer.stores import is_url
from megatron_fanformer.terminal import show


def inspect_path(path: str, *, verify: bool, json: bool) -> None:
    """Print what a dataset, a checkpoint or an export is; with `verify`, whether it is intact.

    Raises:
        InputError: it is none of these, there is nothing to verify it against, or a run that goes on has removed it.
        CorruptError: it cannot be read, or fails its verification; names the file, and what differs.
    """
    if is_url(path):  # of a token file
        target = Target("token files", Path(path), (re.sub(r"\.(npy|bin|idx)$", "", path),))
    else:
        target = recognise(path)
    verified = {}
    with ExitStack() as stack:
        describe, check = _actions(target, stack, verify=verify)
        if verify:
            verified["verified"] = check(_progress)
        report = describe()
    if json:
        show([as_json({**report.as_object(), **verified})])
    else:
        show([*report.lines(), *(f"verified: {agrees}" for agrees in verified.values())])


def _actions(
    target: Target, stack: ExitStack, *, verify: bool
) -> tuple[Callable[[], Report], Callable[[Progress], str]]:
    """Return functions that describe a target and that check it.

    Imports what the kind of target needs: data neither torch nor megatron-core.
    """
    if target.is_data:
        from megatron_fanformer.inspection import dataset, dataset_check

        return partial(dataset.describe_data, target), partial(dataset_check.check_data, target)
    if target.kind not in OURS and target.kind != "megatron-lm":
        from megatron_fanformer.inspection import export

        return partial(export.describe_export, target), partial(export.check_export, target)
    from megatron_fanformer.formats.checkpoints import blaming_removal
    from megatron_fanformer.inspection import checkpoint

    if target.kind == "megatron-lm":
        return partial(checkpoint.describe_megatron_lm, target), partial(checkpoint.check_megatron_lm, target)
    describe = checkpoint.describe_run if target.kind == "run" else checkpoint.describe_checkpoint
    # Looked up once: a run that goes on has others later. One that has none yet can be described.
    found = checkpoint_of(target) if verify or target.kind == "checkpoint" else target.path
    stack.enter_context(blaming_removal([found]))
    return partial(describe, target.path), partial(checkpoint.check_checkpoint, found)


def draw_phases(path: str, picture: Path) -> None:
    """Draw the health of a run's phases into a PNG.

    Raises:
        InputError: the path is not a run's folder, or its metrics have nothing of it; the picture cannot be written.
    """
    from megatron_fanformer.inspection.phase_picture import phase_picture

    content = phase_picture(_run_of(path, "phases", "draws what a run has logged"))
    _write_picture(picture, content, "phases")
    show([f"{picture}: the phases of {path}"])


def draw_losses(path: str, picture: Path) -> None:
    """Draw the training and validation losses of a run into a PNG.

    Raises:
        InputError: the path is not a run's folder, or it has logged no loss; the picture cannot be written.
    """
    from megatron_fanformer.training.loss_picture import loss_picture, points_of
    from megatron_fanformer.training.metrics import read_metrics

    run = _run_of(path, "picture", "draws what a run has logged")
    metrics = read_metrics(run) if (run / store.METRICS).is_file() else []
    if not points_of(metrics, "loss"):
        raise InputError(f"{run / store.METRICS} has no loss: the run has not taken a step; draw it later")
    _write_picture(picture, loss_picture(metrics, title=str(run)), "picture")
    show([f"{picture}: the losses of {path}"])


def follow_run(path: str) -> None:
    """Print how far a run is, and lines about it until it ends.

    Raises:
        InputError: the path is not a run's folder, or nothing runs there.
    """
    from megatron_fanformer.inspection.run_progress import follow

    for line in follow(_run_of(path, "follow", "waits for what a run writes")):
        print(escaped(line), flush=True)


def _run_of(path: str, option: str, does: str) -> Path:
    """Return a run's folder. Raises InputError where the path is something else."""
    target = recognise(path)
    if target.kind != "run":
        raise InputError(f"--{option} {does}, but {path} is not a run's folder; name that")
    return target.path


def _write_picture(picture: Path, content: bytes, option: str) -> None:
    try:
        write_atomically(picture, content)
    except OSError as error:
        raise InputError(f"--{option} {picture} cannot be written ({error.strerror}); name another file") from error


@contextmanager
def _progress(total: int) -> Iterator[Advance]:
    """Yield a bar while the block reads `total` bytes; nothing where the output is not a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True, markup=False)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)
        yield lambda count: bar.advance(task, count)


def index_data(path: str, overrides: Sequence[str]) -> None:
    """Make what a start of a run looks up of its data, in the folder of the index cache, and log how far it is.

    Args:
        path: a configuration file.
        overrides: `--section.field VALUE`, as for `train`.

    Raises:
        InputError: the configuration is wrong, or its data are not what it needs.
        CorruptError: token files are damaged.
    """
    from megatron_fanformer.training.config import load_config

    if Path(path).suffix not in (".yaml", ".yml"):
        raise InputError(f"{path} is no configuration file (.yaml), as --index takes it; name one that trains on it")
    run = load_config(Path(path), overrides)
    if found := [*run.model.problems(), *run.data.problems(), *run.training.problems()] or run.problems_of_steps(1):
        raise InputError("\n".join(found))
    from megatron_fanformer.runtime import megatron_cpu  # imports torch: after errors in the input were reported

    megatron_cpu.install()
    from megatron_fanformer.training.chats import with_steps
    from megatron_fanformer.training.preflight import check_data
    from megatron_fanformer.training.run_log import run_log
    from megatron_fanformer.training.samples import run_datasets

    with run_log(rank=0):
        run = with_steps(run)
        run_datasets(run, check_data(run))
    show([f"{run.data.index_cache()}: ready for {path}"])


def inspect_step(
    path: str, step: int, config: Path | None, overrides: Sequence[str], *, full: bool, json: bool
) -> None:
    """Print the samples of a training step, and the documents that they come from.

    Args:
        path: a run's folder, a checkpoint or a configuration file; or, with `config`, token files that it trains on:
            samples without tokens of these are left out.
        overrides: `--section.field VALUE`, as for `train`.

    Raises:
        InputError: the configuration, the step or the path is wrong; the run took the step's samples of other data.
        CorruptError: token files or a ledger are damaged, or a checkpoint is.
    """
    from megatron_fanformer.training.config import load_config

    file, only, named = _configuration_of(path, config)
    run = load_config(file, overrides)
    from megatron_fanformer.runtime import megatron_cpu  # imports torch: after errors in the input were reported

    megatron_cpu.install()
    from megatron_fanformer.inspection import step_report
    from megatron_fanformer.inspection.step import StepSamples, refuse_former_data

    folder = None
    if named is not None:
        refuse_former_data(named, step)
        folder = named.path if named.kind == "run" else named.path.parent.parent
    samples = StepSamples(run, step, only, folder=folder)
    if json:
        show([as_json(step_report.as_object(samples, full=full))])
    else:
        show(step_report.lines(samples, full=full))


def _configuration_of(path: str, config: Path | None) -> tuple[Path, Target | None, Target | None]:
    """Return the configuration file, the token files that the samples are restricted to, and the run or checkpoint that
    has it.
    """
    if Path(path).suffix in (".yaml", ".yml") and Path(path).is_file():
        return config or Path(path), None, None
    target = recognise(path)
    if target.kind in OURS:
        if config is not None:
            return config, None, None
        return target.path / store.CONFIG, None, target
    if not target.is_data:
        raise InputError(
            f"{path} is {DESCRIPTIONS[target.kind]}, which does not say what it was trained on; name a run's folder"
        )
    if config is None:
        raise InputError(
            f"{path} is token files, and --step needs the configuration that trains on them; add --config FILE"
        )
    return config, target, None
