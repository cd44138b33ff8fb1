"""Make a training text of the sources and documentation of installed packages under free licenses.

    python tools/installed_text.py runs/claim/text --vocab-size 8192 [--most-bytes 600M]

It reads the standard library and the packages of this interpreter and of `PYTHONPATH`, and writes

    FOLDER/train-00000.jsonl.gz …   documents for `megatron-fanformer prepare`; each is a file of a package
    FOLDER/held-out.jsonl.gz        documents of held-out packages, which a fixed hash of the packages' names chooses
    FOLDER/tokenizer.model          with --vocab-size: a tokenizer like the demo's, trained on the training documents
    FOLDER/manifest.json            packages with version, license and bytes; packages left out, with the reason

Equal files are taken once. Copies of other packages within a package are left out: they might put the text of a
held-out package into the training documents. Documents are sorted by hash, which shuffles them: `--most-bytes` leaves
out the same share of every package.
"""

import argparse
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from isal import igzip

from megatron_fanformer.durable_files import new_folder
from megatron_fanformer.errors import FanformerError, InputError
from megatron_fanformer.options import count

ENDINGS = re.compile(r"\.(py[ix]?|pxd|md|rst|txt|c|cc|cpp|cuh?|h|hpp|js|ts|css|html|cmake|proto|f90|jl|sh)")
COPIES = frozenset(
    {"_vendor", "_vendored", "vendor", "vendored", "_distutils", "third_party", "thirdparty", "extern", "external"}
)
"""Folders in which packages keep copies of other packages."""
LEAST_FILE_BYTES, MOST_FILE_BYTES = 64, 1 << 20  # larger files are tables
LONGEST_LINE = 2000  # characters: files with longer lines are data, or minified
STANDARD_LIBRARY = "python-standard-library"
OTHERS = frozenset({"site-packages", "dist-packages", "__pycache__"})
"""Folders within the standard library's folder that do not belong to the library."""
FREE = re.compile(r"\b(apache|bsd|mit|isc|mozilla|mpl|psf|python software foundation|unlicense|zlib|cc0)\b", re.I)
"""Licenses that allow anybody to use and distribute the text with a notice; the MPL's terms cover the file alone."""
NOT_FREE = re.compile(r"gpl|general public|proprietary|licenseref", re.I)
HELD_OUT_PERCENT = 8
SHARDS = 16
TOKENIZER_BYTES = 20_000_000


class Package(NamedTuple):
    """A package whose files are read."""

    name: str
    version: str
    license: str
    files: list[Path]


class File(NamedTuple):
    """A file that becomes a document."""

    digest: str
    path: Path
    package: Package
    bytes: int


def main() -> int:
    """Write the folder, and print its sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--site", type=Path, action="append", metavar="FOLDER", help="of packages (the interpreter's)")
    parser.add_argument("--most-bytes", type=count, default=2**40, metavar="SIZE", help="of train, as in 600M (all)")
    parser.add_argument("--held-out-bytes", type=count, default=8_000_000, metavar="SIZE", help="at most (8M)")
    parser.add_argument("--vocab-size", type=int, metavar="N", help="train a tokenizer of that many ids, too")
    parser.add_argument("--again", action="store_true", help="replace the folder, if there is one")
    options = parser.parse_args()
    if options.again:
        shutil.rmtree(options.folder, ignore_errors=True)
    try:
        manifest = write_text(
            options.folder,
            sites=options.site,
            most_bytes=options.most_bytes,
            held_out_bytes=options.held_out_bytes,
            vocab_size=options.vocab_size,
        )
    except FanformerError as error:
        print(f"installed_text: {error}", file=sys.stderr)
        return error.exit_code
    for part in ("train", "held_out"):
        counts = manifest[part]
        print(f"{part}: {counts['documents']:,} documents, {counts['bytes']:,} bytes, {counts['packages']} packages")
    print(f"left out: {', '.join(manifest['left_out']) or 'no package'}; {options.folder / 'manifest.json'} says why")
    return 0


def write_text(
    folder: Path,
    *,
    sites: list[Path] | None = None,
    most_bytes: int = 2**40,
    held_out_bytes: int = 8_000_000,
    vocab_size: int | None = None,
) -> dict[str, Any]:
    """Write the folder, and return the manifest.

    Args:
        sites: folders of packages to read; by default the standard library and the interpreter's packages.

    Raises:
        InputError: the folder exists, or there are too few packages to hold some out.
    """
    left_out: dict[str, str] = {}
    packages = sorted(_packages(sites, left_out))
    held_out_names = held_out([package.name for package in packages])
    files = sorted(_distinct_files(packages))
    parts = {
        "train": _up_to(most_bytes, (file for file in files if file.package.name not in held_out_names)),
        "held_out": _up_to(held_out_bytes, (file for file in files if file.package.name in held_out_names)),
    }
    if not all(parts.values()):
        raise InputError(f"{len(packages)} packages with {len(files)} files are too few; name more with --site")
    manifest = _manifest(parts, left_out)
    with new_folder(folder) as partial:
        shards = [partial / f"train-{number:05d}.jsonl.gz" for number in range(SHARDS)]
        _write(shards, parts["train"])
        _write([partial / "held-out.jsonl.gz"], parts["held_out"])
        if vocab_size is not None:
            from megatron_fanformer.data.tokenizer import train_sentencepiece
            from megatron_fanformer.processes import usable_cores

            sample = (_text(file.path) for file in _up_to(TOKENIZER_BYTES, parts["train"]))
            train_sentencepiece(sample, partial / "tokenizer", vocab_size=vocab_size, num_threads=usable_cores())
        (partial / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    return manifest


def license_of(metadata: importlib.metadata.PackageMetadata) -> tuple[str | None, str]:
    """Return a package's license if every part of it is free, else None; and the license that the metadata states."""
    last = [text.split(" :: ")[-1] for text in metadata.get_all("Classifier") or [] if text.startswith("License ::")]
    classified = " AND ".join(text for text in last if text != "OSI Approved")
    text = metadata["License-Expression"] or classified or (metadata["License"] or "states no license")[:80]
    is_free = all(map(FREE.search, re.split(" AND | OR ", text))) and not NOT_FREE.search(text)
    return (text if is_free else None), text


