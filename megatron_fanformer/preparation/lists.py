"""A folder of lists of a preparation's inputs, for tasks on many machines.

000, 001, …     the lists: a path a line, which `prepare` takes as @FOLDER/000
lists.json      how many lists there are, and what each holds
tasks.json      what all tasks must agree on; written by the first
000.task/       of a list that a task has taken: run.lock, while it works on it (checkpoint/run_lock.py), and
                state.json, how far it came, or its error
"""

import heapq
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from megatron_fanformer.checkpoint.run_lock import holder_of
from megatron_fanformer.data.blends import TEXT_ENCODING
from megatron_fanformer.data.manifest import InputRecord, Settings, TokenizerRecord
from megatron_fanformer.durable_files import new_folder, regular_file, take_lock, write_atomically
from megatron_fanformer.errors import InputError
from megatron_fanformer.preparation.inputs import COMPRESSIONS, LARGEST_LIST_BYTES
from megatron_fanformer.preparation.remote_inputs import InputFile, recorded_path
from megatron_fanformer.preparation.remote_outputs import is_complete
from megatron_fanformer.preparation.work_folder import folder_path, settings_difference, tokenizer_difference
from megatron_fanformer.terminal import plural, size

RECORD, AGREEMENT, STATE = "lists.json", "tasks.json", "state.json"
DIGITS = 3  # at least, of a list's name
COMPRESSED_WEIGHT = 2.5
"""Bytes of text in a byte of a compressed file: 2.3 to 2.9 of Dolma's sample documents and this project's pages."""


class ListRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One list."""

    name: str
    files: int
    bytes: int
    """Of its files, as they are on disk."""


class ListsRecord(msgspec.Struct, frozen=True, kw_only=True):
    """All lists of a folder."""

    lists: list[ListRecord]


class Agreement(msgspec.Struct, frozen=True, kw_only=True):
    """What all tasks have in common."""

    output: str
    """Absolute prefix, or its URL, to which each list's name is added."""
    settings: Settings
    tokenizer: TokenizerRecord
    strict: bool = False


class EmptyList(msgspec.Struct, frozen=True, kw_only=True):
    """What was read of a list that holds no document, and so has no token files."""

    lines_read: int
    refused: dict[str, int]
    inputs: list[InputRecord]


class ListState(msgspec.Struct, frozen=True, kw_only=True):
    """How far the last task on a list came."""

    empty: EmptyList | None = None
    """Of a list that is done and holds no document."""

    documents: int = 0
    text_bytes: int = 0
    """UTF-8 bytes of text that it has encoded itself."""
    input_bytes: int = 0
    """Bytes of the list's files that are done, by whichever task."""
    seconds: float = 0.0
    error: str | None = None
    """Why it failed; None if it did not."""


@dataclass(frozen=True)
class InputLists:
    """An existing folder of lists."""

    folder: Path
    records: list[ListRecord]

    def paths(self, name: str) -> list[str]:
        """Return the input files of a list. Raises OSError or UnicodeDecodeError if it cannot be read."""
        file = regular_file(self.folder / name, most_bytes=LARGEST_LIST_BYTES)
        return file.read_text(encoding=TEXT_ENCODING).splitlines()

    def task_folder(self, name: str) -> Path:
        """Return the folder of the task on a list, which need not exist."""
        return self.folder / f"{name}.task"

    def read_state(self, name: str) -> ListState | None:
        """Return how far the last task on a list came; None where there was none."""
        try:
            return msgspec.json.decode((self.task_folder(name) / STATE).read_bytes(), type=ListState)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return None

    def write_state(self, name: str, state: ListState) -> None:
        """Record how far this task has come; to be called while it holds the list."""
        write_atomically(self.task_folder(name) / STATE, msgspec.json.encode(state))

    def read_agreement(self) -> Agreement | None:
        """Return what the tasks have agreed on; None before the first. Raises InputError if it cannot be read."""
        path = self.folder / AGREEMENT
        try:
            return msgspec.json.decode(regular_file(path).read_bytes(), type=Agreement)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise InputError(f"{path} cannot be read ({error}); remove it, and start a task again") from error

    def agree(self, ours: Agreement) -> None:
        """Write down what this task's preparations are, or compare it with what the first task has written.

        Raises InputError for a difference.
        """
        lock = take_lock(self.folder / ".lock", wait=True)
        try:
            theirs = self.read_agreement()
            if theirs is None or (ours != theirs and not self._is_begun(theirs)):
                for record in self.records:  # of tasks with other options, which left nothing behind
                    (self.task_folder(record.name) / STATE).unlink(missing_ok=True)
                write_atomically(self.folder / AGREEMENT, msgspec.json.encode(ours))
                return
        finally:
            os.close(lock)  # type: ignore[arg-type]  # it waits until it has one
        difference = difference_of(ours, theirs)
        if ours.output != theirs.output:
            difference = f"output {theirs.output} and not {ours.output}"
        elif ours.strict != theirs.strict:
            difference = f"strict {theirs.strict} and not {ours.strict}"
        if difference:
            raise InputError(
                f"{self.folder} was begun with {difference}; give this task the others' options, or write new lists"
            )

    def _is_begun(self, agreement: Agreement) -> bool:
        """Return whether a list is done, or a task has begun it and may go on."""
        names = [record.name for record in self.records]
        prefixes = [list_prefix(agreement.output, name) for name in names]
        return any(holder_of(self.task_folder(name)) is not None for name in names) or any(map(is_begun, prefixes))


