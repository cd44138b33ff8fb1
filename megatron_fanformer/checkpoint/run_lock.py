"""`run.lock`: one process at a time writes into a run's folder, from before it chooses a checkpoint until it ends.

A file that must not exist works on file systems that several machines share, where locks of the system may not. On this
machine a lock is left over if its process is gone. On another, where its machine may have failed, it is left over if
nobody has touched it for `STALE_SECONDS`; its holder touches it every `BEAT_SECONDS`.
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
STALE_SECONDS = 120.0  # longer than one call into a library holds up a process, and than file systems cache times
LOOK_SECONDS = 1.0


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """The process that holds a lock."""

    host: str = "an unknown host"
    pid: int = 0
    since: str = "an unknown time"
    place: str = ""  # the machine, boot and process namespace in which `pid` is valid


@contextmanager
def run_lock(run: Path) -> Iterator[None]:
    """Hold the lock of a run's folder. The folder is made if missing, and removed if nothing is put into it.

    Raises:
        InUseError: another run holds it.
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
    """Return the holder of a folder's lock; None if there is none, or it shows no sign of life."""
    with suppress(OSError):
        holder, age = _read(run / LOCK), time.time() - (run / LOCK).stat().st_mtime
        if _is_running(holder.pid) if holder.place == _place() else age <= STALE_SECONDS:
            return holder
    return None


def _take(run: Path, content: bytes) -> None:
    """Create the lock file, in the place of one that is left over; wait for a sign of life of one elsewhere."""
    path, touched = run / LOCK, None
    while True:
        with suppress(FileExistsError):
            with path.open("xb") as stream:
                stream.write(content)
            return
        with suppress(FileNotFoundError):  # it was given back meanwhile
            before, last = path.read_bytes(), path.stat().st_mtime_ns
            if (holder := holder_of(run)) is None:
                if path.read_bytes() == before:  # else another process took it over
                    path.unlink()
            elif holder.place == _place() or touched not in (None, last):
                raise InUseError(
                    f"{run} is in use by a run on {holder.host} (process {holder.pid}) since {holder.since}; wait for "
                    f"its end, stop it, or name another folder ({path} says so)"
                )
            else:
                touched = last
                time.sleep(LOOK_SECONDS)


def _read(path: Path) -> Holder:
    """Return the holder that a lock names; an unknown one if the file is incomplete or damaged."""
    with suppress(msgspec.MsgspecError, UnicodeDecodeError):
        return msgspec.json.decode(path.read_bytes(), type=Holder)
    return Holder()


def _place() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{platform.node()} {boot} {os.readlink('/proc/self/ns/pid')}"


def _is_running(pid: int) -> bool:
    try:
        return stat_fields(pid)[0] not in "ZX"
    except OSError:
        return False
