"""The token files of a preparation: assembled from shards in the order of the inputs, and copied to another store.

Files are written in the work folder, and get their names together. Everything is streamed: the index of a billion
documents is written from a file of their lengths. On another store the manifest is copied last: without it, nothing is
complete. Stores have no locks, so nothing keeps two machines from writing one prefix at a time.
"""

import hashlib
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np

from megatron_fanformer.data.chats import IDS_NPY, MASK_NPY, MASK_SUFFIX
from megatron_fanformer.data.ledger import CUT, LEDGER_SUFFIX, LedgerWriter
from megatron_fanformer.data.manifest import (
    MANIFEST_SUFFIX,
    FileRecord,
    Format,
    Manifest,
    PartManifest,
    Settings,
    TokenFiles,
    manifest_from,
    manifest_path,
    read_any_manifest,
)
from megatron_fanformer.data.token_files import DTYPES, INDEX_HEADER, INDEX_MAGIC
from megatron_fanformer.durable_files import NO_SPACE, naming, sync, write_refusal
from megatron_fanformer.errors import FanformerError, InputError
from megatron_fanformer.options import PROGRAM
from megatron_fanformer.prepare.shards import ShardFiles, ShardRecord, WorkFolder
from megatron_fanformer.runtime.device import cache_folder
from megatron_fanformer.stores import driver_of, is_url, make_folder, query, scheme_of, send_file, url_problem
from megatron_fanformer.terminal import print_stderr

TOKEN_SUFFIXES: dict[Format, str] = {"megatron": ".bin", "npy": ".npy"}
CHAT_SUFFIXES: dict[Format, tuple[str, str]] = {"megatron": (".bin", MASK_SUFFIX), "npy": (IDS_NPY, MASK_NPY)}
"""Suffixes of the tokens and the mask of chats."""
STANDING_SUFFIXES = (".bin", ".npy", ".idx", MASK_SUFFIX, IDS_NPY, MASK_NPY, LEDGER_SUFFIX, MANIFEST_SUFFIX)
"""The ends of names that an output may have, the manifest's last."""
INDEX_CHUNK = 1 << 20
READ_ONLY_SCHEMES = ("http", "https")


class Assembler:
    """The token files of one prefix, written in its work folder.

    A row of conversations has length 0 where the line was refused: it is in the ledger, and has no tokens.
    """

    def __init__(self, prefix: str, settings: Settings, work: WorkFolder) -> None:
        self._path, self._settings, self._work = Path(prefix), settings, work
        self._dtype = np.dtype(settings.dtype)
        is_chats = settings.chat is not None
        suffixes = CHAT_SUFFIXES[settings.format] if is_chats else (TOKEN_SUFFIXES[settings.format],)
        self._streams = {suffix: _HashedFile(self._partial(suffix)) for suffix in suffixes}
        self._tokens, *masks = self._streams.values()
        self._mask = masks[0] if masks else None
        self._lengths = self._partial(".lengths").open("wb")
        ledger = _HashedFile(self._partial(LEDGER_SUFFIX)) if settings.ledger else None
        self._ledger = None if ledger is None else LedgerWriter(ledger, is_chats=is_chats)
        self._documents = self._learned_tokens = self._cut = 0
        self._max_token_id = -1
        self.next_input = 0
        """The input whose shard is to be appended next."""

    def append(self, shard: ShardFiles, record: ShardRecord) -> None:
        """Append the shard of the next input."""
        with ExitStack() as files:
            tokens = files.enter_context(shard.path("tokens").open("rb"))
            mask = None if self._mask is None else files.enter_context(shard.path("mask").open("rb"))
            for rows in shard.batches():
                if self._ledger is not None:
                    first_token = self._tokens.bytes // self._dtype.itemsize
                    self._ledger.add(rows, record.input.path, first_token=first_token)
                lengths = rows.column("length").to_numpy()
                count = int(lengths.sum(dtype=np.int64))
                if self._mask is not None and mask is not None:
                    self._mask.write(_read(mask, count))
                    self._learned_tokens += int(rows.column("learned").to_numpy().sum(dtype=np.int64))
                    self._cut += rows.column("outcome").to_pylist().count(CUT)
                    lengths = lengths[lengths > 0]
                data = _read(tokens, count * self._dtype.itemsize)
                self._tokens.write(data)
                self._lengths.write(lengths.tobytes())
                self._documents += len(lengths)
                if data:
                    self._max_token_id = max(self._max_token_id, int(np.frombuffer(data, self._dtype).max()))
        self.next_input += 1

    def publish(self) -> TokenFiles:
        """Write what remains to the disk, and give all files their names; returns the record of the files."""
        self._lengths.close()
        if self._settings.format == "megatron":
            index = self._streams[".idx"] = _HashedFile(self._partial(".idx"))
            for data in _index(self._partial(".lengths"), self._documents, self._dtype):
                index.write(data)
        if self._ledger is not None:
            self._ledger.finish()
            self._streams[LEDGER_SUFFIX] = self._ledger.file
        output = TokenFiles(
            prefix=self._path.name,
            documents=self._documents,
            tokens=self._tokens.bytes // self._dtype.itemsize,
            max_token_id=self._max_token_id,
            files={
                suffix: FileRecord(path=self._path.name + suffix, sha256=stream.finish(), bytes=stream.bytes)
                for suffix, stream in self._streams.items()
            },
            learned_tokens=None if self._mask is None else self._learned_tokens,
            cut=None if self._mask is None else self._cut,
        )
        for suffix, record in output.files.items():
            path = self._path.parent / record.path
            path.parent.mkdir(exist_ok=True)
            self._partial(suffix).replace(path)
            sync(path.parent)
        return output

    def close(self) -> None:
        """Close files that were not published; the next run begins them again.

        pyarrow's writer, if the collector found it open, would write the end of a ledger: at any moment of this
        process's next work, which may hold the very lock that a hash takes.
        """
        with suppress(OSError):  # of data that it still held
            self._lengths.close()
        for stream in self._streams.values():
            stream.abandon()
        if self._ledger is not None:
            self._ledger.file.abandon()
            self._ledger.abandon()

    def _partial(self, suffix: str) -> Path:
        return self._work.path / (self._path.name + suffix.replace("/", "."))  # files alone are in that folder


