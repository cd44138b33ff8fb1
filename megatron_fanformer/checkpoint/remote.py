"""A run's checkpoints on another store, by fsspec: an object store such as S3, a mounted disk, another machine.

    URL/config.yaml, metrics.jsonl, recovery.jsonl    the run's records, as they were at the last copy
    URL/checkpoints/step-00000100/…                   the files of a checkpoint
    URL/checkpoints/step-00000100/manifest.json       written last, removed first: the other files alone do not count
    URL/checkpoints/latest                            the name of the newest checkpoint

`Mirror` copies checkpoints to the store while a run trains; `fetch_newer` and `fetch_checkpoint` fetch them. Files of a
store are untrusted: the manifest lists them, and they are checked against it before their folder gets a checkpoint's
name. This module does not import torch.
"""

import hashlib
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from megatron_fanformer.checkpoint import run_folder
from megatron_fanformer.checkpoint.manifest import MANIFEST, check_files, manifest_from
from megatron_fanformer.durable_files import new_folder, publish, write_atomically
from megatron_fanformer.errors import CorruptError, FanformerError, InputError, redacted
from megatron_fanformer.options import PROGRAM
from megatron_fanformer.runtime.device import cache_folder
from megatron_fanformer.stores import (
    PAUSES_SECONDS,
    driver_of,
    is_url,
    make_folder,
    names_in,
    query,
    reported_as_local,
)
from megatron_fanformer.terminal import print_stderr

RECORDS = (run_folder.CONFIG, run_folder.METRICS, run_folder.RECOVERY)
FINISH_SECONDS = 3600.0  # how long the end of a run waits at most for the last copy
POLL_SECONDS = 0.05

logger = logging.getLogger(__name__)


class RemoteRun:
    """A run's folder on another store. Methods raise the errors of fsspec's driver: call them by `stores.query`."""

    def __init__(self, url: str) -> None:
        self.url = redacted(url).rstrip("/")
        self._files, self._root = driver_of(url)
        self._checkpoints = f"{self._root}/{run_folder.CHECKPOINTS}"

    def candidates(self) -> list[str]:
        """Return the names of complete checkpoints, the newest first; none is later than the one in `latest`."""
        try:
            latest = self._files.cat_file(f"{self._checkpoints}/{run_folder.LATEST}").decode().strip()
        except (FileNotFoundError, UnicodeDecodeError):
            latest = ""
        is_latest_unknown = run_folder.step_of(Path(latest)) is None  # then all checkpoints are candidates
        return [name for name in self.complete()[::-1] if is_latest_unknown or name <= latest]

    def complete(self) -> list[str]:
        """Return the names of all complete checkpoints, which have a manifest; the oldest first."""
        return [name for name in self._step_names() if MANIFEST in names_in(self._files, f"{self._checkpoints}/{name}")]

    def manifest_of(self, name: str) -> bytes:
        """Return the content of a checkpoint's manifest, unchecked."""
        return bytes(self._files.cat_file(f"{self._checkpoints}/{name}/{MANIFEST}"))

    def fetch_record(self, name: str) -> bytes | None:
        """Return the content of one of `RECORDS`; None if there is none."""
        try:
            return bytes(self._files.cat_file(f"{self._root}/{name}"))
        except FileNotFoundError:
            return None

    def make_ready(self) -> None:
        """Create the run's folder, whose parent must exist, and test that it can be written."""
        for folder in (self._root, self._checkpoints):
            make_folder(self._files, folder)
        probe = f"{self._checkpoints}/.probe"
        self._files.pipe_file(probe, b"")
        self._files.rm_file(probe)

    def copy(self, checkpoint: Path, *, keep: int | None) -> None:
        """Copy a checkpoint of a run's folder, make `latest` name the copy, and remove all but the `keep` newest.

        Complete copies of later steps are neither counted nor removed: they are left from before the run was rewound.
        """
        content, name = (checkpoint / MANIFEST).read_bytes(), checkpoint.name
        if name not in self.complete() or self.manifest_of(name) != content:  # otherwise it is copied already
            self.make_ready()
            self._remove(name)
            folder, files = f"{self._checkpoints}/{name}", list(manifest_from(content, checkpoint / MANIFEST).files)
            make_folder(self._files, folder)
            self._files.put([str(checkpoint / file) for file in files], [f"{folder}/{file}" for file in files])
            for record in RECORDS:
                path = checkpoint.parent.parent / record
                if path.is_file():
                    self._files.pipe_file(f"{self._root}/{record}", path.read_bytes())
            self._files.pipe_file(f"{folder}/{MANIFEST}", content)
        self._files.pipe_file(f"{self._checkpoints}/{run_folder.LATEST}", f"{name}\n".encode())
        complete = self.complete()
        kept = [other for other in complete if other <= name][-(keep or len(complete)) :]  # without `keep`: all
        later = [other for other in complete if other > name]
        for other in set(self._step_names()).difference(kept, later):
            self._remove(other)

    def fetch(self, names: list[str], folder: Path, report: Callable[[str], None]) -> Path:
        """Return a local copy, `folder`/DIGEST/NAME, of the first sound checkpoint in `names`; fetch it if needed.

        `report` is called with a line before a checkpoint is fetched. Raises CorruptError if all are damaged.
        """
        damage: CorruptError | None = None
        for name in names:
            content = self.manifest_of(name)
            copy = folder / hashlib.sha256(content).hexdigest()[:16] / name
            try:
                if not copy.is_dir():
                    report(f"fetching {name} of {self.url} to {copy.parent}")
                    with new_folder(copy) as partial:
                        self._download(name, content, partial)
                return copy
            except CorruptError as error:
                logger.warning("%s; taking the one before", error)
                damage = damage or error
        raise damage or AssertionError("names is empty")

    def _download(self, name: str, content: bytes, folder: Path) -> None:
        """Download a checkpoint, by the content of its manifest, into a folder; raise CorruptError if it is damaged."""
        remote = f"{self._checkpoints}/{name}"
        try:
            manifest = manifest_from(content, folder / MANIFEST)
            present = names_in(self._files, remote)
            files = [file for file in manifest.files if file in present]  # `check_files` reports missing ones
            self._files.get([f"{remote}/{file}" for file in files], [str(folder / file) for file in files])
            (folder / MANIFEST).write_bytes(content)
            check_files(folder, manifest)
        except CorruptError as error:
            message = str(error).replace(str(folder), f"{self.url}/{run_folder.CHECKPOINTS}/{name}")
            raise CorruptError(message) from None

    def _step_names(self) -> list[str]:
        names = names_in(self._files, self._checkpoints)
        return sorted(name for name in names if run_folder.step_of(Path(name)) is not None)

    def _remove(self, name: str) -> None:  # the manifest first: without it, no reader counts the rest
        for path in (f"{self._checkpoints}/{name}/{MANIFEST}", f"{self._checkpoints}/{name}"):
            with suppress(FileNotFoundError):
                self._files.rm(path, recursive=True)


