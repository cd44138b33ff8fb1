"""What is checked before a run starts: its configuration, and every file that it is going to read."""

import dataclasses
from pathlib import Path
from typing import Any

from megatron_fanformer.checkpoint import store
from megatron_fanformer.data.token_files import check_token_ids
from megatron_fanformer.errors import CorruptError, InputError
from megatron_fanformer.model.config import FANformerConfig
from megatron_fanformer.training.config import RunConfig


def check_run(config: RunConfig, world_size: int | None) -> int:
    """Check a run in a world of that many ranks (None: to be launched here); returns its data parallel size.

    Raises:
        InputError: all that is wrong, one line each.
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
    if found:
        raise InputError("\n".join(found))
    check_token_ids(config.data.prefixes(), config.model.vocab_size)
    return data_parallel_size


def _file_problems(config: RunConfig) -> list[str]:
    found = []
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


def _resume_problems(checkpoint: Path, config: RunConfig) -> list[str]:
    """A run goes on with its own model, seed and batch size: with others its samples would repeat or be skipped."""
    saved = store.saved_config(checkpoint)
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
    try:
        saved = _shape(FANformerConfig.from_dict(store.saved_config(checkpoint)["model"]))
    except (KeyError, TypeError) as error:
        raise CorruptError(f"{checkpoint} states no model ({error}); take another checkpoint") from None
    return [
        f"model.{name} is {value}, but the checkpoint {checkpoint} was saved with {saved[name]}; set it to that"
        for name, value in _shape(config.model).items()
        if value != saved[name] and name not in ignoring
    ]


def _shape(model: FANformerConfig) -> dict[str, Any]:
    """A model's fields by their dotted names; a number of query groups left open is filled in."""
    return _flat(dataclasses.asdict(dataclasses.replace(model, num_query_groups=model.query_groups)))


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat.update(_flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value})
    return flat
