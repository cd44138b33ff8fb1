"""A run's checkpoints on another store, by fsspec: an object store such as S3, a mounted disk, another machine.

    URL/config.yaml, metrics.jsonl, recovery.jsonl    the run's records, as they were at the last copy
    URL/checkpoints/step-00000100/…                   the files of a checkpoint
    URL/checkpoints/step-00000100/manifest.json       written last and removed first: without it, there is none
    URL/checkpoints/latest                            the name of the newest one

Files from a store are untrusted: names and sizes are the manifest's, and files are checked against it before they get
a checkpoint's name.

torch is not imported here.
"""

import hashlib
import logging
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from megatron_fanformer.checkpoint import run_folder
from megatron_fanformer.checkpoint.manifest import MANIFEST, check_files, manifest_from
from megatron_fanformer.durable_files import new_folder, publish, write_atomically
from megatron_fanformer.errors import CorruptError, FanformerError, InputError, redacted
from megatron_fanformer.options import PROGRAM
from megatron_fanformer.runtime.device import cache_folder
from megatron_fanformer.stores import driver_of, is_url, make_folder, names_in, query, reported_as_local
from megatron_fanformer.terminal import print_stderr

RECORDS = (run_folder.CONFIG, run_folder.METRICS, run_folder.RECOVERY)
"""The run's records that accompany its checkpoints."""

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class RemoteRun:
    """A run's folder on another store. Methods raise what the driver does; see `stores.query`.

    Raises:
        InputError: there is no driver for the URL.
    """

    def __init__(self, url: str) -> None:
        self.url = redacted(url).rstrip("/")
        self._files, self._root = driver_of(url)
        self._checkpoints = f"{self._root}/{run_folder.CHECKPOINTS}"

    def candidates(self) -> list[str]:
        """Return the complete checkpoints that a run may go on from: `latest`'s first, then those before it."""
        try:
            latest = self._files.cat_file(f"{self._checkpoints}/{run_folder.LATEST}").decode().strip()
        except (FileNotFoundError, UnicodeDecodeError):
            latest = ""
        is_checkpoint = run_folder.step_of(Path(latest)) is not None
        return [name for name in self.complete()[::-1] if not is_checkpoint or name <= latest]

    def complete(self) -> list[str]:
        """Return the names of all checkpoints with a manifest, the oldest first."""
        return [name for name in self._steps() if MANIFEST in names_in(self._files, f"{self._checkpoints}/{name}")]

    def manifest_of(self, name: str) -> bytes:
        """Return the manifest of a checkpoint, as it is there, unchecked."""
        return bytes(self._files.cat_file(f"{self._checkpoints}/{name}/{MANIFEST}"))

    def fetch_record(self, name: str) -> bytes | None:
        """Return the content of one of `RECORDS`; None if it is not there."""
        try:
            return bytes(self._files.cat_file(f"{self._root}/{name}"))
        except FileNotFoundError:
            return None

    def make_ready(self) -> None:
        """Make the folder, in one that exists, and write and remove a file."""
        for folder in (self._root, self._checkpoints):
            make_folder(self._files, folder)
        probe = f"{self._checkpoints}/.probe"
        self._files.pipe_file(probe, b"")
        self._files.rm_file(probe)

    def copy(self, checkpoint: Path, *, keep: int | None, advance: Callable[[], None] = lambda: None) -> None:
        """Copy a checkpoint of a run's folder, publish the copy, and remove all but the `keep` newest.

        Args:
            advance: is called after each file.

        Raises:
            CorruptError: the checkpoint has no sound manifest; nothing is published.
        """
        if not (checkpoint / MANIFEST).is_file():
            raise CorruptError(
                f"{checkpoint} has no {MANIFEST}, and cannot be copied; the next checkpoint will have one"
            )
        content = (checkpoint / MANIFEST).read_bytes()
        if checkpoint.name not in self.complete() or self.manifest_of(checkpoint.name) != content:
            self._put(checkpoint, content, advance)
        self._files.pipe_file(f"{self._checkpoints}/{run_folder.LATEST}", f"{checkpoint.name}\n".encode())
        complete = self.complete()
        kept = [name for name in complete if name <= checkpoint.name][-(keep or len(complete)) :]
        later = [name for name in complete if name > checkpoint.name]  # of a run that was rewound
        for name in set(self._steps()).difference(kept, later):
            self._remove(name)

    def _put(self, checkpoint: Path, content: bytes, advance: Callable[[], None]) -> None:
        from fsspec.callbacks import Callback

        folder = f"{self._checkpoints}/{checkpoint.name}"
        sizes = {name: sums.bytes for name, sums in manifest_from(content, checkpoint / MANIFEST).files.items()}
        self.make_ready()
        self._remove(checkpoint.name)
        make_folder(self._files, folder)
        sources, targets = [str(checkpoint / name) for name in sizes], [f"{folder}/{name}" for name in sizes]
        self._files.put(sources, targets, callback=Callback(hooks={"advance": lambda *_, **__: advance()}))
        if not sizes.items() <= self._sizes(checkpoint.name).items():
            raise OSError(f"{checkpoint.name} was written, and its files have other sizes there")
        if (checkpoint / MANIFEST).read_bytes() != content:  # a run that went back saves the same step again
            raise OSError(f"{checkpoint.name} was replaced while it was copied")
        for name in RECORDS:
            if (record := checkpoint.parent.parent / name).is_file():
                self._files.pipe_file(f"{self._root}/{name}", record.read_bytes())
        self._files.pipe_file(f"{folder}/{MANIFEST}", content)

    def fetch(self, names: list[str], folder: Path, report: Callable[[str], None]) -> Path:
        """Fetch the first sound one of such checkpoints, unless it is there; return the copy, `folder`/DIGEST/NAME.

        Args:
            report: is called with a line when one is fetched.

        Raises:
            CorruptError: all are damaged.
        """
        damage: CorruptError | None = None
        for name in names:
            content = self.manifest_of(name)
            copy = folder / hashlib.sha256(content).hexdigest()[:16] / name
            try:
                if not copy.is_dir():
                    report(f"fetching {name} of {self.url} to {copy.parent}")
                    with new_folder(copy) as partial:
                        self._get(name, content, partial)
                return copy
            except CorruptError as error:
                logger.warning("%s; taking the one before", error)
                damage = damage or error
        assert damage is not None, "there is a name"
        raise damage

    def _get(self, name: str, content: bytes, folder: Path) -> None:
        """Fill an empty folder with a checkpoint's files, and verify them."""
        try:
            files = manifest_from(content, folder / MANIFEST).files
            sizes = self._sizes(name)
            for file, sums in files.items():
                if sizes.get(file) != sums.bytes:  # so that no more is fetched
                    raise CorruptError(
                        f"{folder / file} has {sizes.get(file)} bytes, its manifest says {sums.bytes}; use another"
                    )
            needed, free = sum(sums.bytes for sums in files.values()), shutil.disk_usage(folder).free
            if needed > free:
                raise InputError(
                    f"{self.url}: {name} has {needed} bytes, and {folder.parent} has {free} free; free space"
                )
            sources = [f"{self._checkpoints}/{name}/{file}" for file in files]
            self._files.get(sources, [str(folder / file) for file in files])
            (folder / MANIFEST).write_bytes(content)
            check_files(folder, manifest_from(content, folder / MANIFEST))
        except CorruptError as error:
            message = str(error).replace(str(folder), f"{self.url}/{run_folder.CHECKPOINTS}/{name}")
            raise CorruptError(message) from None

    def _steps(self) -> list[str]:
        names = names_in(self._files, self._checkpoints)
        return sorted(name for name in names if run_folder.step_of(Path(name)) is not None)

    def _sizes(self, name: str) -> dict[str, int]:
        self._files.invalidate_cache()
        entries = self._files.ls(f"{self._checkpoints}/{name}", detail=True)
        return {entry["name"].rpartition("/")[2]: entry["size"] for entry in entries}

    def _remove(self, name: str) -> None:
        for path in (f"{self._checkpoints}/{name}/{MANIFEST}", f"{self._checkpoints}/{name}"):
            with suppress(FileNotFoundError):
                self._files.rm(path, recursive=True)


