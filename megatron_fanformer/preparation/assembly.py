"""Appends the shards, in the order of the inputs, to the output: one prefix, or parts of a given size.

A part ends after the first document with which its tokens reach the size, wherever in a shard that is, so the
parts depend on the documents alone. Each is published with its own manifest as soon as it is full.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import numpy as np

from megatron_fanformer.data.manifest import (
    PartManifest,
    Settings,
    TokenFiles,
    TokenizerRecord,
    encode_manifest,
    manifest_path,
    read_any_manifest,
)
from megatron_fanformer.durable_files import sha256_of
from megatron_fanformer.errors import FanformerError, InputError
from megatron_fanformer.preparation.shards import ShardRecord
from megatron_fanformer.preparation.token_writer import TokenWriter
from megatron_fanformer.preparation.work_folder import WorkFolder


def part_prefix(prefix: str, part: int) -> str:
    """Return the prefix of one part of several."""
    return f"{prefix}-{part:05d}"


def remove_parts(prefix: str) -> None:
    """Remove every published part, last part first, manifest first; if interrupted, what is left is the first parts."""
    parts: list[TokenFiles] = []
    while isinstance(manifest := read_any_manifest(part_prefix(prefix, len(parts))), PartManifest):
        parts.append(manifest.output)
    for part, output in reversed(list(enumerate(parts))):
        manifest_path(part_prefix(prefix, part)).unlink()
        for record in output.files.values():
            (Path(prefix).parent / record.path).unlink(missing_ok=True)


class Assembler:
    """The output of one preparation, continued from wherever it was."""

    def __init__(self, prefix: str, settings: Settings, tokenizer: TokenizerRecord, work: WorkFolder) -> None:
        self._prefix = prefix
        self._settings = settings
        self._tokenizer = tokenizer
        self._work = work
        self._writer: TokenWriter | None = None
        self._itemsize = np.dtype(settings.dtype).itemsize
        self._part_begins_in = 0
        self._documents_to_skip = 0
        self.next_input = 0
        """The input whose shard is to be appended next."""
        self.published: list[TokenFiles] = []

    def resume(self, threads: int) -> None:
        """Continue after the parts that are already published, and check them against their hashes."""
        while (manifest := self._published_part(len(self.published))) is not None:
            self.published.append(manifest.output)
            self.next_input = self._part_begins_in = manifest.end_input
            self._documents_to_skip = manifest.end_document
        folder = Path(self._prefix).parent
        files = [record for output in self.published for record in output.files.values()]
        with ThreadPoolExecutor(threads) as pool:
            hashes = pool.map(lambda record: sha256_of(folder / record.path), files)
            for record, found in zip(files, hashes, strict=True):
                if found != record.sha256:
                    raise InputError(
                        f"{folder / record.path} is not what this preparation published; remove"
                        f" {self._prefix}-* and {self._work.path}, and prepare again"
                    )

    def _published_part(self, part: int) -> PartManifest | None:
        if self._settings.part_bytes is None:
            return None
        manifest = read_any_manifest(part_prefix(self._prefix, part))
        return manifest if isinstance(manifest, PartManifest) else None

    def has_published_of(self, number: int) -> bool:
        """Return whether any document of an input is in a published part, which may end within that input."""
        return number < self.next_input or (number == self.next_input and self._documents_to_skip > 0)

    def append(self, record: ShardRecord) -> None:
        """Append the shard of the next input."""
        shard = self._work.shard(self.next_input)
        document = 0
        with ExitStack() as files:
            tokens = files.enter_context(shard.path("tokens").open("rb"))
            # Chats are not cut into parts; the rows of those that are refused have no tokens.
            mask = files.enter_context(shard.path("mask").open("rb")) if self._settings.chat is not None else None
            for rows in shard.batches():
                skipped = min(max(self._documents_to_skip - document, 0), rows.num_rows)
                tokens.seek(self._bytes_of(rows.slice(0, skipped)), os.SEEK_CUR)
                self._append_rows(tokens, mask, rows.slice(skipped), record.input.path, document + skipped)
                document += rows.num_rows
        self._documents_to_skip = 0
        self.next_input += 1

    def finish(self) -> list[TokenFiles]:
        """Publish what is left; returns all that is published."""
        if self._writer is not None:
            self._publish(self.next_input, 0)
        return self.published

    def close(self) -> None:
        """Leave what is not finished; the next run begins it again."""
        if self._writer is not None:
            self._writer.abandon()
            self._writer = None

    def _append_rows(self, tokens: IO[bytes], mask: IO[bytes] | None, rows: Any, shard: str, document: int) -> None:
        """Append documents of one shard; `document` is the number of the first one in it."""
        while rows.num_rows:
            if self._writer is None:
                self._writer = self._open_writer()
            number, fills = self._fitting(rows, self._writer)
            piece, rows = rows.slice(0, number), rows.slice(number)
            size = self._bytes_of(piece)
            own_mask = b"" if mask is None else _read(mask, size // self._itemsize)
            self._writer.add(_read(tokens, size), piece, shard, own_mask)
            document += number
            if fills:
                self._publish(self.next_input, document)

    def _fitting(self, rows: Any, writer: TokenWriter) -> tuple[int, bool]:
        """Return how many of the documents go into the current part, and whether they fill it."""
        if self._settings.part_bytes is None:
            return rows.num_rows, False
        ends = np.cumsum(rows.column("length").to_numpy(), dtype=np.int64) * self._itemsize
        number = int(np.searchsorted(ends, self._settings.part_bytes - writer.token_bytes))
        return (number + 1, True) if number < len(ends) else (number, False)

    def _bytes_of(self, rows: Any) -> int:
        return int(rows.column("length").to_numpy().sum(dtype=np.int64)) * self._itemsize

    def _open_writer(self) -> TokenWriter:
        return TokenWriter(self._work.path, Path(self._next_prefix).name, self._settings)

    @property
    def _next_prefix(self) -> str:
        return self._prefix if self._settings.part_bytes is None else part_prefix(self._prefix, len(self.published))

    def _publish(self, end_input: int, end_document: int) -> None:
        """Close the current part, which ends before a document of an input, and remove the data of finished shards."""
        assert self._writer is not None
        output = self._writer.finish()
        self._writer.publish(output, Path(self._prefix).parent)
        self._writer = None
        if self._settings.part_bytes is not None:
            manifest = PartManifest(
                part=len(self.published),
                whole=manifest_path(self._prefix).name,
                first_input=self._part_begins_in,
                end_input=end_input,
                end_document=end_document,
                settings=self._settings,
                tokenizer=self._tokenizer,
                output=output,
            )
            self._work.publish(encode_manifest(manifest), manifest_path(self._next_prefix))
            for number in range(self._part_begins_in, end_input):
                self._work.shard(number).remove_data()
        # A single part has only the final manifest, not yet written: if interrupted here, it is assembled again.
        self.published.append(output)
        self._part_begins_in = end_input


def _read(file: IO[bytes], size: int) -> bytes:
    data = file.read(size)
    if len(data) != size:
        raise FanformerError(f"{file.name} is truncated, another program wrote to it; start again")
    return data
