"""How far the tasks on a folder of lists are, by what they leave behind; they are not queried."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from megatron_fanformer.checkpoint.run_lock import holder_of
from megatron_fanformer.errors import escaped
from megatron_fanformer.preparation.lists import InputLists, ListRecord, ListState, is_done, read_lists
from megatron_fanformer.terminal import show, size, table

Stage = Literal["done", "running", "failed", "left"]


@dataclass(frozen=True)
class ListStatus:
    """How far one list is."""

    record: ListRecord
    stage: Stage
    state: ListState
    host: str | None
    """The machine of the task that works on it."""

    @property
    def bytes_done(self) -> int:
        """Return bytes of its files that are done."""
        return self.record.bytes if self.stage == "done" else self.state.input_bytes


def status_of(lists: InputLists) -> list[ListStatus]:
    """Return how far each list is. Raises InputError if the tasks' agreement cannot be read."""
    agreement = lists.read_agreement()
    found = []
    for record in lists.records:
        holder = None
        stage: Stage = "left"
        state = lists.read_state(record.name) or ListState()
        if (holder := holder_of(lists.task_folder(record.name))) is not None:
            stage = "running"
        elif state.error is not None:
            stage = "failed"
        elif state.empty is not None or (agreement is not None and is_done(agreement.output, record.name)):
            stage = "done"
        found.append(ListStatus(record, stage, state, None if holder is None else holder.host))
    return found


def show_status(folder: Path, *, as_json: bool) -> None:
    """Print how far the lists are: a row for each stage; or one JSON object, with every list."""
    found = status_of(read_lists(folder))
    show([json.dumps(_as_object(found), indent=2)] if as_json else _lines(found))


def _lines(found: list[ListStatus]) -> Iterator[str]:
    rows = []
    for stage in get_args(Stage):
        of_stage = [each for each in found if each.stage == stage]
        if of_stage:
            total, rate = sum(each.record.bytes for each in of_stage), _rate(of_stage)
            rows.append(
                (stage, f"{len(of_stage):,}", size(total), "" if rate is None else f"{rate:,.1f}", _names(found, stage))
            )
    yield from table(("", "lists", "input", "MB/s", "which"), rows, align="lrrrl")
    for each in found:
        if each.stage == "failed":
            yield escaped(f"{each.record.name}: {each.state.error}")
    total = sum(each.record.bytes for each in found)
    share = sum(each.bytes_done for each in found) / max(1, total)
    number = sum(each.stage == "done" for each in found)
    percent = 100 if number == len(found) else min(99, int(100 * share))
    yield f"{number:,} of {len(found):,} lists done; {percent}% of {size(total)}"


def _rate(found: list[ListStatus]) -> float | None:
    """Return megabytes of text a second: of running lists all together, of others one with another."""
    seconds = sum(each.state.seconds for each in found)
    if not seconds or found[0].stage == "left":
        return None
    if found[0].stage == "running":
        return sum(each.state.text_bytes / each.state.seconds for each in found if each.state.seconds) / 1e6
    return sum(each.state.text_bytes for each in found) / seconds / 1e6


def _names(found: list[ListStatus], stage: Stage) -> str:
    """Return which lists are at a stage, in runs: 000-012, 015."""
    runs: list[list[str]] = []
    is_in_run = False
    for each in found:
        if each.stage == stage:
            runs = [*runs[:-1], [runs[-1][0], each.record.name]] if is_in_run else [*runs, [each.record.name] * 2]
        is_in_run = each.stage == stage
    return ", ".join(first if first == last else f"{first}-{last}" for first, last in runs)


def _as_object(found: list[ListStatus]) -> dict[str, object]:
    lists = [
        {
            "name": each.record.name,
            "stage": each.stage,
            "files": each.record.files,
            "bytes": each.record.bytes,
            "bytes_done": each.bytes_done,
            "documents": each.state.documents,
            "text_bytes": each.state.text_bytes,
            "seconds": round(each.state.seconds, 3),
            "host": each.host,
            "error": each.state.error if each.stage == "failed" else None,
        }
        for each in found
    ]
    counts = {stage: sum(each.stage == stage for each in found) for stage in get_args(Stage)}
    return {"counts": counts, "lists": lists}
