"""`PREFIX.parts/`: the state of an unfinished preparation, so that the same command continues it.

It holds the assignment (what is being prepared), the finished shards, and the unfinished output files. One process
at a time holds its lock. When the preparation is complete, the folder is removed.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from megatron_fanformer.data.manifest import ChatSettings, Encoding, Settings, TokenizerRecord
from megatron_fanformer.durable_files import empty, remove_with_lock, take_lock, write_atomically
from megatron_fanformer.errors import InputError, InUseError
from megatron_fanformer.preparation.shards import ShardFiles

LOCK = "lock"


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """The inputs and settings of a preparation; a folder with others belongs to another one."""

    inputs: list[str]
    settings: Settings
    tokenizer: TokenizerRecord
    encoding: Encoding

    def difference(self, other: "Assignment") -> str | None:
        """Describe how `other` differs; what computes the ids does not matter."""
        return (
            settings_difference(self.settings, other.settings)
            or tokenizer_difference(self.tokenizer, other.tokenizer)
            or (None if self.inputs == other.inputs else "other inputs")
        )


def settings_difference(ours: Settings, theirs: Settings) -> str | None:
    """Return the first setting that differs, in words; None if none does."""
    if ours.chat is None or theirs.chat is None:
        if ours.chat is not theirs.chat:
            return "conversations and not documents" if ours.chat is None else "documents and not conversations"
    elif ours.chat != theirs.chat:
        return _first_difference(ours.chat, theirs.chat)
    return None if ours == theirs else _first_difference(ours, theirs)


def _first_difference(ours: Settings | ChatSettings, theirs: Settings | ChatSettings) -> str:
    name = next(name for name in ours.__struct_fields__ if getattr(ours, name) != getattr(theirs, name))
    if name == "template":  # too long to be shown
        return "another chat template"
    return f"{name} {getattr(theirs, name)!r} and not {getattr(ours, name)!r}"


def tokenizer_difference(ours: TokenizerRecord, theirs: TokenizerRecord) -> str | None:
    """Describe how two tokenizers differ; None if they are the same, wherever they are stored."""
    if ours.sha256 != theirs.sha256:
        return f"another tokenizer ({theirs.path})"
    return None if ours.eod_id == theirs.eod_id else f"eod_id {theirs.eod_id} and not {ours.eod_id}"


class WorkFolder:
    """The folder of one prefix; created, locked and released by `work_folder`."""

    def __init__(self, prefix: str) -> None:
        self.path = folder_path(prefix)
        self._assignment_file = self.path / "assignment.json"

    def shard(self, number: int) -> ShardFiles:
        """Return the files of an input's shard."""
        return ShardFiles(self.path, number)

    def read_assignment(self) -> Assignment | None:
        """Read what is being prepared here; None in a new folder."""
        try:
            return msgspec.json.decode(self._assignment_file.read_bytes(), type=Assignment)
        except FileNotFoundError:
            return None
        except msgspec.MsgspecError as error:
            raise InputError(
                f"{self._assignment_file} cannot be read ({error}); remove the folder {self.path}"
            ) from error

    def write_assignment(self, assignment: Assignment) -> None:
        """Start: from here on the folder belongs to this preparation."""
        self.publish(msgspec.json.encode(assignment), self._assignment_file)

    def publish(self, data: bytes, path: Path) -> None:
        """Write a small file atomically, here or beside the folder."""
        write_atomically(path, data, aside=self.path)

    def clear(self) -> None:
        """Remove all that has been done; the lock and the assignment stay: the folder is still this preparation's."""
        for path in self.path.iterdir():
            if path.name not in (LOCK, self._assignment_file.name):
                path.unlink()

    def end(self) -> None:
        """Remove all but the lock: nothing is left to be continued, and the folder goes when it is released."""
        empty(self.path, except_for=self.path / LOCK)

    @property
    def holds_shards(self) -> bool:
        """Return whether any input is done."""
        return any(self.path.glob("[0-9]*.json"))


def folder_path(prefix: str) -> Path:
    """Return the path of a prefix's work folder, which need not exist."""
    return Path(prefix + ".parts")


@contextmanager
def work_folder(prefix: str) -> Iterator[WorkFolder]:
    """Yield the locked work folder of a prefix, created if missing.

    Kept if shards are done and not yet published; otherwise removed, with the folders created for it.
    Raises InUseError if another process holds it.
    """
    work = WorkFolder(prefix)
    parents = [folder for folder in work.path.absolute().parents if not folder.exists()]
    work.path.mkdir(parents=True, exist_ok=True)
    lock = take_lock(work.path / LOCK, wait=False)
    if lock is None:
        raise InUseError(f"{prefix} is being written by another process; wait for it, or choose another prefix")
    try:
        yield work
    finally:
        if work.path.exists() and not work.holds_shards:
            remove_with_lock(work.path, work.path / LOCK, lock)
        else:
            os.close(lock)
        for folder in parents:
            with suppress(OSError):
                folder.rmdir()
