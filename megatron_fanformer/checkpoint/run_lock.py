"""One writer for a run's folder: the file `run.lock` in it, from before its checkpoint is chosen until the run ends.

It must hold on file systems that several machines share, where advisory locks may be missing or local to one machine,
and a run that crashed must not keep the next one out. So the lock is a file with the holder's entry.

**Taking it.** The entry is written under a name of its own, and linked to `run.lock`: link(2) is atomic, and fails
where that exists. Who finds the entry of a dead holder links to `run.lock.TOKEN`, with the dead holder's token: of all
that find it, one succeeds, whose file then replaces `run.lock`. One that dies before it does is succeeded in the same
way, by its own token.

A holder in the same place (machine, boot and process namespace) is **dead** if its process is gone, or another one by
its start time, or if its entry was copied along with its folder. For a holder in another place, the file's modification
time is watched, which the holder renews: it is dead if it has not done so for `STALE_SECONDS`, or for some beats and is
that late by the times of files that are written beside it (never by this machine's clock).
"""

import errno
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
WATCHED_BEATS = 3  # at least, whatever the age of the last one: machines' clocks may differ
MOST_BYTES = 1 << 16  # of an entry
NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
"""The errors of a file system without hard links."""


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """The holder of a lock."""

    token: str
    host: str
    pid: int
    since: str
    place: str = ""
    """The machine, boot and process namespace in which its process number is valid."""
    started: str = ""
    """The process's start time by its kernel's count, which distinguishes it from a later one of the same number."""
    folder: str = ""
    """The absolute path of the run's folder there."""


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
            token = _take(run)
        except OSError as error:
            what = (
                "is a file; name a folder" if run.is_file() else f"cannot be written ({error.strerror}); name another"
            )
            raise InputError(f"{option} {run} {what}") from error
        ending.callback(_give_back, run, token)
        ended = threading.Event()
        beats = threading.Thread(target=_beat, args=(run / LOCK, token, ended), name="run_lock", daemon=True)
        beats.start()
        ending.callback(beats.join)
        ending.callback(ended.set)
        yield FolderWatch(run)


def _remove_empty(folders: list[Path]) -> None:
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def _give_back(run: Path, token: str) -> None:
    with suppress(OSError):  # the folder is gone, or another run's by now
        if _holder(run / LOCK).token == token:
            (run / LOCK).unlink()


def _take(run: Path) -> str:
    """Take the lock; returns the token. Raises as `_has_taken`."""
    own = Holder(
        token=uuid.uuid4().hex,
        host=platform.node(),
        pid=os.getpid(),
        since=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC"),
        place=_place(),
        started=_start_time(os.getpid()) or "",
        folder=str(run.absolute()),
    )
    entry = run / f".{LOCK}.{own.token}.tmp"
    try:
        entry.write_bytes(msgspec.json.encode(own))
        while not _has_taken(run, entry):
            pass  # another one was faster, or is just letting it go
    finally:
        entry.unlink(missing_ok=True)
    return own.token


def _has_taken(run: Path, entry: Path) -> bool:
    """Try to take the lock; False if it has changed meanwhile.

    Raises InUseError if another process holds it, InputError if what is there is not a file.
    """
    path, dead = run / LOCK, dict[Path, str]()
    while not _links(entry, path):
        if path.is_symlink() or path.is_dir():  # a link to nothing would be in the way for ever, and never be found
            what = "a link" if path.is_symlink() else "a folder"
            raise InputError(f"{path} is {what}, not the lock of a run, which is a file; remove it")
        try:
            holder = _holder(path)
        except FileNotFoundError:
            return False
        if _is_alive(run, path, holder, entry):
            raise InUseError(
                f"{run} is in use by a run on {holder.host} (process {holder.pid}) since {holder.since}; wait for its"
                " end, stop it, or name another folder"
            )
        dead[path] = holder.token
        path = run / f"{LOCK}.{holder.token}"
    try:
        is_unchanged = all(_holder(place).token == token for place, token in dead.items())
    except FileNotFoundError:
        is_unchanged = False
    if not is_unchanged:
        path.unlink()
        return False
    if dead:
        os.replace(path, run / LOCK)
        for place in dead.keys() - {run / LOCK}:
            place.unlink(missing_ok=True)
    return True


