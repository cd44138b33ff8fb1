"""Copies a run's checkpoints to another store while it trains, and takes them from there where the folder is lost.

The main rank has a process that copies, so that no step waits: neither for the store nor for the interpreter's lock. It
copies one checkpoint at a time. Those that are published meanwhile wait; the newest of them is next, and the others are
left out. A checkpoint that is being copied is not removed (`in_use`).

    Mirror.offer      a checkpoint was published
    Mirror.poll       takes note of what the process has done since; never waits
    Mirror.finish     waits for the last one, at the end of the run
"""

import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Literal, NamedTuple

from megatron_fanformer.checkpoint import store
from megatron_fanformer.checkpoint.manifest import FileSums
from megatron_fanformer.checkpoint.remote import RemoteRun, query_remote
from megatron_fanformer.durable_files import publish, write_atomically
from megatron_fanformer.errors import CorruptError, FanformerError, redacted
from megatron_fanformer.processes import SAVE_SIGNAL, STOP_SIGNALS, end_with_owner, signals_held
from megatron_fanformer.stores import reason_of, reported_as_local, with_attempts

STALLED_SECONDS = 600.0
"""Time without progress after which a copy counts as stalled: longer than drivers wait for an answer."""
ALIVE_SECONDS = 5.0  # between the process's signs of life
FINISH_SECONDS = 180.0
"""The same limit at the end of a run, while its machines wait."""
POLL_SECONDS = 0.05
END_SECONDS = 5.0

logger = logging.getLogger(__name__)


class UploadStatus(NamedTuple):
    """Progress of the copying process with one checkpoint."""

    what: Literal["copied", "failed", "given up", "alive"]
    """What happened; `failed` means that one attempt failed and another follows."""
    name: str
    seconds: float = 0.0
    reason: str = ""
    attempt: int = 0


# -- the process that copies


def run_copies(url: str, keep: int | None, connection: Connection) -> None:
    """Copy the checkpoints whose paths arrive over the connection, until it closes."""
    for number in (*STOP_SIGNALS, SAVE_SIGNAL):
        signal.signal(number, signal.SIG_IGN)  # they are for the run, which ends this process
    end_with_owner()
    os.nice(10)  # on a CPU the ranks need the cores
    with suppress(EOFError, OSError):  # the run has ended
        while True:
            _copy(url, keep, connection.recv(), connection)


def _copy(url: str, keep: int | None, checkpoint: Path, connection: Connection) -> None:
    started = shown_at = time.monotonic()
    saying = threading.Lock()  # files are copied by several threads

    def advance() -> None:
        nonlocal shown_at
        with saying:
            if time.monotonic() - shown_at > ALIVE_SECONDS:
                shown_at = time.monotonic()
                connection.send(UploadStatus("alive", checkpoint.name))

    def failed(attempt: int, reason: str) -> None:
        connection.send(UploadStatus("failed", checkpoint.name, reason=reason, attempt=attempt))

    verified = dict[str, FileSums]()
    try:
        with_attempts(lambda: RemoteRun(url).copy(checkpoint, keep=keep, advance=advance, verified=verified), failed)
    except FanformerError as error:
        connection.send(UploadStatus("given up", checkpoint.name, reason=str(error)))
    except Exception as error:
        connection.send(UploadStatus("given up", checkpoint.name, reason=reason_of(error)))
    else:
        connection.send(UploadStatus("copied", checkpoint.name, time.monotonic() - started))


# -- the run


