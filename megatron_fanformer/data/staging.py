"""Copies of token files on other stores, in a folder of each node that its ranks and later runs share.

    FOLDER/KEY/name.bin, name.idx, name.manifest.json    a pair, or name.npy; KEY stands for URL and versions

A copy has its name once it is whole. Copies stay until they are removed by hand.
"""

import logging
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from megatron_fanformer.data.blends import Blend, Source
from megatron_fanformer.data.manifest import MANIFEST_SUFFIX
from megatron_fanformer.data.npy_files import npy_prefix
from megatron_fanformer.data.remote_files import (
    RemoteFile,
    copy_to,
    find,
    folder_of,
    look_up_contents,
    only_one_at_a_time,
    optional_content,
)
from megatron_fanformer.durable_files import write_atomically
from megatron_fanformer.errors import InputError, redacted
from megatron_fanformer.stores import is_url, reported_as_local

THREADS = 4  # files at a time, each in parts
SECONDS_BETWEEN_LINES = 15.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Staging:
    """The copies that a run needs on each of its nodes."""

    folder: Path
    paths: dict[str, str]
    """Path of the copy of each pair (without a suffix) and .npy file, by its URL."""
    files: dict[Path, RemoteFile]
    """Token files by the paths of their copies."""
    manifests: dict[str, Path]
    """Paths of the copies of manifests, by URL."""

    def local(self, blend: Blend) -> Blend:
        """Return a blend whose sources are the copies."""
        return Blend([_replaced(source, self.paths) for source in blend.sources], blend.weights)

    def stated(self, source: Source) -> Source:
        """Return a source of `local`'s blends with the URLs that its copies are of."""
        return _replaced(source, {copy: url for url, copy in self.paths.items()})

    def fill(self) -> None:
        """Copy the missing files to this node.

        Raises:
            InputError: there is no room for it, or the folder cannot be written.
            FanformerError: a store does not serve a file.
        """
        with only_one_at_a_time(self.folder):
            missing = {
                path: file
                for path, file in self.files.items()
                if not (path.is_file() and path.stat().st_size == file.size)
            }
            needed, free = sum(file.size for file in missing.values()), shutil.disk_usage(self.folder).free
            if needed > free:
                raise InputError(
                    f"data.staging_path {self.folder} has room for {free} bytes, and the run's token files need "
                    f"{needed}; remove earlier copies there, or set data.staging_path to null"
                )
            if missing:
                logger.info("copying %d token files of %.1f GB to %s", len(missing), needed / 1e9, self.folder)
            look_up_contents(self.manifests)  # they come before the files that they are of
            for url, path in self.manifests.items():
                if (content := optional_content(url)) is not None:
                    with reported_as_local(path):
                        path.parent.mkdir(exist_ok=True)
                        write_atomically(path, content)
            logged_at = time.monotonic()
            with ThreadPoolExecutor(THREADS) as threads:
                for done, _ in enumerate(threads.map(copy_to, missing.values(), missing), 1):
                    if time.monotonic() - logged_at > SECONDS_BETWEEN_LINES:
                        logged_at = time.monotonic()
                        logger.info("copied %d of %d token files to %s", done, len(missing), self.folder)


def _replaced(source: Source, paths: dict[str, str]) -> Source:
    return Source(tuple(paths.get(path, path) for path in source.paths))


def staging_of(sources: Sequence[Source], folder: Path) -> Staging:
    """Return the copies that sources need, whose files on other stores were looked up.

    Raises:
        InputError: a file does not exist.
    """
    paths: dict[str, str] = {}
    files: dict[Path, RemoteFile] = {}
    manifests: dict[str, Path] = {}
    for source in sources:
        for url in filter(is_url, source.paths):
            remote: dict[str, RemoteFile] = {}
            for suffix in ("",) if source.is_npy else (".bin", ".idx"):
                if (file := find(url + suffix)) is None:
                    raise InputError(f"{redacted(url)}{suffix} does not exist; name token files that do")
                remote[suffix] = file
            path = folder_of(folder, " ".join(file.identity for file in remote.values())) / url.rpartition("/")[2]
            paths[url] = str(path)
            if source.is_npy:
                manifests[npy_prefix(url) + MANIFEST_SUFFIX] = Path(npy_prefix(str(path)) + MANIFEST_SUFFIX)
            else:
                manifests[url + MANIFEST_SUFFIX] = Path(f"{path}{MANIFEST_SUFFIX}")
            files |= {Path(f"{path}{suffix}"): file for suffix, file in remote.items()}
    return Staging(folder, paths, files, manifests)