class Mirror:
    """Copies a run's checkpoints to the run's folder on another store while the run trains, in a thread.

    One checkpoint is copied at a time, then the newest of those offered meanwhile. Without a URL, nothing is copied.
    """

    def __init__(self, url: str | None, *, keep: int | None) -> None:
        self._url, self._keep = url, keep
        self._lock = threading.Lock()
        self._copying: Path | None = None
        self._waiting: Path | None = None
        self._offered = self._copied = ""  # the name of the last checkpoint that was offered, and copied

    @property
    def in_use(self) -> tuple[str, ...]:
        """Return the names of the checkpoints that are being copied or wait to be, and so must not be removed."""
        with self._lock:
            return tuple(checkpoint.name for checkpoint in (self._copying, self._waiting) if checkpoint is not None)

    def offer(self, checkpoint: Path) -> None:
        """Copy a checkpoint, now or after the one that is being copied."""
        if self._url is None:
            return
        self._offered = checkpoint.name
        with self._lock:
            if self._copying is not None:
                self._waiting = checkpoint
                return
            self._copying = checkpoint
        # A daemon: if the process ends, the copy lacks the manifest, and counts as none.
        threading.Thread(target=self._copy_all, args=(self._url,), name="mirror", daemon=True).start()

    def finish(self, is_enough: Callable[[], bool], seconds: float = FINISH_SECONDS) -> None:
        """Wait for copies, at most `seconds` or until `is_enough()` (a stop is requested); warn if one is missing."""
        end = time.monotonic() + seconds
        while self._copying is not None and not is_enough() and time.monotonic() < end:
            time.sleep(POLL_SECONDS)
        if self._offered != self._copied:
            logger.warning(
                "%s is not copied to %s; it is safe here, and the same command copies it when it is started again",
                self._offered,
                redacted(self._url or ""),
            )

    def _copy_all(self, url: str) -> None:  # runs in the thread that `offer` starts, until no checkpoint waits
        while (checkpoint := self._copying) is not None:
            self._copy(url, checkpoint)
            with self._lock:
                self._copying, self._waiting = self._waiting, None

    def _copy(self, url: str, checkpoint: Path) -> None:  # training goes on if this fails: a failure is only logged
        name, started = checkpoint.name, time.monotonic()

        def report_failure(attempt: int, reason: str) -> None:
            logger.warning("%s is not copied to %s (attempt %d): %s", name, redacted(url), attempt, reason)

        try:
            query(
                url,
                lambda: RemoteRun(url).copy(checkpoint, keep=self._keep),
                pauses=PAUSES_SECONDS,
                patience=float("inf"),
                report=report_failure,
            )
        except FanformerError as error:
            logger.warning("%s is given up until the next one is published (%s)", name, error)
        else:
            self._copied = name
            logger.info("copied %s to %s in %.1f s", name, redacted(url), time.monotonic() - started)


