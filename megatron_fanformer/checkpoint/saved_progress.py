"""How far a run had come when it wrote a checkpoint. Read as data alone; torch is all that it takes."""

import io
from pathlib import Path
from typing import Any, NamedTuple

from megatron_fanformer.checkpoint.full_tensors import COMMON, damage_told, load_data, plain_values
from megatron_fanformer.checkpoint.tensor_table import Stored, Table, stored_parts
from megatron_fanformer.errors import CorruptError

COMMON_STATE = "common_state/"


class SavedProgress(NamedTuple):
    """What a run goes on from."""

    step: int
    consumed_samples: int


def saved_progress(checkpoint: Path, table: Table) -> SavedProgress | None:
    """Step and samples of a checkpoint with its `table`; None for converted weights.

    Raises:
        CorruptError: it cannot be read as data alone, or is no progress.
    """
    file, common = _plain_values(checkpoint, table)
    progress = common.get("progress") if isinstance(common, dict) else common
    if isinstance(common, dict) and not progress:
        return None
    found = progress if isinstance(progress, dict) else {}
    step, samples = found.get("step"), found.get("consumed_samples")
    if not isinstance(step, int) or not isinstance(samples, int):
        raise CorruptError(f"{checkpoint / file} holds no step and samples ({progress!r}); take another checkpoint")
    return SavedProgress(step, samples)


def _plain_values(checkpoint: Path, table: Table) -> tuple[str, Any]:
    """The file that they are in, and they: megatron-core 0.16 gives them one, later ones put them by the tensors."""
    place = common_state(table)
    if place is None:
        if not (checkpoint / COMMON).is_file():
            raise CorruptError(f"{checkpoint / COMMON} is missing; take another checkpoint")
        return COMMON, plain_values(checkpoint)
    path = checkpoint / place.file
    with damage_told(path), path.open("rb") as stream:
        stream.seek(place.offset)
        (common,) = load_data(io.BytesIO(stream.read(place.length)))
    return place.file, common


def common_state(table: Table) -> Stored | None:
    """Where a table has the plain values; None where they are in `common.pt`."""
    return next((part for part in stored_parts(table) if part.name.startswith(COMMON_STATE)), None)