def held_out(names: Iterable[str]) -> set[str]:
    """Return the packages to hold out, by a hash of the name: about one in twelve, never the standard library."""
    shares = {name: int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) % 100 for name in names}
    shares.pop(STANDARD_LIBRARY, None)
    chosen = {name for name, share in shares.items() if share < HELD_OUT_PERCENT}
    return chosen or set(sorted(shares, key=lambda name: (shares[name], name))[:1])


def _packages(sites: list[Path] | None, left_out: dict[str, str]) -> Iterator[Package]:
    if sites is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        version = sys.version.split()[0]
        yield Package(STANDARD_LIBRARY, version, "PSF-2.0", list(_below(root)))
    places = {} if sites is None else {"path": list(map(str, sites))}
    seen = set()
    for package in importlib.metadata.distributions(**places):
        name = re.sub(r"[-_.]+", "-", package.metadata["Name"] or "").lower()
        if not name or name in seen:
            continue
        seen.add(name)
        license_name, stated = license_of(package.metadata)
        if license_name is None:
            left_out[name] = f"license: {stated}"
        elif package.files is None:
            left_out[name] = "it has no list of its files"
        else:
            files = [Path(str(package.locate_file(file))) for file in package.files if _is_text(file.parts)]
            yield Package(name, package.version, license_name, files)


def _below(root: Path) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in OTHERS]
        yield from (Path(folder, name) for name in names if _is_text((name,)))


def _is_text(parts: tuple[str, ...]) -> bool:
    is_own = not COPIES.intersection(parts) and not any(part.endswith((".dist-info", ".egg-info")) for part in parts)
    return is_own and ENDINGS.fullmatch(Path(parts[-1]).suffix) is not None


def _distinct_files(packages: list[Package]) -> Iterator[File]:
    seen = set()
    for package in packages:
        for path in sorted(package.files):
            text = _text(path)
            if not LEAST_FILE_BYTES <= len(content := text.encode()) <= MOST_FILE_BYTES:
                continue
            digest = hashlib.sha256(content).hexdigest()
            if digest not in seen and max(map(len, text.splitlines())) <= LONGEST_LINE:
                seen.add(digest)
                yield File(digest, path, package, len(content))


def _text(path: Path) -> str:
    """Return a file's text; an empty one if the file is not UTF-8, too large, or gone."""
    try:
        return path.read_bytes().decode() if path.stat().st_size <= MOST_FILE_BYTES else ""
    except (OSError, UnicodeDecodeError):
        return ""


def _up_to(most_bytes: int, files: Iterable[File]) -> list[File]:
    taken, total = [], 0
    for file in files:
        total += file.bytes
        if total > most_bytes:
            break
        taken.append(file)
    return taken


def _write(shards: list[Path], files: list[File]) -> None:
    with ExitStack() as stack:
        streams = [stack.enter_context(igzip.open(shard, "wb", compresslevel=1)) for shard in shards]
        for number, file in enumerate(files):
            document = {"id": str(file.path), "text": _text(file.path), "source": file.package.name}
            streams[number % len(streams)].write(json.dumps(document, ensure_ascii=False).encode() + b"\n")


def _manifest(parts: dict[str, list[File]], left_out: dict[str, str]) -> dict[str, Any]:
    packages: dict[str, dict[str, Any]] = {}
    for part, files in parts.items():
        for file in files:
            name, version, license_name, _ = file.package
            stated = {"name": name, "version": version, "license": license_name, "part": part, "bytes": 0}
            packages.setdefault(name, stated)["bytes"] += file.bytes
    counts = {}
    for part, files in parts.items():
        sizes = [package["bytes"] for package in packages.values() if package["part"] == part]
        counts[part] = {"documents": len(files), "bytes": sum(sizes), "packages": len(sizes)}
    return {
        **counts,
        "packages": [packages[name] for name in sorted(packages)],
        "left_out": dict(sorted(left_out.items())),
    }


if __name__ == "__main__":
    sys.exit(main())