def fetch_newer(url: str, run: Path, *, use_earlier: bool = True) -> None:
    """Fetch a mirror's newest sound checkpoint into a run's folder, unless a sound one there is of that step or later.

    A damaged checkpoint of the same step in the folder is set aside. Without `use_earlier`, no checkpoint is fetched
    that is earlier than the folder's newest, damaged or not. If the folder has a sound one, errors are only logged.
    """
    newest, sound = run_folder.newest_steps(run)  # -1 if there is none
    least_step = sound + 1 if use_earlier else max(sound + 1, newest)

    def fetch() -> None:
        remote = RemoteRun(url)  # a new connection for each attempt
        names = [name for name in remote.candidates() if (run_folder.step_of(Path(name)) or 0) >= least_step]
        if names:
            copy = remote.fetch(names, run / run_folder.LOADED, logger.info)
            records = {name: remote.fetch_record(name) for name in (run_folder.METRICS, run_folder.RECOVERY)}
            with reported_as_local(run):
                _publish(copy, run, records)
        elif sound < 0:  # nor does the folder have a sound one
            remote.make_ready()  # a store that cannot be written is reported now, not after the first save

    try:
        query(url, fetch)
    except FanformerError as error:
        if sound < 0:
            raise
        logger.warning("%s; going on with what is in %s", error, run)


def _publish(copy: Path, run: Path, records: dict[str, bytes | None]) -> None:
    """Move a fetched checkpoint into a run's folder, make `latest` name it, and write the fetched records there."""
    checkpoint = run / run_folder.CHECKPOINTS / copy.name
    checkpoint.parent.mkdir(exist_ok=True)
    for name, content in records.items():
        record = run / name
        if content is not None and (not record.exists() or record.stat().st_size < len(content)):
            write_atomically(record, content)  # a longer record stays: the run went on here after the copy
    if checkpoint.is_dir():
        logger.warning("%s is damaged; it is set aside, and replaced by the one that was fetched", checkpoint)
        run_folder.set_aside(checkpoint)
    publish(copy, checkpoint)
    copy.parent.rmdir()
    write_atomically(checkpoint.parent / run_folder.LATEST, checkpoint.name + "\n")


def on_this_machine(path: str) -> str:
    """Return a path unchanged; for a URL, fetch the checkpoint there if needed, and return the path of the copy."""
    if is_url(path):
        path = str(fetch_checkpoint(path, cache_folder(), lambda line: print_stderr(f"{PROGRAM}: {line}")))
    return path


def fetch_checkpoint(url: str, cache: Path, report: Callable[[str], None]) -> Path:
    """Return a local copy of the checkpoint at a URL, or of the newest sound checkpoint of the run at a URL.

    The URL of a run may end in its folder `checkpoints`.
    """
    folder_url = url.rstrip("/")
    parent_url, _, folder_name = folder_url.rpartition("/")
    is_checkpoint = run_folder.step_of(Path(folder_name)) is not None
    run_url = (parent_url if is_checkpoint else folder_url).removesuffix(f"/{run_folder.CHECKPOINTS}")

    def fetch() -> Path:
        remote = RemoteRun(run_url)
        names = [name for name in remote.complete() if name == folder_name] if is_checkpoint else remote.candidates()
        if not names:
            raise InputError(
                f"{redacted(url)} holds no complete checkpoint ({run_folder.CHECKPOINTS}/step-… with a {MANIFEST}); "
                "name a run or one of its checkpoints"
            )
        return remote.fetch(names, cache, report)

    return query(run_url, fetch)
