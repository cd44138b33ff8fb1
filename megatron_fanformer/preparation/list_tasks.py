"""A task of `prepare --from-lists`: prepares lists, one after the other, that no other task has done or works on.

A task takes a list by the lock of the list's folder (checkpoint/run_lock.py), which a task that was killed does not
keep: whoever comes next takes the list up, and its preparation continues where it was.
"""

import os
import platform
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace

import msgspec

from megatron_fanformer.checkpoint.run_lock import STALE_SECONDS, holder_of, run_lock
from megatron_fanformer.errors import FanformerError, InputError, InUseError
from megatron_fanformer.preparation.assembly import part_prefix
from megatron_fanformer.preparation.list_merge import checked_manifest
from megatron_fanformer.preparation.lists import (
    Agreement,
    EmptyList,
    InputLists,
    ListState,
    is_done,
    list_prefix,
    read_lists,
)
from megatron_fanformer.preparation.pipeline import (
    FAILURES_NAMED,
    NothingFound,
    PrepareProgress,
    refuse_outside_blends,
)
from megatron_fanformer.preparation.prepare import prepare, settings_and_tokenizer
from megatron_fanformer.preparation.progress import progress_line
from megatron_fanformer.preparation.verb import PrepareConfig
from megatron_fanformer.preparation.workers import Refused
from megatron_fanformer.stores import is_url
from megatron_fanformer.terminal import plural, show

LOOK_SECONDS = 10.0
LOST_SECONDS = STALE_SECONDS + 60.0
"""How long a task without lists waits for those of another machine, which may be lost: longer than its lock holds."""
STATE_SECONDS = 5.0  # between two records of how far a list is


def prepare_lists(config: PrepareConfig) -> None:
    """Prepare lists until none is left that is not done, not taken by another task and not failed.

    The list of `config.task` comes first, then those after it. A list that fails is passed over and reported at the
    end; it is tried again by the next task with its number, or without one.

    Raises:
        InputError: as `prepare`, before any list is begun; options that are not those of the other tasks.
        FanformerError: lists of this task failed; of the first one's kind.
    """
    assert config.from_lists is not None
    lists = read_lists(config.from_lists)
    if config.task is not None and config.task < 0:
        raise InputError(f"--task is {config.task}; it must be at least 0, as the first list is")
    output = config.output if is_url(config.output) else os.path.abspath(config.output)
    settings, tokenizer = settings_and_tokenizer(config)
    first = list_prefix(output, lists.records[0].name)
    refuse_outside_blends(settings, first if settings.part_bytes is None else part_prefix(first, 0))
    agreement = Agreement(output=output, settings=settings, tokenizer=tokenizer, strict=config.strict)
    lists.agree(agreement)
    _Task(replace(config, output=output, from_lists=None, task=None), lists, config.task, agreement).run()


class _Task:
    def __init__(self, config: PrepareConfig, lists: InputLists, number: int | None, agreement: Agreement) -> None:
        self._config, self._lists, self._agreement = config, lists, agreement
        self._records = {record.name: record for record in lists.records}
        self._done: set[str] = set()
        names = [record.name for record in lists.records]
        first = (number or 0) % len(names)  # of an array with more tasks than lists, the others help where they can
        self._names = names[first:] + names[:first]
        self._tried_again = names if number is None else names[number : number + 1]
        self._failures: dict[str, FanformerError] = {}

    def run(self) -> None:
        waited = 0.0
        while True:
            taken = [name for name in self._names if self._is_due(name) and self._take(name)]
            if taken:  # a list that another task had may be left by now
                waited = 0.0
            elif self._are_held_elsewhere() and waited < LOST_SECONDS:  # by a task that may be lost
                time.sleep(LOOK_SECONDS)
                waited += LOOK_SECONDS
            else:
                break
        if self._failures:
            first = next(iter(self._failures.values()))
            named = [f"list {name}: {error}" for name, error in self._failures.items()]
            more = f"; and {len(named) - FAILURES_NAMED} more lists" if len(named) > FAILURES_NAMED else ""
            raise type(first)("; ".join(named[:FAILURES_NAMED]) + more)
        held = sum(holder_of(self._lists.task_folder(name)) is not None for name in self._names)
        others = f", and other tasks have {plural(held, 'list')}" if held else ""
        show([f"nothing is left for this task{others}; prepare --status {self._lists.folder} shows all"])

    def _are_held_elsewhere(self) -> bool:
        holders = (holder_of(self._lists.task_folder(name)) for name in self._names)
        return any(holder is not None and holder.host != platform.node() for holder in holders)

    def _is_whole(self, name: str) -> bool:
        """Return whether a list is done as these tasks do it: with these options, all of its files, and all outputs."""
        if name not in self._done and is_done(self._config.output, name):
            manifest, problems = checked_manifest(self._agreement, self._lists, self._records[name])
            if manifest is not None and not problems:
                self._done.add(name)
        return name in self._done

    def _is_due(self, name: str) -> bool:
        if name in self._failures or holder_of(self._lists.task_folder(name)) is not None:
            return False
        state = self._lists.read_state(name)
        has_failed = state is not None and state.error is not None
        if self._is_whole(name):
            return has_failed  # before it was whole: the error is to be cleared
        if state is not None and state.empty is not None:
            return False
        return not has_failed or name in self._tried_again

    def _take(self, name: str) -> bool:
        """Prepare a list; returns whether it was free."""
        try:
            with run_lock(self._lists.task_folder(name), option="the task's folder"):
                if not self._is_whole(name):
                    self._prepare(name)
                elif (state := self._lists.read_state(name)) is not None and state.error is not None:
                    self._lists.write_state(name, msgspec.structs.replace(state, error=None))
        except InUseError:  # another task was faster
            return False
        return True

    def _prepare(self, name: str) -> None:
        began = recorded = time.monotonic()
        state = ListState()

        def record(error: str | None = None) -> None:
            nonlocal recorded
            recorded = time.monotonic()
            with suppress(OSError):  # it only shows how far the list is
                self._lists.write_state(name, msgspec.structs.replace(state, seconds=recorded - began, error=error))

        def listen(progress: PrepareProgress) -> None:
            nonlocal state
            show_line(progress)
            state = ListState(
                documents=progress.documents, text_bytes=progress.text_bytes, input_bytes=progress.input_bytes
            )
            if time.monotonic() - recorded >= STATE_SECONDS:
                record()

        inputs, output = (f"@{self._lists.folder / name}",), list_prefix(self._config.output, name)
        if (before := self._lists.read_state(name)) is not None:
            state = ListState(input_bytes=before.input_bytes)
        record()
        try:
            with progress_line(f"list {name}") as show_line:
                report = prepare(replace(self._config, inputs=inputs, output=output), listen)
        except NothingFound as nothing:
            refused = sum((Counter(each.refused) for each in nothing.records), Counter[str]())
            lines, inputs_read = sum(each.lines for each in nothing.records), [each.input for each in nothing.records]
            state = ListState(empty=EmptyList(lines_read=lines, refused=dict(refused), inputs=inputs_read))
            self._lists.write_state(name, state)
            show([f"list {name}: no document in {lines:,} lines read, which is no error while other lists hold some"])
            return
        except (FanformerError, OSError) as error:
            with suppress(FanformerError):  # where another process writes the output, the list has not failed
                record(None if isinstance(error, InUseError) else str(error))
            if not isinstance(error, FanformerError) or isinstance(error, Refused):
                raise
            self._failures[name] = error
            return
        self._done.add(name)
        with suppress(FanformerError):  # another task took a list that was slow to end, and finds it done
            record()
        show(f"list {name}: {line}" for line in report.lines())
