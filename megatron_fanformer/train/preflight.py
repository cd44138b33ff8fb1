"""Checks the configuration of a run and every file that it will read, before the run starts.

One process does this for all ranks (see start.py); every rank uses the `RunStart` that `find_start` returns.
"""

import dataclasses
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_fanformer.checkpoint import run_folder
from megatron_fanformer.checkpoint.remote import fetch_checkpoint, fetch_newer
from megatron_fanformer.configuration import flatten
from megatron_fanformer.convert.recognition import find_checkpoint
from megatron_fanformer.data.chats import pack
from megatron_fanformer.data.check import CheckedData, check_files, training_conversations, validation_conversations
from megatron_fanformer.data.fingerprint import (
    DataFingerprint,
    describe_other_tokenizer,
    fingerprint_data,
    fingerprint_from_plain,
    resumed_fingerprint,
)
from megatron_fanformer.data.manifest import read_manifest
from megatron_fanformer.data.mixes import Mix, order_mixes
from megatron_fanformer.data.sample_counts import SampleCounts
from megatron_fanformer.data.tokenizer import load_tokenizer
from megatron_fanformer.errors import CorruptError, InputError, collect_problems, redacted
from megatron_fanformer.evaluate.survey import EvaluationSurvey, survey_evaluation
from megatron_fanformer.runtime import device as devices
from megatron_fanformer.stores import is_url
from megatron_fanformer.train.config import RUN_FIELDS, RunConfig
from megatron_fanformer.train.loggers import logger_problems
from megatron_fanformer.train.machine_rules import (
    backend_problems,
    fp8_machine_problems,
    has_engine,
    kernel_problems,
    layer_problems,
)
from megatron_fanformer.train.recovery import read_events

FIXED_FIELDS = ("training.seed", "training.global_batch_size", "optimizer.name")
"""Fields besides those of the model that must not change when a run resumes."""

Damaged = Sequence[tuple[Path, CorruptError]]
"""Damaged checkpoints, and the damage of each."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RunStart:
    """Where a run starts, determined once for all ranks."""

    candidates: tuple[Path, ...] = ()
    """The run's checkpoints to resume from, newest first. Their tensors are not read yet and may still be damaged."""
    damaged: Damaged = ()
    """Damaged checkpoints that are newer than the candidates."""
    loaded: Path | None = None
    """The checkpoint whose weights a new run starts with."""
    data: CheckedData
    """The token files."""
    identity: DataFingerprint
    """The fingerprint of the token files, with which checkpoints record their data."""
    train_iters: int
    """Steps of the whole run, computed from `training.epochs` if that is given."""
    evaluation: EvaluationSurvey = field(default_factory=EvaluationSurvey)
    """Tasks and perplexity sets of the evaluation in the loop."""
    events: tuple[dict[str, Any], ...] = ()
    """The run's recovery events so far."""

    @property
    def resumed(self) -> Path | None:
        """The newest candidate; None: the run starts from step 0."""
        return self.candidates[0] if self.candidates else None


def find_start(
    config: RunConfig,
    world_size: int | None,
    *,
    unless_complete: bool = False,
    before_torch: Callable[[], None] = lambda: None,
) -> RunStart | None:
    """Check a run and return its starting point.

    Args:
        world_size: the number of ranks; None: as many as the layout needs.
        unless_complete: return None, and log a line, if the last step is already saved.
        before_torch: is called before the checks of the machine and the data, which import torch.

    Raises:
        InputError: the configuration or a named file has problems, one line each; or, only without such problems, this
            machine lacks something, or the data have changed since the checkpoint.
        CorruptError: token files or a checkpoint are damaged.
    """
    problems: list[str] = []
    length_field = "train_iters" if config.training.epochs is None else "epochs"
    config, evaluation = _check_config(config, world_size, problems)
    if problems and (config.checkpoint.mirror or is_url(config.checkpoint.load or "")):
        raise InputError("\n".join(problems))  # before fetching checkpoints for a run that cannot start
    if checkpoints := collect_problems(problems, lambda: _find_checkpoints(config)):
        candidates, damaged, loaded = checkpoints
        if candidates:
            problems += _resume_problems(candidates[0], config, length_field)
        elif loaded is not None:
            # A run may replace the checkpoint's rope_scaling, but one without scaling has probably forgotten it.
            may_differ = RUN_FIELDS if config.model.rope_scaling.is_scaled else ("seq_length",)
            problems += _model_problems(loaded, config, may_differ=may_differ)
    if problems or checkpoints is None or evaluation is None:
        raise InputError("\n".join(problems))
    run, steps = Path(config.training.run_dir), f"{config.training.steps:,}"
    is_complete = bool(candidates) and run_folder.step_of(candidates[0]) == config.training.steps
    # With a mirror the run starts even if it is complete, to finish copying.
    if unless_complete and is_complete and not damaged and config.checkpoint.mirror is None:
        logger.info(
            "complete: %s of %s steps in %s; raise training.%s to train on, or name another training.run_dir",
            *(steps, steps, run, length_field),
        )
        return None
    before_torch()
    if problems := machine_problems(config):
        raise InputError("\n".join(problems))
    data = check_data(config)
    return RunStart(
        candidates=candidates,
        damaged=damaged,
        loaded=loaded,
        data=data,
        identity=_data_identity(config, data, candidates if config.recovery.use_earlier_checkpoint else candidates[:1]),
        train_iters=config.training.steps,
        evaluation=evaluation,
        events=tuple(read_events(run)) if candidates else (),
    )


def _check_config(
    config: RunConfig, world_size: int | None, problems: list[str]
) -> tuple[RunConfig, EvaluationSurvey | None]:
    """Append the problems of a configuration to `problems`.

    Return the configuration with the number of steps filled in, and the survey of its tasks and perplexity sets. The
    survey is None if the tasks and sets, or the sections that they depend on, have problems.
    """
    replicas = None
    if not config.parallel.problems():
        replicas = collect_problems(problems, lambda: config.parallel.resolve_data_parallel_size(world_size))
    section_problems = config.section_problems()
    problems += section_problems
    if not section_problems:
        config = collect_problems(problems, lambda: with_steps(config)) or config
        problems += config.joint_problems(replicas or 1)  # None: their number is a problem already
    tokenizer_problems = _tokenizer_problems(config)
    problems += tokenizer_problems
    if tokenizer_problems or section_problems:
        return config, None  # the survey would report the same problems again
    survey = collect_problems(
        problems,
        lambda: survey_evaluation(
            config.evaluation,
            seq_length=config.model.seq_length,
            vocab_size=config.model.vocab_size,
            tokenizer=config.data.tokenizer,
        ),
    )
    return config, survey


def machine_problems(config: RunConfig) -> list[str]:
    """Return the reasons why this machine cannot run a configuration, one line each."""
    try:
        device = devices.resolve_device(config.runtime.device)
    except InputError as error:
        return [str(error)]
    model, parallel, kernels = config.model, config.parallel, config.kernels
    in_fp32 = config.dtype(device).itemsize == 4
    return [
        *kernel_problems(kernels),
        *layer_problems(model, parallel, kernels, uses_engine=has_engine(kernels), in_fp32=in_fp32),
        *backend_problems(parallel, kernels, config.runtime.backend(device), device),
        *fp8_machine_problems(config.precision, device),
        *logger_problems(config.logging),
    ]


def check_data(config: RunConfig) -> CheckedData:
    """Check the token files of a run, and that they hold enough samples; the run's number of steps must be known.

    Raises:
        InputError: a file is missing, or there is too little data.
        CorruptError: files are damaged.
    """
    data = check_files(config.data, config.model.vocab_size)
    if not config.data.is_chats:  # `with_steps` has checked conversations
        counts = SampleCounts(data, config.model.seq_length)
        counts.check(config.data, **dataset_sizes(config), mixes=run_mixes(config, data))
    return data


