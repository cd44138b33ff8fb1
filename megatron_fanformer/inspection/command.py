"""The verb `inspect`: says what a path is, verifies it, or shows the samples of a training step."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from megatron_fanformer.checkpoint import store
from megatron_fanformer.durable_files import write_atomically
from megatron_fanformer.errors import InputError
from megatron_fanformer.formats.recognition import DESCRIPTIONS, OURS, Target, checkpoint_of, recognise
from megatron_fanformer.inspection.report import Advance, Report, as_json
from megatron_fanformer.terminal import show, width


def inspect_path(path: str, *, verify: bool, json: bool) -> None:
    """Print what a dataset, a checkpoint or an export is; with `verify`, whether it is intact.

    Raises:
        InputError: it is none of these, or there is nothing to verify it against.
        CorruptError: it cannot be read, or fails its verification; names the file, and what differs.
    """
    target = recognise(path)
    kind = _kind(target)
    agrees = _verify(target, kind) if verify else None
    report = kind.describe(target)
    if json:
        show([as_json({**report.as_object(), **({"verified": agrees} if verify else {})})], as_they_are=True)
    else:
        show([*report.lines(width()), *([f"verified: {agrees}"] if agrees else [])])


def draw_phases(path: str, picture: Path) -> None:
    """Draw the health of a run's phases into a PNG.

    Raises:
        InputError: the path is not a run's folder, or its metrics have nothing of it; the picture cannot be written.
    """
    from megatron_fanformer.inspection.phase_picture import phase_picture

    target = recognise(path)
    if target.kind != "run":
        raise InputError(f"--phases draws what a run has logged, but {path} is not a run's folder; name that")
    content = phase_picture(target.path)
    try:
        write_atomically(picture, content)
    except OSError as error:
        raise InputError(f"--phases {picture} cannot be written ({error.strerror}); name another file") from error
    show([f"{picture}: the phases of {path}"])


class _Kind(NamedTuple):
    """The actions on a kind of target."""

    describe: Callable[[Target], Report]
    bytes_to_check: Callable[[Target], int]
    check: Callable[[Target, Advance], str]


def _kind(target: Target) -> _Kind:
    """Imports what the kind needs: data neither torch nor megatron-core."""
    if target.is_data:
        return _data()
    if target.kind == "megatron-lm":
        return _megatron_lm()
    return _checkpoint() if target.kind in OURS else _export()


def _data() -> _Kind:
    from megatron_fanformer.inspection.dataset import describe_data
    from megatron_fanformer.inspection.dataset_check import bytes_to_check, check_data

    return _Kind(describe_data, bytes_to_check, check_data)


def _checkpoint() -> _Kind:
    from megatron_fanformer.checkpoint.stored_files import bytes_stored
    from megatron_fanformer.inspection.checkpoint import check_checkpoint, describe_checkpoint, describe_run

    return _Kind(
        lambda target: describe_run(target.path) if target.kind == "run" else describe_checkpoint(target.path),
        lambda target: bytes_stored(checkpoint_of(target)),
        lambda target, advance: check_checkpoint(checkpoint_of(target), advance),
    )


def _megatron_lm() -> _Kind:
    from megatron_fanformer.inspection.checkpoint import bytes_to_check, check_megatron_lm, describe_megatron_lm

    return _Kind(describe_megatron_lm, bytes_to_check, check_megatron_lm)


def _export() -> _Kind:
    from megatron_fanformer.inspection import export

    return _Kind(
        lambda target: export.describe_export(target.path, export.format_of(target)),
        lambda target: export.bytes_to_check(target.path),
        lambda target, advance: export.check_export(target.path, export.format_of(target), advance),
    )


def _verify(target: Target, kind: _Kind) -> str:
    with _progress(kind.bytes_to_check(target)) as advance:
        return kind.check(target, advance)


@contextmanager
def _progress(total: int) -> Iterator[Advance]:
    """A bar while the block reads `total` bytes; nothing where the output is not a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True, markup=False)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)
        yield lambda count: bar.advance(task, count)


def inspect_step(
    path: str, step: int, config: Path | None, overrides: Sequence[str], *, full: bool, json: bool
) -> None:
    """Print the samples of a training step, and the documents that they come from.

    Args:
        path: a run's folder, a checkpoint or a configuration file; or, with `config`, token files that it trains on:
            samples without tokens of these are left out.
        overrides: `--section.field VALUE`, as for `train`.

    Raises:
        InputError: the configuration, the step or the path is wrong.
        CorruptError: token files or a ledger are damaged.
    """
    from megatron_fanformer.training.config import load_config

    file, only = _configuration_of(path, config)
    run = load_config(file, overrides)
    from megatron_fanformer.runtime import megatron_cpu  # imports torch: after errors in the input were reported

    megatron_cpu.install()
    from megatron_fanformer.inspection import step_report
    from megatron_fanformer.inspection.step import StepSamples

    samples = StepSamples(run, step, only)
    if json:
        show([as_json(step_report.as_object(samples, full=full))], as_they_are=True)
    else:
        show(step_report.lines(samples, full=full), as_they_are=full)


def _configuration_of(path: str, config: Path | None) -> tuple[Path, Target | None]:
    """The configuration file, and the token files that the samples are restricted to."""
    if Path(path).suffix in (".yaml", ".yml") and Path(path).is_file():
        return config or Path(path), None
    target = recognise(path)
    if target.kind in OURS:
        return config or target.path / store.CONFIG, None
    if not target.is_data:
        raise InputError(
            f"{path} is {DESCRIPTIONS[target.kind]}, which does not say what it was trained on; name a run's folder"
        )
    if config is None:
        raise InputError(
            f"{path} is token files, and --step needs the configuration that trains on them; add --config FILE"
        )
    return config, target
