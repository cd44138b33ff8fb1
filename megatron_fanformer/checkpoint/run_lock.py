"""One writer for a run's folder: the file `run.lock` in it, from before its checkpoint is chosen until the run ends.

It holds on file systems that several machines share: link(2) creates the file once, and its holder touches it every
`BEAT_SECONDS`. A lock of this machine is left over if its process is gone; one of another machine if it has not been
touched for `STALE_SECONDS`, by the times of a file that is written beside it. Processes of one machine take turns in
finding that out, by flock; two machines that find it at once are told apart by the content that each moves aside.
"""

import fcntl
import logging
import os
import platform
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path

import msgspec

from megatron_fanformer.checkpoint.store import LOCK
from megatron_fanformer.errors import FanformerError, InputError, InUseError
from megatron_fanformer.processes import stat_fields

logger = logging.getLogger(__name__)

BEAT_SECONDS = 10.0
STALE_SECONDS = 120.0
"""Longer than one call into a library can hold up a process, and than file systems cache times."""
LOOK_SECONDS = 1.0


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """The holder of a lock."""

    host: str = "an unknown host"
    pid: int = 0
    since: str = "an unknown time"
    place: str = ""
    """The machine, boot and process namespace in which its process number is valid."""
    started: str = ""
    """The process's start time by its kernel's count, which distinguishes it from a later one of the same number."""


@contextmanager
def run_lock(run: Path, *, option: str = "training.run_dir") -> Iterator["FolderWatch"]:
    """Hold the lock of a run's folder, which is made if missing, and removed again if nothing is put into it.

    Yields the watch by which the holder notices that the folder is gone, or another one's.

    Args:
        option: what names the folder, for errors.

    Raises:
        InUseError: another run holds it.
        InputError: the folder cannot be written.
    """
    with ExitStack() as ending:
        ending.callback(_remove_empty, [folder for folder in (run, *run.absolute().parents) if not folder.exists()])
        try:
            run.mkdir(parents=True, exist_ok=True)
            _take(run)
        except OSError as error:
            what = (
                "is a file; name a folder" if run.is_file() else f"cannot be written ({error.strerror}); name another"
            )
            raise InputError(f"{option} {run} {what}") from error
        watch, ended = FolderWatch(run), threading.Event()
        beats = threading.Thread(target=_beat, args=(watch, ended), name="run_lock", daemon=True)
        beats.start()
        ending.callback(watch.give_back)
        ending.callback(beats.join)
        ending.callback(ended.set)
        yield watch


def holder_of(run: Path) -> Holder | None:
    """Return who holds the lock of a folder, without waiting; None where nobody seems to."""
    with suppress(OSError):
        holder = _holder(run / LOCK)
        if _is_alive(holder) if holder.place == _place() else _silent_seconds(run) <= STALE_SECONDS:
            return holder
    return None


def _remove_empty(folders: list[Path]) -> None:
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def _take(run: Path) -> None:
    """Create the lock, or raise InUseError."""
    path, turn = run / LOCK, os.open(run, os.O_RDONLY)
    holder = Holder(
        host=platform.node(),
        pid=os.getpid(),
        since=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC"),
        place=_place(),
        started=_start_time(os.getpid()) or "",
    )
    aside, entry = (run / f".{LOCK}.{uuid.uuid4().hex}" for _ in range(2))
    try:
        with suppress(OSError):  # a file system without it has the lock alone
            fcntl.flock(turn, fcntl.LOCK_EX)
        entry.write_bytes(msgspec.json.encode(holder))
        while not _links(entry, path):
            with suppress(FileNotFoundError):  # it was given back meanwhile
                _move_left_over(run, aside)
    finally:
        entry.unlink(missing_ok=True)
        aside.unlink(missing_ok=True)  # now, since the lock would get its inode, by which `FolderWatch` knows it
        os.close(turn)


def _links(entry: Path, path: Path) -> bool:
    """Return whether the lock was created, with its content at once where the file system has hard links."""
    try:
        os.link(entry, path)
    except FileExistsError:
        return entry.stat().st_nlink > 1  # over NFS, a link that was made may be reported as one that was in the way
    except OSError:
        with suppress(FileExistsError), path.open("xb") as stream:
            stream.write(entry.read_bytes())
            return True
        return False
    return True


