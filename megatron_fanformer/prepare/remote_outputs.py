"""Token files that are written to another store: prepared on this machine, then copied there.

The manifest is copied last: without it, nothing is complete. Stores have no locks, so nothing keeps two machines from
writing one prefix at a time.
"""

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from megatron_fanformer.data.manifest import (
    MANIFEST_SUFFIX,
    Manifest,
    PartManifest,
    manifest_from,
    manifest_path,
    read_any_manifest,
)
from megatron_fanformer.errors import InputError
from megatron_fanformer.options import PROGRAM
from megatron_fanformer.prepare.assembly import STANDING_SUFFIXES, part_prefix
from megatron_fanformer.runtime.device import cache_folder
from megatron_fanformer.stores import (
    driver_of,
    is_url,
    make_folder,
    query,
    scheme_of,
    send_file,
    url_problem,
)
from megatron_fanformer.terminal import print_stderr

READ_ONLY = ("http", "https")


def check_output_url(url: str) -> None:
    """Raise InputError for a URL that cannot be written, or names no prefix."""
    if scheme_of(url) in READ_ONLY:
        remedy = "name s3://…, gs://… or a path"
        raise InputError(f"output {url} cannot be written: {scheme_of(url)} is only read; {remedy}")
    if problem := url_problem("output", url, kind="the URL of a prefix, such as s3://bucket/tokens/web,"):
        raise InputError(problem)
    folder, _, name = url.rpartition("/")
    if name in ("", ".", "..") or folder.endswith("/"):
        raise InputError(f"output {url} names no prefix; name one in a bucket, such as s3://bucket/tokens/web")


def output_manifest(prefix: str) -> Manifest | PartManifest | None:
    """Return the manifest of an output as it is now; None where there is none. Raises like `read_any_manifest`."""
    if not is_url(prefix):
        return read_any_manifest(prefix)

    def read() -> bytes | None:
        files, path = driver_of(prefix)
        with suppress(FileNotFoundError):
            return bytes(files.cat_file(path + MANIFEST_SUFFIX))
        return None

    content = query(prefix, read)
    return None if content is None else manifest_from(content, prefix + MANIFEST_SUFFIX)


def missing_output(prefix: str, manifest: Manifest) -> str | None:
    """Return the first file of an output that does not stand with its size; None if all do."""

    def look() -> str | None:
        files, root = driver_of(prefix if is_url(prefix) else f"file://{os.path.abspath(prefix)}")
        folder = root.rpartition("/")[0]
        records = (record for output in manifest.outputs for record in output.files.values())
        return next((each.path for each in records if _size(files, f"{folder}/{each.path}") != each.bytes), None)

    return query(prefix, look)


@contextmanager
def scratch_prefix(url: str, folder: Path | None) -> Iterator[str]:
    """Yield the prefix on this machine at which an output is prepared; its folder stays where the block fails.

    Args:
        folder: the folder of such folders; None: in this user's cache.

    Raises InputError if files without a manifest stand there that nobody here began to copy.
    """
    place = (folder or cache_folder() / "prepare") / hashlib.sha256(url.encode()).hexdigest()[:16]
    if not place.exists():
        query(url, lambda: _refuse_standing(url))
    place.mkdir(parents=True, exist_ok=True)
    print_stderr(f"{PROGRAM}: preparing in {place}, which is then copied to {url}")
    try:
        yield str(place / url.rpartition("/")[2])
        shutil.rmtree(place)
    finally:
        with suppress(OSError):  # there is something to go on from
            place.rmdir()


def _refuse_standing(url: str) -> None:
    files, root = driver_of(url)
    for end in (number + suffix for number in ("", part_prefix("", 0)) for suffix in STANDING_SUFFIXES):
        if _size(files, root + end) is not None:
            raise InputError(
                f"{url}{end} exists, and there is no manifest of a complete preparation; choose another output"
                f" prefix, or remove the files of {url}"
            )


def upload(prefix: str, url: str, manifest: Manifest) -> None:
    """Copy the files of a complete preparation that do not stand there with their sizes, its manifest last."""
    folder = Path(prefix).parent
    names = [record.path for output in manifest.outputs for record in output.files.values()]
    parts = [manifest_path(output.prefix).name for output in manifest.outputs]
    names += [name for name in [*parts, Path(prefix).name + ".blend"] if (folder / name).exists()]
    last = manifest_path(prefix).name
    for name in [*(name for name in names if name != last), last]:
        query(url, lambda name=name: _send(folder / name, url.rpartition("/")[0], name))  # type: ignore[misc]


def _send(file: Path, folder_url: str, name: str) -> None:
    files, folder = driver_of(folder_url)
    path, size = f"{folder}/{name}", file.stat().st_size
    if _size(files, path) == size and not name.endswith(MANIFEST_SUFFIX):
        return
    for parent in dict.fromkeys((folder, path.rpartition("/")[0])):
        make_folder(files, parent)
    send_file(files, file, path)
    if _size(files, path) != size:
        raise OSError(f"{name} was written, and has another size")


def _size(files: Any, path: str) -> int | None:
    files.invalidate_cache()
    try:
        return int(files.info(path)["size"])
    except (FileNotFoundError, NotADirectoryError):
        return None
