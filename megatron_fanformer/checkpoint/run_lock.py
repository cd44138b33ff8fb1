"""One writer for a run's folder: the file `run.lock` in it, from before its checkpoint is chosen until the run ends.

Creating a file that must not exist works on file systems that several machines share, too. A lock of this machine is
left over if its process is gone; one of another machine if nobody has touched it for `STALE_SECONDS`, as its holder
does every `BEAT_SECONDS`: so a run whose machine failed goes on elsewhere.
"""

import fcntl
import logging
import os
import platform
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path

import msgspec

from megatron_fanformer.checkpoint.run_folder import LOCK
from megatron_fanformer.errors import InputError, InUseError
from megatron_fanformer.processes import stat_fields

logger = logging.getLogger(__name__)

BEAT_SECONDS = 10.0
STALE_SECONDS = 120.0
"""Longer than one call into a library can hold up a process, and than file systems cache times."""
LOOK_SECONDS = 1.0


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """The process that holds a lock."""

    host: str = "an unknown host"
    pid: int = 0
    since: str = "an unknown time"
    place: str = ""
    """The machine, boot and process namespace in which its process number is valid."""
    started: str = ""
    """The process's start time by its kernel's count, which distinguishes it from a later one of the same number."""


@contextmanager
def run_lock(run: Path, *, option: str = "training.run_dir") -> Iterator[None]:
    """Hold the lock of a run's folder, which is made if missing, and removed again if nothing is put into it.

    Args:
        option: the name of the folder's option, for errors.

    Raises:
        InUseError: another run holds it.
        InputError: the folder cannot be written.
    """
    missing = [folder for folder in (run, *run.absolute().parents) if not folder.exists()]
    holder = Holder(
        host=platform.node(),
        pid=os.getpid(),
        since=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC"),
        place=_place(),
        started=_start_time(os.getpid()) or "",
    )
    try:
        run.mkdir(parents=True, exist_ok=True)
        _take(run, msgspec.json.encode(holder))
    except OSError as error:
        reason = "is a file; name a folder" if run.is_file() else f"cannot be written ({error.strerror}); name another"
        raise InputError(f"{option} {run} {reason}") from error
    ended = threading.Event()
    beats = threading.Thread(target=_beat, args=(run / LOCK, ended), name="run_lock", daemon=True)
    beats.start()
    try:
        yield
    finally:
        ended.set()
        beats.join()
        with suppress(OSError):
            if _read(run / LOCK) == holder:  # else it was taken over
                (run / LOCK).unlink()
        for folder in missing:
            with suppress(OSError):
                folder.rmdir()


def holder_of(run: Path) -> Holder | None:
    """Return who holds the lock of a folder, without waiting; None where nobody seems to."""
    with suppress(OSError):
        holder, age = _read(run / LOCK), time.time() - (run / LOCK).stat().st_mtime
        if _is_alive(holder) if holder.place == _place() else age <= STALE_SECONDS:
            return holder
    return None


def _take(run: Path, content: bytes) -> None:
    path, turn = run / LOCK, os.open(run, os.O_RDONLY)
    try:
        with suppress(OSError):  # processes of one machine take turns, where the file system has such locks
            fcntl.flock(turn, fcntl.LOCK_EX)
        while True:
            try:
                with path.open("xb") as stream:
                    stream.write(content)
                return
            except FileExistsError:
                with suppress(FileNotFoundError):  # it was given back meanwhile
                    holder = _read(path)
                    if _is_alive(holder) if holder.place == _place() else _is_touched(path, holder):
                        raise InUseError(
                            f"{run} is in use by a run on {holder.host} (process {holder.pid}) since {holder.since}; "
                            f"wait for its end, stop it, or name another folder ({path} says so)"
                        ) from None
                    path.unlink()
    finally:
        os.close(turn)


def _read(path: Path) -> Holder:
    """Read the holder of a lock; one that is just being written, or is damaged, has none that is known."""
    with suppress(msgspec.MsgspecError, UnicodeDecodeError):
        return msgspec.json.decode(path.read_bytes(), type=Holder)
    return Holder()


def _is_alive(holder: Holder) -> bool:
    return _start_time(holder.pid) == holder.started


def _is_touched(path: Path, holder: Holder) -> bool:
    """Watch a lock of another machine until it is touched, or until that is overdue."""
    logger.warning("%s is of a run on %s: waiting for a sign of life, %.0f s at most", path, holder.host, STALE_SECONDS)
    first, end = path.stat().st_mtime_ns, time.monotonic() + STALE_SECONDS
    while time.monotonic() < end:
        time.sleep(LOOK_SECONDS)
        if path.stat().st_mtime_ns != first:
            return True
    return False


def _beat(path: Path, ended: threading.Event) -> None:
    while not ended.wait(BEAT_SECONDS):
        with suppress(OSError):
            os.utime(path)


def _place() -> str:
    """Return this machine, its boot and its process namespace: where a process number means the same process."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{platform.node()} {boot} {os.readlink('/proc/self/ns/pid')}"


def _start_time(pid: int) -> str | None:
    """When a process started, in its kernel's ticks; None if there is none, or if it has ended and is not reaped."""
    try:
        state, *fields = stat_fields(pid)
    except OSError:
        return None
    return None if state in "ZX" else fields[18]
