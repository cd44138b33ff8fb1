"""Copies a run's checkpoints to another store while it trains, and takes them from there where the folder is lost.

The main rank has a process that copies, so that no step waits: neither for the store nor for the interpreter's lock. It
copies one checkpoint at a time. Those that are published meanwhile wait; the newest of them is next, and the others are
left out. A checkpoint that is being copied is not removed (`spared`).

    Mirror.offer      a checkpoint was published
    Mirror.hear       takes note of what the process has done since; never waits
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
from megatron_fanformer.checkpoint.remote import RemoteRun, asked, reason_of, with_attempts
from megatron_fanformer.durable_files import write_atomically
from megatron_fanformer.errors import CorruptError, FanformerError, redacted
from megatron_fanformer.processes import SAVE_SIGNAL, STOP_SIGNALS, end_with_owner

STALLED_SECONDS = 600.0
"""Without a part sent or read back: longer than drivers wait for an answer."""
ALIVE_SECONDS = 5.0  # between the process's signs of life
POLL_SECONDS = 0.05
END_SECONDS = 5.0

logger = logging.getLogger(__name__)


class Told(NamedTuple):
    """What the copying process says of a checkpoint."""

    what: Literal["copied", "failed", "given up", "alive"]
    """failed: an attempt did, and another one follows."""
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
    started = said = time.monotonic()
    saying = threading.Lock()  # files are copied by several threads

    def advance() -> None:
        nonlocal said
        with saying:
            if time.monotonic() - said > ALIVE_SECONDS:
                said = time.monotonic()
                connection.send(Told("alive", checkpoint.name))

    def failed(attempt: int, reason: str) -> None:
        connection.send(Told("failed", checkpoint.name, reason=reason, attempt=attempt))

    try:
        with_attempts(lambda: RemoteRun(url).copy(checkpoint, keep=keep, advance=advance), failed)
    except FanformerError as error:
        connection.send(Told("given up", checkpoint.name, reason=str(error)))
    except Exception as error:
        connection.send(Told("given up", checkpoint.name, reason=reason_of(error)))
    else:
        connection.send(Told("copied", checkpoint.name, time.monotonic() - started))


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

    @property
    def spared(self) -> tuple[str, ...]:
        """The name of the checkpoint that is being copied, and must stay until then."""
        return () if self._copying is None else (self._copying.name,)

    def offer(self, checkpoint: Path) -> None:
        """Copy a checkpoint, once the one that is being copied is done; to be called by the main thread."""
        if self._url is not None:
            self._waiting, self._offered = checkpoint, checkpoint.name
            self._start_next()

    def hear(self) -> None:
        """Take note of what the process has done; never waits."""
        while self._connection is not None:
            if self._connection.poll():
                told = self._received(self._connection)
            elif self._copying is not None and time.monotonic() - self._alive > STALLED_SECONDS:
                told = self._ended(f"no sign of life for {STALLED_SECONDS:.0f} s")
            else:
                return
            self._alive = time.monotonic()
            self._note(told)
            if self._copying is None:
                self._start_next()

    def finish(self, is_enough: Callable[[], bool], seconds: float = float("inf")) -> None:
        """Wait until nothing is left to copy, and tell if something is not copied.

        Args:
            is_enough: whether to wait no longer.
            seconds: to wait at most.
        """
        end = time.monotonic() + seconds
        while self._copying is not None and not is_enough() and time.monotonic() < end:
            if self._connection is not None:
                self._connection.poll(POLL_SECONDS)
            self.hear()
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
        if self._connection is None:
            context = multiprocessing.get_context("spawn")  # a fork would have the locks of threads that it has not
            self._connection, theirs = context.Pipe()
            self._process = context.Process(target=run_copies, args=(self._url, self._keep, theirs), daemon=True)
            self._process.start()
            theirs.close()
        self._copying, self._waiting, self._alive = self._waiting, None, time.monotonic()
        with suppress(OSError):  # the process has ended, as its connection will say
            self._connection.send(self._copying)

    def _received(self, connection: Connection) -> Told:
        try:
            told: Told = connection.recv()
        except (EOFError, OSError):
            return self._ended("the process that copies was killed")
        return told

    def _ended(self, reason: str) -> Told:
        name = "" if self._copying is None else self._copying.name
        self.close()
        return Told("given up", name, reason=reason)

    def _note(self, told: Told) -> None:
        if told.what == "alive":
            return
        if told.what == "copied":
            self._copied = told.name
            logger.info("copied %s to %s in %.1f s", told.name, self._shown, told.seconds)
        else:
            how = f"attempt {told.attempt}" if told.what == "failed" else "given up until the next one"
            logger.warning("%s is not copied to %s (%s): %s", told.name, self._shown, how, told.reason)
            self._note_failure(told.name, told.reason)
        if told.what != "failed":
            self._copying = None


# -- a run that starts


def fetch_newer(url: str, run: Path) -> None:
    """Fetch the newest sound checkpoint of a mirror into a run's folder, if it is newer than all that are there.

    Raises:
        CorruptError: the folder has none, and none of the mirror's is sound.
        FanformerError: the folder has none, and the store cannot be used.
    """
    remote, here = RemoteRun(url), store.newest_step(run)
    try:
        fetched = asked(remote, lambda: _fetch_newest(remote, run, here))
    except FanformerError as error:
        if here < 0:
            raise
        logger.warning("%s; going on with what is in %s", error, run)
        return
    if fetched is not None:
        logger.info("fetched %s of %s, which is newer than what is in %s", fetched.name, remote.url, run)


def _fetch_newest(remote: RemoteRun, run: Path, here: int) -> Path | None:
    damage: CorruptError | None = None
    checkpoints = run / store.CHECKPOINTS
    for name in remote.candidates():
        if (store.step_of(Path(name)) or 0) <= here:
            break
        try:
            fetched = remote.fetch(name, checkpoints)
        except CorruptError as error:
            logger.warning("%s; taking the one before", error)
            damage = damage or error
            continue
        for record in (run / store.METRICS, run / store.RECOVERY):
            content = remote.fetch_record(record.name)
            if content is not None and (not record.exists() or record.stat().st_size < len(content)):
                write_atomically(record, content)  # else the one here goes on further
        write_atomically(checkpoints / store.LATEST, name + "\n")
        return fetched
    if damage is not None:
        raise damage
    if here < 0:
        remote.make_ready()  # better to find now than after the first save that it cannot be written
    return None
