"""Appends the shards, in the order of the inputs, to the output: one prefix, or parts of a given size.

A part ends after the first document with which its tokens reach the size, wherever in a shard that is, so the
parts depend on the documents alone. All files are written in the work folder, and get their names together.
"""

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
)
from megatron_fanformer.errors import FanformerError
from megatron_fanformer.preparation.shards import ShardFiles, ShardRecord
from megatron_fanformer.preparation.token_writer import TokenWriter, part_prefix
from megatron_fanformer.preparation.work_folder import WorkFolder


class Assembler:
    """The output of one preparation."""

    def __init__(self, prefix: str, settings: Settings, tokenizer: TokenizerRecord, work: WorkFolder) -> None:
        self._prefix, self._settings, self._tokenizer, self._work = prefix, settings, tokenizer, work
        self._itemsize = np.dtype(settings.dtype).itemsize
        self._writer: TokenWriter | None = None
        self._finished: list[tuple[TokenWriter, TokenFiles]] = []
        self._part_manifests: list[PartManifest] = []
        self._part_begins_in = 0
        self.next_input = 0
        """The input whose shard is to be appended next."""

    def append(self, shard: ShardFiles, record: ShardRecord) -> None:
        """Append the shard of the next input."""
        document = 0
        with ExitStack() as files:
            tokens = files.enter_context(shard.path("tokens").open("rb"))
            # Chats are not cut into parts; the rows of those that are refused have no tokens.
            mask = files.enter_context(shard.path("mask").open("rb")) if self._settings.chat is not None else None
            for rows in shard.batches():
                self._append_rows(tokens, mask, rows, record.input.path, document)
                document += rows.num_rows
        self.next_input += 1

    def publish(self) -> list[TokenFiles]:
        """Give all files their names, and parts their manifests; returns their records."""
        if self._writer is not None:
            self._finish_part(self.next_input, 0)
        for writer, output in self._finished:
            writer.publish(output, Path(self._prefix).parent)
        for part in self._part_manifests:
            self._work.publish(encode_manifest(part), manifest_path(part_prefix(self._prefix, part.part)))
        return [output for _, output in self._finished]

    def close(self) -> None:
        """Leave what is not finished; the next run begins it again."""
        if self._writer is not None:
            self._writer.abandon()

    def _append_rows(self, tokens: IO[bytes], mask: IO[bytes] | None, rows: Any, shard: str, document: int) -> None:
        """Append documents of one shard; `document` is the number of the first one in it."""
        while rows.num_rows:
            if self._writer is None:
                self._writer = TokenWriter(self._work.path, Path(self._next_prefix).name, self._settings)
            number, fills = self._fitting(rows, self._writer)
            piece, rows = rows.slice(0, number), rows.slice(number)
            size = int(piece.column("length").to_numpy().sum(dtype=np.int64)) * self._itemsize
            masked = b"" if mask is None else _read(mask, size // self._itemsize)
            self._writer.add(_read(tokens, size), piece, shard, masked)
            document += number
            if fills:
                self._finish_part(self.next_input, document)

    def _fitting(self, rows: Any, writer: TokenWriter) -> tuple[int, bool]:
        """Return how many of the documents go into the current part, and whether they fill it."""
        if self._settings.part_bytes is None:
            return rows.num_rows, False
        ends = np.cumsum(rows.column("length").to_numpy(), dtype=np.int64) * self._itemsize
        number = int(np.searchsorted(ends, self._settings.part_bytes - writer.token_bytes))
        return (number + 1, True) if number < len(ends) else (number, False)

    @property
    def _next_prefix(self) -> str:
        return self._prefix if self._settings.part_bytes is None else part_prefix(self._prefix, len(self._finished))

    def _finish_part(self, end_input: int, end_document: int) -> None:
        """Close the current part, which ends before a document of an input."""
        assert self._writer is not None
        writer, self._writer = self._writer, None
        output = writer.finish()
        if self._settings.part_bytes is not None:
            part = PartManifest(
                part=len(self._finished),
                whole=manifest_path(self._prefix).name,
                first_input=self._part_begins_in,
                end_input=end_input,
                end_document=end_document,
                settings=self._settings,
                tokenizer=self._tokenizer,
                output=output,
            )
            self._part_manifests.append(part)
        self._finished.append((writer, output))
        self._part_begins_in = end_input


def _read(file: IO[bytes], size: int) -> bytes:
    data = file.read(size)
    if len(data) != size:
        raise FanformerError(f"{file.name} is truncated, another program wrote to it; start again")
    return data