def query_remote(url: str, function: Callable[[RemoteRun], Result]) -> Result:
    """Call a function as `stores.query` does, with a new connection for each attempt."""
    return query(url, lambda: function(RemoteRun(url)))


def fetch_newer(url: str, run: Path, *, use_earlier: bool = True) -> None:
    """Fetch the newest sound checkpoint of a mirror into a run's folder, if it is newer than the sound ones there.

    One there of the same step, which is damaged, is set aside.

    Args:
        use_earlier: whether one may be fetched that is earlier than a damaged one in the folder.

    Raises:
        CorruptError: the folder has no sound one, and none of the mirror's is sound.
        FanformerError: the folder has no sound one, and the store cannot be used.
    """
    sound, newest = run_folder.newest_sound_step(run), run_folder.newest_step(run)
    least = sound + 1 if use_earlier or sound == newest else newest

    def fetch(remote: RemoteRun) -> None:
        names = [name for name in remote.candidates() if (run_folder.step_of(Path(name)) or 0) >= least]
        if names:
            copy = remote.fetch(names, run / run_folder.LOADED, logger.info)
            records = {record: remote.fetch_record(record) for record in (run_folder.METRICS, run_folder.RECOVERY)}
            with reported_as_local(run):
                _publish(copy, run / run_folder.CHECKPOINTS / copy.name, records)
        elif sound < 0:
            remote.make_ready()  # a store that cannot be written is reported now, not after the first save

    try:
        query_remote(url, fetch)
    except FanformerError as error:
        if sound < 0:
            raise
        logger.warning("%s; going on with what is in %s", error, run)


