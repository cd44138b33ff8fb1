"""`PREFIX.parts/`: where an unfinished preparation stands, so that the same command goes on with it.

It holds the plan (what is being prepared), the shards that are done, and the output files that are not. One
process at a time holds its lock. When the preparation is complete the folder goes.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from megatron_fanformer.data.manifest import Encoding, Settings, TokenizerRecord
from megatron_fanformer.errors import InputError
from megatron_fanformer.preparation.shards import ShardFiles


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What is being prepared; a folder with another plan is another preparation's."""

    inputs: list[str]
    settings: Settings
    tokenizer: TokenizerRecord
    encoding: Encoding

    def difference(self, other: "Plan") -> str | None:
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
        self._plan_file = self.path / "plan.json"

    def shard(self, number: int) -> ShardFiles:
        """Where the shard of an input stands."""
        return ShardFiles(self.path, number)

    def read_plan(self) -> Plan | None:
        """The plan of what stands here; None in a new folder."""
        try:
            return msgspec.json.decode(self._plan_file.read_bytes(), type=Plan)
        except FileNotFoundError:
            return None
        except msgspec.MsgspecError as error:
            raise InputError(f"{self._plan_file} is no plan ({error}): remove the folder {self.path}") from error

    def write_plan(self, plan: Plan) -> None:
        """Begin: from here on the folder is this preparation's."""
        self.publish(msgspec.json.encode(plan), self._plan_file)

    def publish(self, data: bytes, path: Path) -> None:
        """Write a small file, here or beside the folder, whole or not at all."""
        partial = self.path / (path.name + ".partial")
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)

    def clear(self) -> None:
        """Remove all that has been done; the lock stays, and the plan, so that the folder stays this preparation's."""
        for path in self.path.iterdir():
            if path.name not in ("lock", self._plan_file.name):
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
    lock = _lock(work.path / "lock", prefix)
    try:
        yield work
    finally:
        if work.path.exists() and not work.holds_shards:
            work.remove()
        os.close(lock)
        for folder in parents:
            with suppress(OSError):
                folder.rmdir()


def _lock(path: Path, prefix: str) -> int:
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The one who held it before may have finished, and removed the very file that was opened here.
        ours = path.exists() and os.path.samestat(os.fstat(lock), path.stat())
    except BlockingIOError:
        ours = False
    except OSError:  # a file system without locks
        ours = True
    if not ours:
        os.close(lock)
        raise InputError(f"{prefix} is being written by another process: wait for it, or choose another prefix")
    return lock
