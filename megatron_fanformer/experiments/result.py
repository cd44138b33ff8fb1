"""The result of an experiment: what its folder's result.json holds, written and read again.

    {"experiment": "mod", "version": 1,
     "settings": all that determines it, "machine": {…}, "seconds": 81.2,
     "findings": [{"name", "paper", "ours", "interval", "unit", "same_settings", "shows", "sentence"}],
     "tables": [{"title", "columns", "rows"}],
     "pictures": names of PNG files in the folder}

It is written last, so that a folder that has it is whole, and it is all that `report` reads.
"""

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from megatron_fanformer.durable_files import regular_file, write_atomically
from megatron_fanformer.errors import CorruptError, InputError
from megatron_fanformer.processes import usable_cores

RESULT = "result.json"
VERSION = 1
MOST_BYTES = 1 << 26

Cell = str | int | float | bool | None
"""A cell of a table."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One claim of the paper, and the result here."""

    name: str
    """The measured quantity, such as `error outside the range, FAN over MLP`."""
    paper: str | None = None
    """The paper's own figure, or what it says; None where it says nothing."""
    ours: float | None
    """Our figure; None if nothing could be measured."""
    interval: tuple[float | None, float | None] | None = None
    """95% interval, low to high, with None where it has no bound; None without one, as for one seed, or where no number
    is in it."""
    unit: str
    """Unit, such as `ratio`, `nats per token`, `%`."""
    same_settings: bool = False
    """Whether it was measured as the paper did: model, data and length."""
    shows: bool | None
    """Whether the effect shows, by a rule that was fixed beforehand; None: inconclusive."""
    exploratory: bool = False
    """Whether the comparison was not stated beforehand, so that it cannot show anything."""
    sentence: str
    """The rule and its outcome in plain words."""


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """Rows under headings."""

    title: str
    columns: list[str]
    rows: list[list[Cell]]


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an experiment."""

    experiment: str
    version: int = VERSION
    settings: dict[str, Any]
    """All settings that determine it."""
    machine: dict[str, Any]
    """The machine that it was measured on, from `this_machine`."""
    seconds: float
    """Time of the measurement on that machine."""
    findings: list[Finding]
    tables: list[Table] = []
    pictures: list[str] = []
    """File names in the result's folder."""


Log = Callable[[str], None]
"""Called with a line on a probe's progress."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The results of a probe, before they are written."""

    findings: list[Finding]
    tables: list[Table] = field(default_factory=list)
    pictures: dict[str, bytes] = field(default_factory=dict)
    """PNG files by their names."""
    seconds: float | None = None
    """Computing time, if earlier calls did a part; None: this call's time is all."""


def this_machine() -> dict[str, Any]:
    """Return what a measurement depends on here: cores, processor, GPU, versions."""
    import torch

    from megatron_fanformer.checkpoint.manifest import versions

    return {
        "cores": usable_cores(),
        "processor": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "versions": versions(),
    }


def write_result(folder: Path, result: Result) -> None:
    """Write `result.json` into an experiment's folder, atomically; its pictures are there already.

    Raises:
        OSError: it cannot be written.
    """
    problems = _problems(folder, result)
    assert not problems, problems
    content = msgspec.json.format(msgspec.json.encode(result), indent=1)
    write_atomically(folder / RESULT, content + b"\n")


def read_result(path: Path) -> Result:
    """Return the result in an experiment's folder.

    Args:
        path: the folder, or its result.json.

    Raises:
        InputError: there is none, or it is none of this version's.
        CorruptError: it is not whole.
    """
    file = path / RESULT if path.is_dir() else path
    try:
        result = msgspec.json.decode(regular_file(file, most_bytes=MOST_BYTES).read_bytes(), type=Result)
    except OSError as error:
        raise InputError(f"{file} cannot be read ({error.strerror}); name the folder of an experiment") from None
    except msgspec.ValidationError as error:
        raise InputError(f"{file} is not the result of an experiment ({error}); name another") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptError(f"{file} is not valid JSON ({error}); run the experiment again") from None
    if problems := _problems(file.parent, result):
        raise CorruptError(f"{file}: {problems[0]}; run the experiment again")
    return result


def _problems(folder: Path, result: Result) -> Sequence[str]:
    found = []
    if result.version != VERSION:
        found.append(f"its version is {result.version}, and this program reads {VERSION}")
    for picture in result.pictures:
        if Path(picture).name != picture or not (folder / picture).is_file():
            found.append(f"the picture {picture!r} is not in its folder")
    return found
