"""`PREFIX.parts/`: where an unfinished preparation stands, so that the same command goes on with it.

It holds the assignment (what is being prepared), the shards that are done, and the output files that are not. One
process at a time holds its lock. When the preparation is complete the folder goes.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from megatron_fanformer.data.manifest import Encoding, Settings, TokenizerRecord
from megatron_fanformer.durable_files import take_lock, write_atomically
from megatron_fanformer.errors import InputError
from megatron_fanformer.preparation.shards import ShardFiles

LOCK = "lock"


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """What is being prepared; a folder with another one is another preparation's."""

    inputs: list[str]
    settings: Settings
    tokenizer: TokenizerRecord
    encoding: Encoding

    def difference(self, other: "Assignment") -> str | None:
        """In what `other` was meant otherwise, in words. By what the ids are computed is no matter."""
        return (
            settings_difference(self.settings, other.settings)
            or tokenizer_difference(self.tokenizer, other.tokenizer)
            or (None if self.inputs == other.inputs else "other inputs")
        )


def settings_difference(ours: Settings, theirs: Settings) -> str | None:
    """The first setting that is not the same, in words; None where all are."""
    for name in ours.__struct_fields__:
        if getattr(ours, name) != getattr(theirs, name):
            return f"{name} {getattr(theirs, name)!r} and not {getattr(ours, name)!r}"
    return None


def tokenizer_difference(ours: TokenizerRecord, theirs: TokenizerRecord) -> str | None:
    """What tells two tokenizers apart, in words; None where they are the same, wherever they stand."""
    if ours.sha256 != theirs.sha256:
        return f"another tokenizer ({theirs.path})"
    return None if ours.eod_id == theirs.eod_id else f"eod_id {theirs.eod_id} and not {ours.eod_id}"


class WorkFolder:
    """The folder of one prefix; made, locked and left by `work_folder`."""

    def __init__(self, prefix: str) -> None:
        self.path = folder_path(prefix)
        self._prefix = prefix
        self._assignment_file = self.path / "assignment.json"

    def shard(self, number: int) -> ShardFiles:
        """Where the shard of an input stands."""
        return ShardFiles(self.path, number)

    def read_assignment(self) -> Assignment | None:
        """What is being prepared here; None in a new folder."""
        try:
            return msgspec.json.decode(self._assignment_file.read_bytes(), type=Assignment)
        except FileNotFoundError:
            return None
        except msgspec.MsgspecError as error:
            raise InputError(
                f"{self._assignment_file} cannot be read ({error}): remove the folder {self.path}"
            ) from error

    def write_assignment(self, assignment: Assignment) -> None:
        """Begin: from here on the folder is this preparation's."""
        self.publish(msgspec.json.encode(assignment), self._assignment_file)

    def publish(self, data: bytes, path: Path) -> None:
        """Write a small file, here or beside the folder, whole or not at all."""
        write_atomically(path, data, aside=self.path)

    def clear(self) -> None:
        """Remove all that has been done; the lock and the assignment stay, so that the folder is still this one's."""
        for path in self.path.iterdir():
            if path.name not in (LOCK, self._assignment_file.name):
                path.unlink()

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path)

    @property
    def holds_shards(self) -> bool:
        """Whether any input is done."""
        return any(self.path.glob("[0-9]*.json"))


def folder_path(prefix: str) -> Path:
    """Where the work folder of a prefix stands, or would."""
    return Path(prefix + ".parts")


@contextmanager
def work_folder(prefix: str) -> Iterator[WorkFolder]:
    """The locked work folder of a prefix, made where there is none.

    Left behind where shards are done and not yet published; otherwise removed, with the folders made for it.
    Raises InputError where another process holds it.
    """
    work = WorkFolder(prefix)
    parents = [folder for folder in work.path.absolute().parents if not folder.exists()]
    work.path.mkdir(parents=True, exist_ok=True)
    lock = take_lock(work.path / LOCK, wait=False)
    if lock is None:
        raise InputError(f"{prefix} is being written by another process: wait for it, or choose another prefix")
    try:
        yield work
    finally:
        if work.path.exists() and not work.holds_shards:
            work.remove()
        os.close(lock)
        for folder in parents:
            with suppress(OSError):
                folder.rmdir()
