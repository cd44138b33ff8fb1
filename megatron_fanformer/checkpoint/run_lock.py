"""`run.lock`: one process at a time writes into a run's folder, from before it chooses a checkpoint until it ends.

A file that must not exist works on file systems that several machines share, where locks of the system may not. On this
machine a lock is left over if its process is gone. On another, where its machine may have failed, it is left over if
nobody has touched it for `STALE_SECONDS`; its holder touches it every `BEAT_SECONDS`.
"""

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
STALE_SECONDS = 120.0  # longer than one call into a library holds up a process, and than file systems cache times
LOOK_SECONDS = 1.0


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """The process that holds a lock."""

    host: str = "an unknown host"
    pid: int = 0
    since: str = "an unknown time"
    place: str = ""
    """The machine, boot and process namespace in which `pid` is valid."""
    started: str = ""
    """The process's start in kernel ticks, which distinguishes it from a later one of the same number."""


@contextmanager
def run_lock(run: Path) -> Iterator[None]:
    """Hold the lock of a run's folder. The folder is made if missing, and removed if nothing is put into it.

    Raises:
        InUseError: another run holds it.
        InputError: the folder cannot be written.
    """
    missing = [folder for folder in (run, *run.absolute().parents) if not folder.exists()]
    pid, since = os.getpid(), f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M:%S UTC}"
    holder = Holder(host=platform.node(), pid=pid, since=since, place=_place(), started=_start_time(pid) or "")
    path = run / LOCK
    try:
        run.mkdir(parents=True, exist_ok=True)
        _take(path, msgspec.json.encode(holder))
    except OSError as error:
        reason = "is a file; name a folder" if run.is_file() else f"cannot be written ({error.strerror}); name another"
        raise InputError(f"training.run_dir {run} {reason}") from error
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(BEAT_SECONDS):
            with suppress(OSError):
                os.utime(path)

    beats = threading.Thread(target=beat, name="run_lock", daemon=True)
    beats.start()
    try:
        yield
    finally:
        ended.set()
        beats.join()
        with suppress(OSError):
            if _read(path) == holder:  # else it was taken over
                path.unlink()
        for folder in missing:
            with suppress(OSError):
                folder.rmdir()


def holder_of(run: Path) -> Holder | None:
    """Return the holder of a folder's lock, without waiting for a sign of life; None if there is none."""
    with suppress(OSError):
        holder, age = _read(run / LOCK), time.time() - (run / LOCK).stat().st_mtime
        if _is_alive(holder) if holder.place == _place() else age <= STALE_SECONDS:
            return holder
    return None


def _take(path: Path, content: bytes) -> None:
    """Create the lock file, in the place of one that is left over."""
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
                        f"{path.parent} is in use by a run on {holder.host} (process {holder.pid}) since "
                        f"{holder.since}; wait for its end, stop it, or name another folder ({path} says so)"
                    ) from None
                if _read(path) == holder:  # else another process took it over meanwhile
                    path.unlink()


def _read(path: Path) -> Holder:
    """Return the holder that a lock names; an unknown one if the file is incomplete or damaged."""
    with suppress(msgspec.MsgspecError, UnicodeDecodeError):
        return msgspec.json.decode(path.read_bytes(), type=Holder)
    return Holder()


def _is_alive(holder: Holder) -> bool:
    return _start_time(holder.pid) == holder.started


def _is_touched(path: Path, holder: Holder) -> bool:
    """Wait until a lock of another machine is touched; return False if that is overdue. (Clocks may differ.)"""
    logger.warning("%s is of a run on %s: waiting for a sign of life, %.0f s at most", path, holder.host, STALE_SECONDS)
    first, end = path.stat().st_mtime_ns, time.monotonic() + STALE_SECONDS
    while time.monotonic() < end:
        time.sleep(LOOK_SECONDS)
        if path.stat().st_mtime_ns != first:
            return True
    return False


def _place() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{platform.node()} {boot} {os.readlink('/proc/self/ns/pid')}"


def _start_time(pid: int) -> str | None:
    """Return when a process started, in kernel ticks; None if there is none, or if it is a zombie."""
    try:
        state, *fields = stat_fields(pid)
    except OSError:
        return None
    return None if state in "ZX" else fields[18]