def difference_of(ours: Agreement, theirs: Agreement) -> str | None:
    """Describe how settings or tokenizers of two tasks differ; None if they do not."""
    return settings_difference(ours.settings, theirs.settings) or tokenizer_difference(ours.tokenizer, theirs.tokenizer)


def list_prefix(output: str, name: str) -> str:
    """Return the prefix of a list's token files."""
    return f"{output}-{name}"


def is_begun(prefix: str) -> bool:
    """Return whether a preparation to a prefix is complete, or may go on here."""
    return is_complete(prefix) or folder_path(prefix).exists()


def is_done(output: str, name: str) -> bool:
    """Return whether a list's preparation is complete: its manifest comes last."""
    return is_complete(list_prefix(output, name))


def read_lists(folder: Path) -> InputLists:
    """Open a folder of lists. Raises InputError if it is none."""
    path = folder / RECORD
    try:
        record = msgspec.json.decode(regular_file(path).read_bytes(), type=ListsRecord)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{path} cannot be read ({reason}); name a folder that prepare --lists has written") from error
    return InputLists(folder, record.lists)


@dataclass
class Share:
    """One of the shares of a preparation's inputs."""

    files: list[InputFile] = field(default_factory=list)
    bytes: int = 0
    weight: float = 0.0
    """Bytes of text, about."""


def share_files(files: Sequence[InputFile], number: int) -> list[Share]:
    """Share files, about equally by bytes of text; of fewer files than `number`, each is a share.

    The largest file goes first, each to the share that has the fewest bytes yet; of equal ones the order of paths and
    of shares decides, so that the same files give the same shares.
    """
    weighed: list[tuple[float, str, int, InputFile]] = []
    for file in files:
        path, size_bytes = recorded_path(file), file.stat().st_size
        weight = size_bytes * (COMPRESSED_WEIGHT if path.endswith(tuple(COMPRESSIONS)) else 1.0)
        weighed.append((-weight, path, size_bytes, file))
    shares = [Share() for _ in range(min(number, len(weighed)))]
    lightest = [(0.0, 0, place) for place in range(len(shares))]  # weight, files, share
    for minus_weight, _, size_bytes, file in sorted(weighed, key=lambda each: each[:2]):
        weight, held, place = heapq.heappop(lightest)
        share = shares[place]
        share.files.append(file)
        share.bytes += size_bytes
        share.weight = weight - minus_weight
        heapq.heappush(lightest, (share.weight, held + 1, place))
    return shares


def write_lists(files: Sequence[InputFile], number: int, folder: Path) -> str:
    """Write lists of files, a list for each of their shares, into a new folder; returns what to report.

    Raises InputError for a folder that exists, or a path that no list can hold.
    """
    if number < 1:
        raise InputError(f"--lists is {number}; it must be at least 1")
    for path in map(recorded_path, files):
        # A list is UTF-8 text, some of whose characters end a line, and its lines are stripped.
        if path.splitlines() != [path.strip()] or path.encode("utf-8", "replace").decode() != path:
            raise InputError(f"{path!r} cannot stand on a line of a list; rename the file")
    shares = share_files(files, number)
    count = len(shares)
    digits = max(DIGITS, len(str(count - 1)))
    names = [f"{place:0{digits}d}" for place in range(count)]
    records = [
        ListRecord(name=name, files=len(share.files), bytes=share.bytes)
        for name, share in zip(names, shares, strict=True)
    ]
    with new_folder(folder) as partial:
        for name, share in zip(names, shares, strict=True):
            paths = sorted(map(recorded_path, share.files))
            (partial / name).write_text("".join(f"{path}\n" for path in paths), encoding="utf-8")
        (partial / RECORD).write_bytes(msgspec.json.format(msgspec.json.encode(ListsRecord(lists=records)), indent=2))
    fewer = f", not {number}: no file is cut" if count < number else ""
    weights, total = [share.weight for share in shares], sum(share.bytes for share in shares)
    spread = f"the largest is {max(weights) / min(weights):.2f} times the smallest" if min(weights) else "one is empty"
    return (
        f"{folder}: {plural(count, 'list')}{fewer}, of {plural(len(files), 'file')} with {size(total)};"
        f" by bytes of text {spread}"
    )
