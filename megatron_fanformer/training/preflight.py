"""What is checked before a run starts: its configuration, and every file that it is going to read."""

import dataclasses
from pathlib import Path
from typing import Any

from megatron_fanformer.checkpoint import store
from megatron_fanformer.data.tokenizer import load_tokenizer
from megatron_fanformer.errors import InputError
from megatron_fanformer.model.config import FANformerConfig
from megatron_fanformer.training.config import RunConfig
from megatron_fanformer.training.machine_rules import machine_problems


def check_run(config: RunConfig, world_size: int | None) -> int:
    """Check a run in a world of that many ranks (None: to be launched here); returns its data parallel size.

    Raises:
        InputError: all that is wrong, one line each; what this machine lacks where nothing else is.
    """
    found: list[str] = []
    data_parallel_size = 1
    if not config.parallel.problems():
        try:
            data_parallel_size = config.parallel.resolve_data_parallel_size(world_size)
        except InputError as error:
            found.append(str(error))
    found += config.problems(data_parallel_size)
    found += _file_problems(config)
    found = found or machine_problems(config)  # which imports torch: what is wrong without it is told at once
    if found:
        raise InputError("\n".join(found))
    config.data.check_token_ids(config.model.vocab_size)
    return data_parallel_size


def _file_problems(config: RunConfig) -> list[str]:
    found = _tokenizer_problems(config)
    run = Path(config.training.run_dir)
    if run.exists() and not run.is_dir():
        return [f"training.run_dir {run} is a file; name a folder"]
    resumed = store.latest_checkpoint(run)
    if resumed:
        found += _resume_problems(resumed, config)
    elif config.checkpoint.load:
        try:
            start = store.find_checkpoint(Path(config.checkpoint.load))
        except InputError as error:
            found.append(f"checkpoint.load: {error}")
        else:
            found += _model_problems(start, config, ignoring=("seq_length",))  # weights fit any length
    return found


def _tokenizer_problems(config: RunConfig) -> list[str]:
    """It goes into every checkpoint: better found wanting now than when the first is saved."""
    path = config.data.tokenizer
    if path is None or not Path(path).exists():  # the latter is told with the data's own problems
        return []
    try:
        tokenizer = load_tokenizer(path, eod_id=0)  # whichever: the token files hold the real one
    except InputError as error:
        return [f"data.tokenizer: {error}"]
    if tokenizer.vocab_size > config.model.vocab_size:
        return [
            f"model.vocab_size is {config.model.vocab_size}, but {path} has {tokenizer.vocab_size} ids; "
            "raise it to that"
        ]
    return []


def _resume_problems(checkpoint: Path, config: RunConfig) -> list[str]:
    """A run goes on with its own model, seed and batch size: with others its samples would repeat or be skipped."""
    saved = store.saved_config(checkpoint)
    if "training" not in saved:
        return [
            f"training.run_dir {config.training.run_dir} holds converted weights, not a run; name it as "
            "checkpoint.load, and another run_dir"
        ]
    found = _model_problems(checkpoint, config)
    for name in ("seed", "global_batch_size"):
        present, before = getattr(config.training, name), saved["training"].get(name)
        if present != before:
            found.append(
                f"training.{name} is {present}, but the run in {config.training.run_dir} has {before}; set it back, "
                "or name another training.run_dir"
            )
    return found


def _model_problems(checkpoint: Path, config: RunConfig, ignoring: tuple[str, ...] = ()) -> list[str]:
    saved = _shape(store.saved_model(checkpoint))
    return [
        f"model.{name} is {value}, but the checkpoint {checkpoint} was saved with {saved[name]}; set it to that"
        for name, value in _shape(config.model).items()
        if value != saved[name] and name not in ignoring
    ]


def _shape(model: FANformerConfig) -> dict[str, Any]:
    """A model's fields by their dotted names, those that say the same in other words resolved."""
    fields = _flat(dataclasses.asdict(dataclasses.replace(model, num_query_groups=model.query_groups)))
    del fields["make_vocab_size_divisible_by"]
    return {**fields, "padded_vocab_size": model.padded_vocab_size}


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat.update(_flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value})
    return flat