def _publish(copy: Path, checkpoint: Path, records: dict[str, bytes | None]) -> None:
    """Give a fetched checkpoint its name, after the run's records, and have the run go on from it."""
    checkpoint.parent.mkdir(exist_ok=True)
    for name, content in records.items():
        record = checkpoint.parent.parent / name
        if content is not None and (not record.exists() or record.stat().st_size < len(content)):
            write_atomically(record, content)  # else the one here goes on further
    if checkpoint.is_dir():
        logger.warning("%s is damaged; it is set aside, and replaced by the one that was fetched", checkpoint)
        run_folder.set_aside(checkpoint)
    publish(copy, checkpoint)
    copy.parent.rmdir()
    write_atomically(checkpoint.parent / run_folder.LATEST, checkpoint.name + "\n")


def on_this_machine(path: str) -> str:
    """Return the path itself; of a URL, the copy of its checkpoint, which is fetched if it is not there yet."""
    if not is_url(path):
        return path
    return str(fetch_checkpoint(path, cache_folder(), lambda line: print_stderr(f"{PROGRAM}: {line}")))


def fetch_checkpoint(url: str, cache: Path, report: Callable[[str], None]) -> Path:
    """Return a copy on this machine of the checkpoint that a URL names: one, or the newest sound one of a run.

    Args:
        cache, report: as for `RemoteRun.fetch`.

    Raises:
        InputError: there is none, or no driver for the URL.
        CorruptError: it is damaged.
        FanformerError: the store cannot be reached.
    """
    if "::" in url:
        raise InputError(f"{redacted(url)} is a chain of URLs; name the store's own")
    parent, _, last = url.rstrip("/").rpartition("/")
    is_checkpoint = run_folder.step_of(Path(last)) is not None

    def fetch(remote: RemoteRun) -> Path:
        names = remote.candidates()
        if is_checkpoint:
            names = [name for name in remote.complete() if name == last]
        if not names:
            raise InputError(
                f"{redacted(url)} holds no complete checkpoint ({run_folder.CHECKPOINTS}/step-… with a {MANIFEST}); "
                "name a run or one of its checkpoints"
            )
        return remote.fetch(names, cache, report)

    run_url = parent if is_checkpoint else url.rstrip("/")
    return query_remote(run_url.removesuffix(f"/{run_folder.CHECKPOINTS}"), fetch)