class _HashedFile:
    """A file and the SHA-256 of what is written to it, computed on a thread since it takes longer than writing."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, path.open("wb")
        self._digest = hashlib.sha256()
        self._thread = ThreadPoolExecutor(1)
        self._hashed: Future[None] | None = None
        self.bytes = 0

    def write(self, data: Any) -> int:
        if self._file.closed:  # by `abandon`
            return len(data)
        data = bytes(data)  # a copy if the buffer is the caller's, which may change once this returns
        if self._hashed is not None:
            self._hashed.result()  # one piece at a time is held
        self._hashed = self._thread.submit(self._digest.update, data)
        self.bytes += len(data)
        return self._file.write(data)

    def finish(self) -> str:
        """Flush it to the disk; returns the hexadecimal SHA-256."""
        self._thread.shutdown()
        with naming(self._path):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        return self._digest.hexdigest()

    def abandon(self) -> None:
        """Take no more: what is written from now on is dropped."""
        self._thread.shutdown()
        with suppress(OSError):
            self._file.close()

    # pyarrow needs these of a file, besides `write`.
    closed = False

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        pass


def _index(lengths: Path, documents: int, dtype: np.dtype[Any]) -> Iterator[bytes]:
    """Yield the bytes of a Megatron index in which every document is one sequence.

    `token_files` describes the format; megatron-core's own writer holds one Python number per document.
    """
    code = next(code for code, known in DTYPES.items() if known == dtype)
    yield INDEX_HEADER.pack(INDEX_MAGIC, 1, code, documents, documents + 1)
    with lengths.open("rb") as file:
        while data := file.read(4 * INDEX_CHUNK):
            yield data
        file.seek(0)
        offset = 0
        while data := file.read(4 * INDEX_CHUNK):
            ends = offset + np.cumsum(np.frombuffer(data, np.int32), dtype=np.int64) * dtype.itemsize
            yield np.concatenate([[offset], ends[:-1]]).astype(np.int64).tobytes()
            offset = int(ends[-1])
    for start in range(0, documents + 1, INDEX_CHUNK):
        yield np.arange(start, min(start + INDEX_CHUNK, documents + 1), dtype=np.int64).tobytes()


@contextmanager
def writing_to(prefix: str) -> Iterator[None]:
    """Turn the system's errors on writing into errors that name the path."""
    try:
        yield
    except (PermissionError, NotADirectoryError, FileExistsError, IsADirectoryError) as error:
        path = error.filename or prefix
        raise InputError(f"{path} cannot be written ({error.strerror}); choose another output prefix") from error
    except OSError as error:
        remedy = "free space" if error.errno in NO_SPACE else "repair the disk"
        raise FanformerError(
            f"writing {prefix} failed ({write_refusal(error, prefix)}); {remedy}, and run the same command to continue"
        ) from error