def _move_left_over(run: Path, aside: Path) -> None:
    path = run / LOCK
    content, holder = path.read_bytes(), _holder(path)
    if _is_alive(holder) if holder.place == _place() else _is_touched(run, holder):
        raise InUseError(
            f"{run} is in use by a run on {holder.host} (process {holder.pid}) since {holder.since}; wait for its end, "
            f"stop it, or name another folder ({path} says so)"
        )
    path.rename(aside)
    if aside.read_bytes() != content:  # another machine was faster, and this is its own
        with suppress(OSError):
            os.link(aside, path)


def _holder(path: Path) -> Holder:
    """Read the holder of a lock; one that is just being written, or is damaged, has none that is known."""
    with suppress(msgspec.MsgspecError, UnicodeDecodeError):
        return msgspec.json.decode(path.read_bytes(), type=Holder)
    return Holder()


def _is_alive(holder: Holder) -> bool:
    return _start_time(holder.pid) == holder.started


def _is_touched(run: Path, holder: Holder) -> bool:
    """Watch a lock until it is touched, or until that is overdue."""
    logger.warning("%s was left by a run on %s, or is in use: waiting for a sign of life", run, holder.host)
    first = (run / LOCK).stat().st_mtime_ns
    while _silent_seconds(run) <= STALE_SECONDS:
        time.sleep(LOOK_SECONDS)
        if (run / LOCK).stat().st_mtime_ns != first:
            return True
    return False


def _silent_seconds(run: Path) -> float:
    """Return the age of a lock by the clock of its file system, or by this machine's where nothing can be written."""
    renewed = (run / LOCK).stat().st_mtime
    beside = run / f".{LOCK}.{uuid.uuid4().hex}.tmp"
    try:
        beside.touch()
        now = beside.stat().st_mtime
        beside.unlink()
    except OSError:
        now = time.time()
    return now - renewed


def _beat(watch: "FolderWatch", ended: threading.Event) -> None:
    while not ended.wait(BEAT_SECONDS):
        watch.touch()


def _place() -> str:
    """Return this machine, its boot and its process namespace: where a process number means the same process."""
    facts = [platform.node()]
    with suppress(OSError):
        facts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        facts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(facts)


def _start_time(pid: int) -> str | None:
    """When a process started, in its kernel's ticks; None if there is none, or if it has ended and is not reaped."""
    try:
        state, *fields = stat_fields(pid)
    except OSError:
        return None
    return None if state in "ZX" else fields[18]


class FolderWatch:
    """A run's folder, and its lock, as they are when a run takes it."""

    def __init__(self, run: Path) -> None:
        self._run, self._lock = str(run), str(run / LOCK)
        self._seen, self._lock_seen = file_of(self._run), file_of(self._lock)

    def check(self) -> None:
        """Look whether the folder is still there, and nobody else's. It costs microseconds.

        Raises:
            FanformerError: it is not: nothing more can be saved in it.
        """
        if file_of(self._run) != self._seen:
            raise FanformerError(
                f"{self._run} was removed or renamed during the run, nothing more can be saved there; put it back, and"
                " start again to resume from its last checkpoint"
            )
        if (lock := file_of(self._lock)) != self._lock_seen and lock is not None:
            raise FanformerError(
                f"{self._run} was taken over by another run, which found no sign of life of this one; let that one go"
                " on, or stop it and start again"
            )

    def touch(self) -> None:
        """Show that the holder lives."""
        with suppress(OSError):
            if file_of(self._lock) == self._lock_seen:
                os.utime(self._lock)

    def give_back(self) -> None:
        """Remove the lock, unless it is another run's by now."""
        with suppress(OSError):
            if file_of(self._lock) == self._lock_seen:
                os.unlink(self._lock)


def file_of(name: str | int) -> tuple[int, int] | None:
    """Return which file, or folder, a path or a descriptor stands for; None where it is nothing."""
    try:
        found = os.stat(name)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino
