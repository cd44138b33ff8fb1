"""The verb `inspect`: says what a path is, verifies it, or shows the samples of a training step."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import TypeVar

from megatron_fanformer.checkpoint import store
from megatron_fanformer.durable_files import write_atomically
from megatron_fanformer.errors import InputError, escaped
from megatron_fanformer.formats.recognition import DESCRIPTIONS, OURS, Target, checkpoint_of, recognise
from megatron_fanformer.inspection.report import Advance, Report, as_json
from megatron_fanformer.stores import is_url
from megatron_fanformer.terminal import plural, show, some, width

_Result = TypeVar("_Result")
_Actions = tuple[Callable[[Target], Report], Callable[[Target], int], Callable[[Target, Advance], str]]
"""Functions that describe a target, count the bytes that checking it reads, and check it."""


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
    describe, bytes_to_check, check = _actions(target)
    agrees = None
    if verify:
        with _progress(bytes_to_check(target)) as advance:
            agrees = check(target, advance)
    _show(describe(target), agrees, json=json)


def _show(report: Report, agrees: str | None, *, json: bool) -> None:
    """Print a report; `agrees` is what a verification found, where there was one."""
    if json:
        verified = {} if agrees is None else {"verified": agrees}
        show([as_json({**report.as_object(), **verified})], as_they_are=True)
    else:
        show([*report.lines(width()), *([f"verified: {agrees}"] if agrees else [])])


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


def show_trace(path: str, *, json: bool) -> None:
    """Print where the time of profiled steps went: a run's last ones, or those of a folder of traces.

    Raises:
        InputError: the path is neither, or the run has none.
        CorruptError: a trace cannot be read.
    """
    from megatron_fanformer.inspection import trace_table

    if Path(path).parent.name == store.TRACES and Path(path).is_dir():
        folders = [Path(path)]
    else:
        folders = trace_table.trace_folders(_run_of(path, "trace", "shows what a run has written"))
    times = trace_table.times_by_rank(folders[-1])
    if not times:
        raise InputError(f"{path} has no trace of a rank (rank-00000.json.gz and so on); name a run's folder")
    if json:
        show([as_json(trace_table.as_object(folders[-1], times))], as_they_are=True)
        return
    show(trace_table.lines(folders[-1], times, width()))
    if earlier := folders[:-1]:
        names = some(map(str, earlier))
        show(["", f"{plural(len(earlier), 'earlier profile')}, which --trace shows by the folder: {names}"])


def _actions(target: Target) -> _Actions:
    """Imports what the kind of target needs: data neither torch nor megatron-core."""
    if target.is_data:
        from megatron_fanformer.inspection import dataset, dataset_check

        return dataset.describe_data, dataset_check.bytes_to_check, dataset_check.check_data
    if target.kind not in OURS and target.kind != "megatron-lm":
        from megatron_fanformer.inspection import export

        return export.describe_export, export.bytes_to_check, export.check_export
    from megatron_fanformer.inspection import checkpoint

    if target.kind == "megatron-lm":
        return checkpoint.describe_megatron_lm, checkpoint.bytes_to_check, checkpoint.check_megatron_lm
    return _checkpoint_actions()


def _checkpoint_actions() -> _Actions:
    """Return those for our checkpoints. The newest of a run is looked up once: one that goes on has others later."""
    from megatron_fanformer.checkpoint.stored_files import bytes_stored
    from megatron_fanformer.formats.checkpoints import blaming_removal
    from megatron_fanformer.inspection import checkpoint

    found = cache(checkpoint_of)

    def read(function: Callable[..., _Result], target: Target, *arguments: Advance) -> _Result:
        with blaming_removal([found(target)]):
            return function(found(target), *arguments)

    def describe(target: Target) -> Report:
        is_run = target.kind == "run"
        return checkpoint.describe_run(target.path) if is_run else read(checkpoint.describe_checkpoint, target)

    return describe, partial(read, bytes_stored), partial(read, checkpoint.check_checkpoint)


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
        show([as_json(step_report.as_object(samples, full=full))], as_they_are=True)
    else:
        show(step_report.lines(samples, full=full), as_they_are=full)


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
