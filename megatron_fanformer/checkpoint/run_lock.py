"""`run.lock`: a lock, so that one process at a time writes into a run's folder.

The lock is a file that a process creates if it does not exist, before it chooses a checkpoint, and removes at its end.
This works on file systems that several machines share, where the system's locks may not. A killed process leaves its
lock behind. A lock of this machine is stale if its process is gone; a lock of another machine is stale if its time has
not changed for `STALE_SECONDS`, since its holder sets the time every `BEAT_SECONDS`.
"""

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

BEAT_SECONDS = 10.0
STALE_SECONDS = 120.0  # longer than a call into a library blocks a process, and than file systems cache times
LOOK_SECONDS = 1.0  # between two looks at the time of another machine's lock


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """The process that holds a lock; the content of its file."""

    host: str = "an unknown host"
    pid: int = 0
    since: str = "an unknown time"
    place: str = ""  # the machine, boot and process namespace in which `pid` is valid


@contextmanager
def run_lock(run: Path) -> Iterator[None]:
    """Hold the lock of a run's folder during the block. Create missing folders; afterwards, remove those still empty.

    Raises:
        InUseError: another run holds the lock.
        InputError: the folder cannot be written.
    """
    missing = [folder for folder in (run, *run.absolute().parents) if not folder.exists()]
    since = f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M:%S UTC}"
    holder = Holder(host=platform.node(), pid=os.getpid(), since=since, place=_place())
    path, ended = run / LOCK, threading.Event()
    try:
        run.mkdir(parents=True, exist_ok=True)
        _take(run, msgspec.json.encode(holder))
    except OSError as error:
        reason = "is a file; name a folder" if run.is_file() else f"cannot be written ({error.strerror}); name another"
        raise InputError(f"training.run_dir {run} {reason}") from error

    def beat() -> None:  # shows other machines that this process is alive
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
            if _read(path) == holder:  # otherwise another process took the lock for stale and replaced it
                path.unlink()
        for folder in missing:
            with suppress(OSError):
                folder.rmdir()


def holder_of(run: Path) -> Holder | None:
    """Return the holder of a folder's lock; None if there is no lock, or a stale one."""
    with suppress(OSError):
        holder, age = _read(run / LOCK), time.time() - (run / LOCK).stat().st_mtime
        is_alive = _is_running(holder.pid) if holder.place == _place() else age <= STALE_SECONDS
        return holder if is_alive else None
    return None


def _take(run: Path, content: bytes) -> None:
    """Create the lock file, or replace a stale one; raise InUseError if the holder is alive.

    Wait for another machine's lock to become stale: its holder is known to be alive once the lock's time changes.
    """
    path, first_time_ns = run / LOCK, None
    while True:
        with suppress(FileExistsError), path.open("xb") as stream:
            stream.write(content)
            return
        with suppress(FileNotFoundError):  # the holder has removed it meanwhile
            before, time_ns = path.read_bytes(), path.stat().st_mtime_ns
            holder = holder_of(run)
            if holder is None:
                if path.read_bytes() == before:  # otherwise another process has replaced it meanwhile
                    path.unlink()
            elif holder.place == _place() or first_time_ns not in (None, time_ns):  # the time has changed
                raise InUseError(
                    f"{run} is in use by a run on {holder.host} (process {holder.pid}) since {holder.since}; wait for "
                    f"its end, stop it, or name another folder ({path} says so)"
                )
            else:
                first_time_ns = time_ns
                time.sleep(LOOK_SECONDS)


def _read(path: Path) -> Holder:
    """Return the holder in a lock's file; a `Holder` of defaults if the file is incomplete or damaged."""
    with suppress(msgspec.MsgspecError, UnicodeDecodeError):
        return msgspec.json.decode(path.read_bytes(), type=Holder)
    return Holder()


def _place() -> str:
    """Return this machine, boot and process namespace, as in `Holder.place`."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{platform.node()} {boot} {os.readlink('/proc/self/ns/pid')}"


def _is_running(pid: int) -> bool:
    try:
        return stat_fields(pid)[0] not in "ZX"  # zombie, dead
    except OSError:
        return False