def with_steps(config: RunConfig) -> RunConfig:
    """Return the configuration with `training.epochs` converted to `train_iters`; check the conversations first.

    Unless the data are conversations, return the configuration unchanged.

    Raises:
        InputError: a file is missing, or there are no conversations to train or to validate on.
        CorruptError: files contradict each other.
    """
    if not config.data.is_chats:
        return config
    training = config.training
    for name, conversations in validation_conversations(config.data).items():
        conversations.refuse_unlearned(name, config.model.seq_length)
    packing = pack(training_conversations(config.data).lengths, config.model.seq_length, seed=training.seed)
    logger.info("%s", packing.describe())
    if training.epochs is None:
        return config
    steps = math.ceil(training.epochs * len(packing) / training.global_batch_size)
    logger.info("%g epochs are %d steps of %d samples", training.epochs, steps, training.global_batch_size)
    return with_train_iters(config, steps)


def with_train_iters(config: RunConfig, steps: int) -> RunConfig:
    """Return the configuration with `train_iters` set to `steps`, and without `epochs`."""
    return dataclasses.replace(config, training=dataclasses.replace(config.training, train_iters=steps, epochs=None))


def dataset_sizes(config: RunConfig) -> dict[str, int]:
    """Return the samples that a run takes from its training data and from each validation set, as named arguments."""
    size, training = config.training.global_batch_size, config.training
    return {"train_samples": training.steps * size, "valid_samples": training.eval_iters * size}


def run_mixes(config: RunConfig, data: CheckedData) -> list[Mix]:
    """Return the mixes of a run in the order of the steps: `data.train_data`, then the stages of `data.stages`."""
    sizes = {"global_batch_size": config.training.global_batch_size, "seq_length": config.model.seq_length}
    return order_mixes(data.train, data.mixes, **sizes)


# -- the data


def _data_identity(config: RunConfig, data: CheckedData, candidates: Sequence[Path]) -> DataFingerprint:
    """Return the fingerprint of a run's data from here on, with all changes of the data since the run began.

    Args:
        candidates: the checkpoints to resume from, in the order in which the ranks try to load them; none in a new run.

    Raises:
        InputError: data have changed, and `data.allow_change` does not name them.
    """
    from megatron_fanformer.checkpoint.stored_files import read_table, saved_progress  # imports torch

    train_samples = dataset_sizes(config)["train_samples"]
    # The order of conversations or of several mixes never depends on the number of samples.
    depends_on_number = not (config.data.is_chats or config.data.stages) and SampleCounts(
        data, config.model.seq_length
    ).repeats_pairs(config.data, train_samples=train_samples)
    mixes = run_mixes(config, data)
    present = fingerprint_data(config.data, data, samples=train_samples if depends_on_number else None, mixes=mixes)
    manifests = [read_manifest(prefix) for mix in mixes for source in mix.blend.sources for prefix in source.prefixes]
    digests = [manifest.tokenizer.sha256 for manifest in manifests if manifest]
    if present.tokenizer and (other := describe_other_tokenizer(digests, present.tokenizer, "data.tokenizer")):
        logger.warning("training data were made with %s, which goes into every checkpoint; name theirs", other)
    for checkpoint in candidates:
        try:
            progress = saved_progress(checkpoint, read_table(checkpoint))
        except CorruptError as error:  # the ranks will find it damaged as well, and load the next
            logger.info("%s; its data cannot be compared with those of this configuration", error)
            continue
        before = None if progress is None else fingerprint_from_plain(progress.data, checkpoint)
        if progress is None or before is None:
            logger.info("%s does not say which data it was trained on; taking those of this configuration", checkpoint)
            return present
        identity = resumed_fingerprint(
            before, present, step=progress.step, allowed=config.data.allow_change, run=config.training.run_dir
        )
        for change in identity.changes[len(before.changes) :]:
            logger.info("data changed after step %d: %s: %s", change.step, change.name, change.what)
        return identity
    return present


# -- checkpoints


def _find_checkpoints(config: RunConfig) -> tuple[tuple[Path, ...], Damaged, Path | None]:
    """Return the checkpoints to resume from, damaged newer ones, and the checkpoint whose weights a new run loads.

    Raises:
        InputError: `training.run_dir` is a file, or `checkpoint.load` is no checkpoint.
        CorruptError: a checkpoint is damaged, and there is no earlier one, or earlier ones are not to be used.
    """
    run, use_earlier = Path(config.training.run_dir), config.recovery.use_earlier_checkpoint
    if run.exists() and not run.is_dir():
        raise InputError(f"training.run_dir {run} is a file; name a folder")
    if config.checkpoint.mirror is not None:
        logger.info("looking for a newer checkpoint on %s", redacted(config.checkpoint.mirror))
        fetch_newer(config.checkpoint.mirror, run, use_earlier=use_earlier)
    checkpoints = run_folder.checkpoints_to_resume(run)
    damaged: list[tuple[Path, CorruptError]] = []
    for number, checkpoint in enumerate(checkpoints):
        try:
            run_folder.check_sound(checkpoint)  # only small files; ranks check the tensor files when they load them
        except CorruptError as error:
            damaged.append((checkpoint, error))
            if not use_earlier:
                break
        else:
            return tuple(checkpoints[number:]), tuple(damaged), None
    if damaged:
        raise damaged[0][1]
    load = config.checkpoint.load
    if not load:
        return (), (), None
    try:  # all machines share the run's folder, so the copy of a URL's checkpoint goes there
        path: str | Path = fetch_checkpoint(load, run / run_folder.LOADED, logger.info) if is_url(load) else load
        return (), (), find_checkpoint(path)
    except InputError as error:
        raise InputError(f"checkpoint.load: {error}") from None


def _tokenizer_problems(config: RunConfig) -> list[str]:
    """Return the problems of the tokenizer, which would otherwise show only at the first save."""
    path = config.data.tokenizer
    if path is None or not (is_url(path) or Path(path).exists()):  # the section `data` reports a missing file
        return []
    try:
        tokenizer = load_tokenizer(path, needs_eod=False)  # token files already contain the end-of-document token
    except InputError as error:
        return [f"data.tokenizer: {error}"]
    if tokenizer.vocab_size > config.model.vocab_size:
        return [
            f"model.vocab_size is {config.model.vocab_size}, but {path} has {tokenizer.vocab_size} ids; "
            "raise it to that"
        ]
    return []


def _resume_problems(checkpoint: Path, config: RunConfig, length_field: str) -> list[str]:
    """Return the reasons why a run cannot resume: the model or `FIXED_FIELDS` changed, or its step is past the end.

    Args:
        length_field: the field of `training` that states the run's length.
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
    present, before = flatten(config.as_dict()), flatten(saved)
    return problems + [
        f"{name} is {present[name]}, but the run in {config.training.run_dir} has {before.get(name)}; change it back, "
        "or name another training.run_dir, which checkpoint.load starts from this one's weights"
        for name in FIXED_FIELDS
        if present[name] != before.get(name)
    ]


def _model_problems(checkpoint: Path, config: RunConfig, may_differ: tuple[str, ...] = ()) -> list[str]:
    """Return one line for each model field that differs from the checkpoint's, other than those in `may_differ`."""
    saved = run_folder.saved_model(checkpoint).resolved_fields()
    remedies = {"padded_vocab_size": f"set model.make_vocab_size_divisible_by to {saved['padded_vocab_size']}"}
    return [
        f"model.{name} is {value}, but the checkpoint {checkpoint} was saved with {saved[name]}; "
        f"{remedies.get(name, 'set it to that')}"
        for name, value in config.model.resolved_fields().items()
        if value != saved[name] and name.partition(".")[0] not in may_differ
    ]