class Mirror:
    """The main rank's side.

    Args:
        url: of the run's folder there; None: nothing is copied.
        keep: how many checkpoints to keep there; None for all.
        note_failure: is called with a checkpoint's name and the reason, whenever an attempt to copy it failed.
    """

    def __init__(self, url: str | None, *, keep: int | None, note_failure: Callable[[str, str], None]) -> None:
        self._url, self._keep, self._note_failure = url, keep, note_failure
        self._shown = redacted(url or "")
        self._process: BaseProcess | None = None
        self._connection: Connection | None = None
        self._copying: Path | None = None
        self._waiting: Path | None = None
        self._offered = self._copied = ""
        self._alive = 0.0  # when the process was last known to be
        self._moved = 0.0  # when a part was last known to be

    @property
    def in_use(self) -> tuple[str, ...]:
        """The name of the checkpoint that is being copied, and must stay until then."""
        return () if self._copying is None else (self._copying.name,)

    def offer(self, checkpoint: Path) -> None:
        """Copy a checkpoint, once the one that is being copied is done; to be called by the main thread."""
        if self._url is not None:
            self._waiting, self._offered = checkpoint, checkpoint.name
            self._start_next()

    def poll(self) -> None:
        """Take note of what the process has done; never waits."""
        while self._connection is not None:
            if self._connection.poll():
                status = self._received(self._connection)
            elif self._copying is not None and time.monotonic() - self._alive > STALLED_SECONDS:
                status = self._ended(f"no sign of life for {STALLED_SECONDS:.0f} s")
            else:
                return
            self._alive = time.monotonic()
            if status.what in ("alive", "copied"):
                self._moved = self._alive
            self._note(status)
            if self._copying is None:
                self._start_next()

    def finish(self, is_enough: Callable[[], bool], seconds: float = float("inf")) -> None:
        """Wait until nothing is left to copy or moves any more, and log what is not copied.

        Args:
            is_enough: whether to wait no longer.
            seconds: to wait at most.
        """
        self._moved = time.monotonic()
        end = self._moved + seconds
        while self._copying is not None and not is_enough():
            if time.monotonic() > min(end, self._moved + FINISH_SECONDS):
                break
            if self._connection is not None:
                self._connection.poll(POLL_SECONDS)
            self.poll()
        if self._offered != self._copied:
            logger.warning(
                "%s is not copied to %s; it is safe here, and the same command copies it when it is started again",
                self._offered,
                self._shown,
            )

    def close(self) -> None:
        """End the process, whatever it does: a copy that is cut off is none."""
        if self._process is not None and self._connection is not None:
            self._connection.close()
            self._process.kill()
            self._process.join(END_SECONDS)
        self._process = self._connection = self._copying = None

    def _start_next(self) -> None:
        if self._copying is not None or self._waiting is None or self._url is None:
            return
        self._copying, self._waiting = self._waiting, None
        try:
            connection = self._connection or self._start_process(self._url)
        except OSError as error:
            self._note(self._ended(f"no process can be started ({error.strerror})"))
            return
        self._alive = time.monotonic()
        with suppress(OSError):  # the process has ended, as its connection will say
            connection.send(self._copying)

    def _start_process(self, url: str) -> Connection:
        context = multiprocessing.get_context("spawn")  # a fork would have the locks of threads that it has not
        ours, theirs = context.Pipe()
        try:
            process = context.Process(target=run_copies, args=(url, self._keep, theirs), daemon=True)
            with signals_held():  # until it ignores them
                process.start()
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self._connection, self._process = ours, process
        return ours

    def _received(self, connection: Connection) -> UploadStatus:
        try:
            status: UploadStatus = connection.recv()
        except (EOFError, OSError):
            return self._ended("the process that copies was killed")
        return status

    def _ended(self, reason: str) -> UploadStatus:
        name = "" if self._copying is None else self._copying.name
        self.close()
        return UploadStatus("given up", name, reason=reason)

    def _note(self, status: UploadStatus) -> None:
        if status.what == "alive":
            return
        if status.what == "copied":
            self._copied = status.name
            logger.info("copied %s to %s in %.1f s", status.name, self._shown, status.seconds)
        elif not status.name:
            logger.warning("%s: %s while it had nothing to copy", self._shown, status.reason)
        else:
            how = f"attempt {status.attempt}" if status.what == "failed" else "given up until the next one"
            logger.warning("%s is not copied to %s (%s): %s", status.name, self._shown, how, status.reason)
            self._note_failure(status.name, status.reason)
        if status.what != "failed":
            self._copying = None


# -- a run that starts


def fetch_newer(url: str, run: Path, *, use_earlier: bool = True) -> None:
    """Fetch the newest sound checkpoint of a mirror into a run's folder, if it is newer than the sound ones there.

    One there of the same step, which is damaged, is set aside.

    Args:
        use_earlier: whether one may be fetched that is earlier than a damaged one in the folder.

    Raises:
        CorruptError: the folder has no sound one, and none of the mirror's is sound.
        FanformerError: the folder has no sound one, and the store cannot be used.
    """
    sound, newest = store.newest_sound_step(run), store.newest_step(run)
    least = sound + 1 if use_earlier or sound == newest else newest

    def fetch(remote: RemoteRun) -> Path | None:
        fetched = _fetch_newest(remote, run, least)
        if fetched is None and sound < 0:
            remote.make_ready()  # better to find now than after the first save that it cannot be written
        return fetched

    try:
        fetched = query_remote(url, fetch)
    except FanformerError as error:
        if sound < 0:
            raise
        logger.warning("%s; going on with what is in %s", error, run)
        return
    if fetched is not None:
        logger.info("fetched %s of %s, which is newer than what is in %s", fetched.name, redacted(url), run)


def _fetch_newest(remote: RemoteRun, run: Path, least: int) -> Path | None:
    """Fetch the newest sound checkpoint of that step or a later one; None if there is none so new.

    The store is not used once something has its name here: all of this may be repeated.
    """
    damage: CorruptError | None = None
    for name in remote.candidates():
        step = store.step_of(Path(name)) or 0
        if step < least:
            break
        with reported_as_local(run):
            folder = store.temporary_folder(run / store.CHECKPOINTS, step)
        try:
            remote.download(name, folder)
            records = {record: remote.fetch_record(record) for record in (store.METRICS, store.RECOVERY)}
            with reported_as_local(run):
                return _publish(folder, run / store.CHECKPOINTS / name, records)
        except CorruptError as error:
            logger.warning("%s; taking the one before", error)
            damage = damage or error
        finally:
            if folder.is_dir():
                store.remove(folder)
    if damage is not None:
        raise damage
    return None


def _publish(folder: Path, checkpoint: Path, records: dict[str, bytes | None]) -> Path:
    """Give a fetched checkpoint its name, after the run's records, and have the run go on from it."""
    for name, content in records.items():
        record = checkpoint.parent.parent / name
        if content is not None and (not record.exists() or record.stat().st_size < len(content)):
            write_atomically(record, content)  # else the one here goes on further
    if checkpoint.is_dir():
        logger.warning("%s is damaged; it is set aside, and replaced by the one that was fetched", checkpoint)
        store.set_aside(checkpoint)
    publish(folder, checkpoint)
    write_atomically(checkpoint.parent / store.LATEST, checkpoint.name + "\n")
    return checkpoint