def _links(entry: Path, path: Path) -> bool:
    try:
        os.link(entry, path)
    except FileExistsError:
        return entry.stat().st_nlink > 1  # over NFS, a link that was made may be reported as one that was in the way
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        with suppress(FileExistsError), path.open("xb") as stream:
            stream.write(entry.read_bytes())
            return True
        return False
    return True


def _holder(path: Path) -> Holder:
    """Read the holder of a lock. An empty or damaged one has no known holder, and its times decide."""
    content, _ = _read(path)
    with suppress(msgspec.MsgspecError, UnicodeDecodeError):
        holder = msgspec.json.decode(content, type=Holder)
        if holder.token.isalnum() and f"{holder.host}{holder.since}".isprintable():
            return holder
    return Holder(token=f"unknown{path.stat().st_ino}", host="an unknown host", pid=0, since="an unknown time")


def _read(path: Path) -> tuple[bytes, float]:
    """Return content and modification time of a file, which is opened for both: what NFS remembers of it may be old."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a FIFO by that name would not let go of it
    try:
        return os.read(descriptor, MOST_BYTES), os.fstat(descriptor).st_mtime
    finally:
        os.close(descriptor)


# -- whether a holder lives


def holder_of(run: Path) -> Holder | None:
    """Return who holds the lock of a folder, without waiting; None where nobody seems to.

    A holder elsewhere seems to while its entry, by the times of files written beside it, is not older than
    `STALE_SECONDS`: one that died is taken for a holder so long, and what `run_lock` finds out by waiting is exact.
    """
    try:
        _, renewed = _read(run / LOCK)
        holder = _holder(run / LOCK)
    except OSError:
        return None
    if holder.place == _place():
        return holder if _lives_here(run, holder) else None
    beside = run / f".{LOCK}.{uuid.uuid4().hex}.tmp"
    try:
        beside.touch()
        now = beside.stat().st_mtime
        beside.unlink()
    except OSError:  # a reader who may not write: this machine's clock has to do
        now = time.time()
    return holder if now - renewed <= STALE_SECONDS else None


def _is_alive(run: Path, path: Path, holder: Holder, entry: Path) -> bool:
    return _lives_here(run, holder) if holder.place == _place() else _is_renewed(path, holder, entry)


def _lives_here(run: Path, holder: Holder) -> bool:
    """Return whether a holder in this place lives, and holds this folder and not a copy of it."""
    try:
        is_its_folder = os.path.samefile(holder.folder, run)
    except OSError:  # it was moved: its run ends
        is_its_folder = False
    return is_its_folder and _start_time(holder.pid) == holder.started


def _is_renewed(path: Path, holder: Holder, entry: Path) -> bool:
    """Watch a lock until it is renewed, or until that is overdue."""
    logger.warning("%s was left by a run on %s, or is in use: waiting for a sign of life", path.parent, holder.host)
    begun, watched, late = time.monotonic(), 0.0, 0.0
    try:
        _, first = _read(path)
        while watched <= STALE_SECONDS and (watched <= WATCHED_BEATS * BEAT_SECONDS or late <= STALE_SECONDS):
            time.sleep(LOOK_SECONDS)
            os.utime(entry)
            if (last := _read(path)[1]) != first:
                return True
            watched, late = time.monotonic() - begun, _read(entry)[1] - last
    except FileNotFoundError:  # it was given back
        pass
    return False


def _beat(path: Path, token: str, ended: threading.Event) -> None:
    while not ended.wait(BEAT_SECONDS):
        with suppress(OSError):
            if _holder(path).token == token:
                os.utime(path)


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


# -- whether a run is still in its folder


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


def file_of(name: str | int) -> tuple[int, int] | None:
    """Return which file, or folder, a path or a descriptor stands for; None where it is nothing."""
    try:
        found = os.stat(name)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino
