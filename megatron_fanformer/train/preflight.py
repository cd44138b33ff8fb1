"""Checks before a run starts: of its configuration, and of every file that it is going to read.

One process does it for all ranks (see start.py); what it found is a RunStart, which every rank uses.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_fanformer.checkpoint import run_folder
from megatron_fanformer.checkpoint.remote import fetch_checkpoint, fetch_newer
from megatron_fanformer.configuration import by_dotted_names
from megatron_fanformer.convert.recognition import find_checkpoint, refuse_other_kinds
from megatron_fanformer.data.check import CheckedData, check_files
from megatron_fanformer.data.fingerprint import (
    DataFingerprint,
    another_tokenizer,
    fingerprint_data,
    fingerprint_from_plain,
    resumed_fingerprint,
)
from megatron_fanformer.data.manifest import read_any_manifest
from megatron_fanformer.data.mixes import Mix, ordered
from megatron_fanformer.data.sample_counts import SampleCounts
from megatron_fanformer.data.tokenizer import load_tokenizer
from megatron_fanformer.errors import CorruptError, InputError, collect_problems, redacted
from megatron_fanformer.evaluate.survey import EvaluationSurvey, survey_evaluation
from megatron_fanformer.runtime import device as devices
from megatron_fanformer.stores import is_url
from megatron_fanformer.terminal import some
from megatron_fanformer.train.chats import with_steps
from megatron_fanformer.train.config import UNSTATED, RunConfig
from megatron_fanformer.train.loggers.registry import logger_problems
from megatron_fanformer.train.machine_rules import (
    backend_problems,
    fp8_machine_problems,
    has_engine,
    kernel_problems,
    layer_problems,
)
from megatron_fanformer.train.presets import OF_THE_RUN
from megatron_fanformer.train.recovery import RecoveryConfig, read_events
from megatron_fanformer.train.run_log import log_if_slow

if TYPE_CHECKING:  # imports torch
    from megatron_fanformer.checkpoint.stored_files import SavedProgress

KEPT = ("training.seed", "training.global_batch_size", "optimizer.name")
"""Fields that a run keeps when it is resumed, as it does its model."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RunStart:
    """A run's starting point, decided once for all its ranks."""

    resumed: Path | None
    """The run's own checkpoint that it resumes from."""
    earlier: tuple[Path, ...] = ()
    """Checkpoints before it, the newest first: its tensors are read later, and may turn out to be damaged."""
    damaged: tuple[tuple[Path, CorruptError], ...] = ()
    """Checkpoints after it, and the damage of each."""
    loaded: Path | None
    """The checkpoint whose weights a new run starts with."""
    data: CheckedData
    """The token files."""
    identity: DataFingerprint
    """The identity of that data."""
    train_iters: int
    """Steps of the whole run, computed from `training.epochs` if that is given."""
    evaluation: EvaluationSurvey = field(default_factory=EvaluationSurvey)
    """Tasks and sets to evaluate on, besides its validation data."""
    events: tuple[dict[str, Any], ...] = ()
    """The run's recovery events so far."""
    changes: str = ""
    """Fields of the configuration that differ from the checkpoint's, as the end of a line."""


def check_run(
    config: RunConfig,
    world_size: int | None,
    *,
    unless_complete: bool = False,
    before_torch: Callable[[], None] = lambda: None,
) -> RunStart | None:
    """Check a run in a world of that many ranks (None: to be launched here), and return what it starts from.

    Args:
        unless_complete: return None, with a log line, if the last step is saved already.
        before_torch: is called once all is checked but the machine and the data, which takes torch.

    Raises:
        InputError: every problem, one line each; what this machine lacks, if nothing else is wrong; data that are not
            what the run has used so far.
        CorruptError: token files or a checkpoint are damaged.
    """
    problems: list[str] = []
    replicas = None
    length_field = config.training.length_field
    if not config.parallel.problems():
        replicas = collect_problems(problems, lambda: config.parallel.resolve_data_parallel_size(world_size))
    of_sections = config.section_problems()
    problems += of_sections
    if not of_sections:
        config = collect_problems(problems, lambda: with_steps(config, report=logger.info)) or config
        problems += config.joint_problems(replicas or 1)
    of_tokenizer = _tokenizer_problems(config)
    problems += of_tokenizer
    evaluation = None
    if not (of_tokenizer or of_sections):  # else the same would be reported twice
        evaluation = collect_problems(problems, lambda: _evaluation(config))
    if problems and (config.checkpoint.mirror or is_url(config.checkpoint.load or "")):
        raise InputError("\n".join(problems))  # nothing is fetched for a run that cannot start
    if points := collect_problems(problems, lambda: _starting_points(config)):
        problems += _checkpoint_problems(points, config, length_field)
    if problems or points is None or evaluation is None:
        raise InputError("\n".join(problems))
    is_saved = (
        unless_complete and points.resumed is not None and run_folder.step_of(points.resumed) == config.training.steps
    )
    if is_saved and not points.damaged and config.checkpoint.mirror is None:  # else to copy what is not there yet
        steps = f"{config.training.steps:,}"
        logger.info(
            "complete: %s of %s steps in %s; raise training.%s to train on, or name another training.run_dir",
            *(steps, steps, config.training.run_dir, length_field),
        )
        return None
    before_torch()
    if problems := machine_problems(config):
        raise InputError("\n".join(problems))
    data = check_data(config, for_run=True)
    start = _started(config, points, data, evaluation, allowed=config.data.allow_change)
    _warn_of_other_tokenizer(start)
    return start


def machine_problems(config: RunConfig) -> list[str]:
    """Return what keeps this machine from running a configuration, one line each."""
    try:
        device = devices.resolve_device(config.runtime.device)
    except InputError as error:
        return [str(error)]
    model, parallel, kernels = config.model, config.parallel, config.kernels
    in_fp32 = config.dtype(device).itemsize == 4
    return [
        *kernel_problems(kernels),
        *layer_problems(model, parallel, kernels, with_engine=has_engine(kernels), in_fp32=in_fp32),
        *backend_problems(parallel, kernels, config.runtime.backend(device), device),
        *fp8_machine_problems(config.precision, device),
        *logger_problems(config.logging),
    ]


def check_data(config: RunConfig, *, for_run: bool = False) -> CheckedData:
    """Survey the token files of a run whose number of steps is known, and check that they suffice.

    Args:
        for_run: see `check_files`.

    Raises:
        InputError, CorruptError: as `check_run`.
    """
    with log_if_slow("reading the indices of the token files"):
        data = check_files(config.data, config.model.vocab_size, for_run=for_run)
    if not config.data.is_chats:  # those have been packed
        train_samples, valid_samples = drawn_samples(config)
        counts = SampleCounts(data, config.model.seq_length)
        sizes = {"train_samples": train_samples, "valid_samples": valid_samples}
        counts.check(config.data, **sizes, mixes=run_mixes(config, data))
    return data


def find_start(config: RunConfig) -> RunStart:
    """Return what a run starts from, without checking that it fits.

    Raises:
        InputError, CorruptError: a file that it would start from is missing or damaged.
    """
    points = _starting_points(config)
    config = with_steps(config)
    return _started(config, points, check_files(config.data), _evaluation(config), allowed=None)


def _evaluation(config: RunConfig) -> EvaluationSurvey:
    return survey_evaluation(
        config.evaluation,
        seq_length=config.model.seq_length,
        vocab_size=config.model.vocab_size,
        tokenizer=config.data.tokenizer,
    )


def _identity(
    config: RunConfig, data: CheckedData, candidates: Sequence[Path], *, allowed: Sequence[str] | None
) -> DataFingerprint:
    """Return which data a run has from here on, and what of them has changed; raises like `resumed_fingerprint`.

    Args:
        candidates: checkpoints that it may go on from, the first that the ranks can load; none where it begins.
    """
    train_samples, _ = drawn_samples(config)
    # Where there are several mixes, a source's order does not depend on the number of samples.
    is_repeated = not (config.data.is_chats or config.data.stages) and SampleCounts(
        data, config.model.seq_length
    ).repeats_pairs(config.data, train_samples=train_samples)
    mixes = run_mixes(config, data)
    present = fingerprint_data(config.data, data, samples=train_samples if is_repeated else None, mixes=mixes)
    if (found := _readable_progress(candidates)) is None:
        return present
    resumed, progress = found
    step, values = (0, None) if progress is None else (progress.step, progress.data)
    before = fingerprint_from_plain(values, resumed)
    if before is None:
        logger.info("%s does not say which data it was trained on; taking those of this configuration", resumed)
        return present
    identity = resumed_fingerprint(before, present, step=step, allowed=allowed, run=config.training.run_dir)
    for change in identity.changes[len(before.changes) :]:
        logger.info("data changed after step %d: %s: %s", change.step, change.name, change.what)
    return identity


def _warn_of_other_tokenizer(start: RunStart) -> None:
    """Warn where the tokenizer that goes into every checkpoint is not the one that made the training data."""
    digest = start.identity.tokenizer
    if digest is None:
        return
    sources = [source for blend in (start.data.train, *start.data.mixes.values()) for source in blend.sources]
    manifests = {prefix: read_any_manifest(prefix) for source in sources for prefix in source.prefixes}
    stated = {redacted(prefix): manifest.tokenizer.sha256 for prefix, manifest in manifests.items() if manifest}
    if other := another_tokenizer(stated.values(), digest, "data.tokenizer"):
        logger.warning(
            "training data (%s) were made with %s, which goes into every checkpoint; unless both give the same ids, "
            "name the one that made them",
            some(prefix for prefix, made in stated.items() if made not in ("", digest)),
            other,
        )


def _readable_progress(candidates: Sequence[Path]) -> "tuple[Path, SavedProgress | None] | None":
    """Return the first of some checkpoints whose progress can be read, and that; None where there is none."""
    from megatron_fanformer.checkpoint.stored_files import (
        read_table,
        saved_progress,  # imports torch
    )

    for checkpoint in candidates:
        try:
            return checkpoint, saved_progress(checkpoint, read_table(checkpoint))
        except CorruptError as error:  # as the ranks will find, which go on from the next
            logger.info("%s; its data cannot be compared with those of this configuration", error)
    return None


def drawn_samples(config: RunConfig) -> tuple[int, int]:
    """Return samples that a run draws from its training data, and from each validation set."""
    training = config.training
    return training.steps * training.global_batch_size, training.eval_iters * training.global_batch_size


def run_mixes(config: RunConfig, data: CheckedData) -> list[Mix]:
    """Return the mixes of a run, one where it has no others."""
    sizes = {"global_batch_size": config.training.global_batch_size, "seq_length": config.model.seq_length}
    return ordered(data.train, data.mixes, **sizes)


class _StartingPoints(NamedTuple):
    """Checkpoints that a run starts from: the fields of `RunStart`."""

    resumed: Path | None = None
    earlier: tuple[Path, ...] = ()
    damaged: tuple[tuple[Path, CorruptError], ...] = ()
    loaded: Path | None = None


def _started(
    config: RunConfig,
    points: _StartingPoints,
    data: CheckedData,
    evaluation: EvaluationSurvey,
    *,
    allowed: Sequence[str] | None,
) -> RunStart:
    usable = points.earlier if config.recovery.use_earlier_checkpoint else ()
    candidates = () if points.resumed is None else (points.resumed, *usable)
    return RunStart(
        **points._asdict(),
        data=data,
        identity=_identity(config, data, candidates, allowed=allowed),
        train_iters=config.training.steps,
        evaluation=evaluation,
        changes=_changes_since(points.resumed, config),
        events=tuple(read_events(Path(config.training.run_dir))) if points.resumed else (),
    )


def _starting_points(config: RunConfig) -> _StartingPoints:
    """Find the checkpoint that a run resumes from, or the one whose weights it starts with.

    Raises:
        InputError: what is named is not what it should be.
        CorruptError: a checkpoint is damaged, and there is no earlier one, or it is not to be used.
    """
    run = Path(config.training.run_dir)
    if run.exists() and not run.is_dir():
        raise InputError(f"training.run_dir {run} is a file; name a folder")
    try:
        refuse_other_kinds(run)
    except InputError as error:
        raise InputError(f"training.run_dir: {error}") from None
    if config.checkpoint.mirror is not None:
        with log_if_slow(f"looking for a newer checkpoint on {redacted(config.checkpoint.mirror)}"):
            fetch_newer(config.checkpoint.mirror, run, use_earlier=config.recovery.use_earlier_checkpoint)
    resuming = _resuming(run_folder.checkpoints_to_resume(run), config.recovery)
    if resuming.resumed or not config.checkpoint.load:
        return resuming
    try:
        load: str | Path = config.checkpoint.load
        if is_url(load):  # into the run's folder, which all of its machines see
            load = fetch_checkpoint(str(load), run / run_folder.LOADED, logger.info)
        return resuming._replace(loaded=find_checkpoint(load))
    except InputError as error:
        raise InputError(f"checkpoint.load: {error}") from None


def _resuming(candidates: list[Path], recovery: RecoveryConfig) -> _StartingPoints:
    """Find the first checkpoint whose small files are sound; the ranks check tensor files when they load them."""
    damaged: list[tuple[Path, CorruptError]] = []
    for number, checkpoint in enumerate(candidates):
        try:
            run_folder.check_sound(checkpoint)
        except CorruptError as error:
            damaged.append((checkpoint, error))
            if not recovery.use_earlier_checkpoint:
                break
        else:
            return _StartingPoints(checkpoint, tuple(candidates[number + 1 :]), tuple(damaged))
    if damaged:
        raise damaged[0][1]
    return _StartingPoints()


def _checkpoint_problems(points: _StartingPoints, config: RunConfig, length_field: str) -> list[str]:
    if points.resumed:
        return _resume_problems(points.resumed, config, length_field)
    if points.loaded is None:
        return []
    # Positions that are no longer scaled, where the checkpoint's are, were rather forgotten than meant.
    ignoring = OF_THE_RUN if config.model.rope_scaling.is_scaled else ("seq_length",)
    return _model_problems(points.loaded, config, ignoring=ignoring)


def _tokenizer_problems(config: RunConfig) -> list[str]:
    """It goes into every checkpoint: better to find a problem now than when the first is saved."""
    path = config.data.tokenizer
    if path is None or not (is_url(path) or Path(path).exists()):  # the latter is reported with the data's own problems
        return []
    try:
        tokenizer = load_tokenizer(path, needs_eod=False)  # the token files hold it
    except InputError as error:
        return [f"data.tokenizer: {error}"]
    if tokenizer.vocab_size > config.model.vocab_size:
        return [
            f"model.vocab_size is {config.model.vocab_size}, but {path} has {tokenizer.vocab_size} ids; "
            "raise it to that"
        ]
    return []


def _resume_problems(checkpoint: Path, config: RunConfig, length_field: str) -> list[str]:
    """List what keeps a run from resuming: its model, seed, batch size and optimizer stay, or samples would repeat.

    Args:
        length_field: of `training`, which states its length.
    """
    saved = run_folder.saved_config(checkpoint)
    if "training" not in saved:
        return [
            f"training.run_dir {config.training.run_dir} holds converted weights, not a run; name it as "
            "checkpoint.load, and another run_dir"
        ]
    problems = _model_problems(checkpoint, config)
    step = run_folder.step_of(checkpoint) or 0
    steps = config.training.train_iters
    if steps is not None and step > steps:
        verb = "is" if length_field == "train_iters" else "makes"
        problems.append(
            f"training.{length_field} {verb} {steps}, but the run in {config.training.run_dir} is at step {step}; "
            "raise it, or name another training.run_dir"
        )
    present, before = by_dotted_names(config.as_dict()), UNSTATED | by_dotted_names(saved)
    return problems + [
        f"{name} is {present[name]}, but the run in {config.training.run_dir} has {before.get(name)}; change it back, "
        "or name another training.run_dir, which checkpoint.load starts from this one's weights"
        for name in KEPT
        if present[name] != before.get(name)
    ]


def _changes_since(checkpoint: Path | None, config: RunConfig) -> str:
    """Return the fields that differ from those a checkpoint was saved with, as the end of a line."""
    saved = {} if checkpoint is None else by_dotted_names(run_folder.saved_config(checkpoint))
    present = by_dotted_names(config.as_dict())
    stated = {name: value for name, value in present.items() if value is not None}  # the rest follows from the machine
    changes = [f"{name} {saved[name]} → {value}" for name, value in stated.items() if value != saved.get(name, value)]
    return f", with {', '.join(changes)}" if changes else ""


def _model_problems(checkpoint: Path, config: RunConfig, ignoring: tuple[str, ...] = ()) -> list[str]:
    saved = run_folder.saved_model(checkpoint).resolved_fields()
    remedies = {"padded_vocab_size": f"set model.make_vocab_size_divisible_by to {saved['padded_vocab_size']}"}
    return [
        f"model.{name} is {value}, but the checkpoint {checkpoint} was saved with {saved[name]}; "
        f"{remedies.get(name, 'set it to that')}"
        for name, value in config.model.resolved_fields().items()
        if value != saved[name] and name.partition(".")[0] not in ignoring
    ]