def _read(file: IO[bytes], size: int) -> bytes:
    data = file.read(size)
    if len(data) != size:
        raise FanformerError(f"{file.name} is truncated, another program wrote to it; start again")
    return data


# -- other stores


def check_output(output: str) -> None:
    """Check the output's name: files of one that names a folder would lie beside that folder.

    Raises:
        InputError: it names no prefix, or a URL that cannot be written.
    """
    folder, _, name = output.rpartition("/")
    if not is_url(output):
        if name in ("", ".", ".."):
            prefix = os.path.join(output, "web")
            raise InputError(f"output {output} names a folder; name a prefix in it, such as {prefix}")
        return
    if scheme_of(output) in READ_ONLY_SCHEMES:
        remedy = "name s3://…, gs://… or a path"
        raise InputError(f"output {output} cannot be written: {scheme_of(output)} is only read; {remedy}")
    if problem := url_problem("output", output, kind="the URL of a prefix, such as s3://bucket/tokens/web,"):
        raise InputError(problem)
    if name in ("", ".", "..") or folder.endswith("/"):
        raise InputError(f"output {output} names no prefix; name one in a bucket, such as s3://bucket/tokens/web")


def output_manifest(prefix: str) -> Manifest | PartManifest | None:
    """Return the manifest of an output as it is now; None where there is none.

    Raises:
        CorruptError, InputError, FanformerError: as `read_any_manifest`.
    """
    if not is_url(prefix):
        return read_any_manifest(prefix)

    def read() -> bytes | None:
        files, path = driver_of(prefix)
        with suppress(FileNotFoundError):
            return bytes(files.cat_file(path + MANIFEST_SUFFIX))
        return None

    content = query(prefix, read)
    return None if content is None else manifest_from(content, prefix + MANIFEST_SUFFIX)


def is_whole(prefix: str, manifest: Manifest) -> bool:
    """Return whether all files of an output stand with their sizes."""
    beside = prefix[: prefix.rfind("/") + 1]
    records = [record for output in manifest.outputs for record in output.files.values()]
    return query(prefix, lambda: all(_size(beside + record.path) == record.bytes for record in records))


def refuse_standing_files(prefix: str) -> None:
    """Raise InputError if there are files under the output names of a prefix, which may be a URL."""
    for suffix in STANDING_SUFFIXES:
        if _size(prefix + suffix) is not None:
            raise InputError(
                f"{prefix}{suffix} exists, and there is no manifest of a complete preparation; choose another output"
                f" prefix, or remove the files of {prefix}"
            )


@contextmanager
def scratch_prefix(url: str, folder: Path | None) -> Iterator[str]:
    """Yield the prefix on this machine at which an output is prepared; its folder stays where the block fails.

    Args:
        folder: the folder of such folders; None: in this user's cache.

    Raises:
        InputError: files without a manifest stand there, and nobody here began to copy them.
    """
    place = (folder or cache_folder() / "prepare") / hashlib.sha256(url.encode()).hexdigest()[:16]
    if not place.exists():
        query(url, lambda: refuse_standing_files(url))
    place.mkdir(parents=True, exist_ok=True)
    print_stderr(f"{PROGRAM}: preparing in {place}, which is then copied to {url}")
    try:
        yield str(place / url.rpartition("/")[2])
        shutil.rmtree(place)
    finally:
        with suppress(OSError):  # it holds what the next run goes on from
            place.rmdir()


def upload(prefix: str, url: str, manifest: Manifest) -> None:
    """Copy the files of a complete preparation that do not stand there with their sizes, its manifest last."""
    names = [record.path for output in manifest.outputs for record in output.files.values()]
    for name in [*names, manifest_path(prefix).name]:
        query(url, lambda name=name: _send(Path(prefix).parent / name, url.rpartition("/")[0], name))  # type: ignore[misc]


def _send(file: Path, folder_url: str, name: str) -> None:
    files, folder = driver_of(folder_url)
    path, size = f"{folder}/{name}", file.stat().st_size
    if _size(f"{folder_url}/{name}") == size and not name.endswith(MANIFEST_SUFFIX):
        return
    for parent in dict.fromkeys((folder, path.rpartition("/")[0])):
        make_folder(files, parent)
    send_file(files, file, path)
    if _size(f"{folder_url}/{name}") != size:
        raise OSError(f"{name} was written, and has another size")


def _size(path: str) -> int | None:
    """Return the bytes of a file, which may be at a URL; None where there is none."""
    try:
        if not is_url(path):
            return os.stat(path).st_size
        files, place = driver_of(path)
        return int(files.info(place)["size"])
    except (FileNotFoundError, NotADirectoryError):
        return None
