"""A task of `prepare --from-lists`: prepares lists, one after the other, that no other task has done or works on.

A task takes a list by the lock of the list's folder (checkpoint/run_lock.py), which a task that was killed does not
keep: whoever comes next takes the list up, and its preparation continues where it was.
"""

import os
import time
from contextlib import suppress
from dataclasses import replace

import msgspec

from megatron_fanformer.checkpoint.run_lock import FolderWatch, holder_of, run_lock
from megatron_fanformer.data.tokenizer import TokenizerTooSlow
from megatron_fanformer.errors import FanformerError, InputError, InUseError, MachineTooSlow
from megatron_fanformer.preparation.lists import Agreement, InputLists, ListState, is_done, list_prefix, read_lists
from megatron_fanformer.preparation.pipeline import FAILURES_NAMED, PrepareProgress
from megatron_fanformer.preparation.prepare import prepare, settings_and_tokenizer
from megatron_fanformer.preparation.progress import progress_line
from megatron_fanformer.preparation.verb import PrepareConfig
from megatron_fanformer.preparation.workers import Refused
from megatron_fanformer.terminal import show

STATE_SECONDS = 5.0  # between two records of how far a list is
OF_EVERY_LIST = (Refused, TokenizerTooSlow, MachineTooSlow)
"""Errors that end a task at once: --strict, or what the next list would meet, too."""


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
    output = os.path.abspath(config.output)
    settings, tokenizer = settings_and_tokenizer(config)
    lists.agree(Agreement(output=output, settings=settings, tokenizer=tokenizer))
    _Task(replace(config, output=output, from_lists=None, task=None), lists, config.task).run()


class _Task:
    def __init__(self, config: PrepareConfig, lists: InputLists, number: int | None) -> None:
        self._config, self._lists = config, lists
        names = [record.name for record in lists.records]
        first = (number or 0) % len(names)  # of an array with more tasks than lists, the others help where they can
        self._names = names[first:] + names[:first]
        self._tried_again = names if number is None else names[number : number + 1]
        self._failures: dict[str, FanformerError] = {}

    def run(self) -> None:
        has_taken = True
        while has_taken:  # a list that another task had may be left by now
            has_taken = False
            for name in self._names:
                if self._is_due(name):
                    has_taken |= self._take(name)
        if self._failures:
            first = next(iter(self._failures.values()))
            named = [f"list {name}: {error}" for name, error in self._failures.items()]
            more = f"; and {len(named) - FAILURES_NAMED} more lists" if len(named) > FAILURES_NAMED else ""
            raise type(first)("; ".join(named[:FAILURES_NAMED]) + more)
        show([f"nothing is left for this task; prepare --status {self._lists.folder} shows all"])

    def _is_due(self, name: str) -> bool:
        if name in self._failures or is_done(self._config.output, name):
            return False
        if holder_of(self._lists.task_folder(name)) is not None:
            return False
        state = self._lists.read_state(name)
        return state is None or state.error is None or name in self._tried_again

    def _take(self, name: str) -> bool:
        """Prepare a list; returns whether it was free."""
        try:
            with run_lock(self._lists.task_folder(name), option="the task's folder"):
                if not is_done(self._config.output, name):
                    self._prepare(name)
        except InUseError:  # another task was faster
            return False
        return True

    def _prepare(self, name: str) -> None:
        watch = FolderWatch(self._lists.task_folder(name))
        began = recorded = time.monotonic()
        state = ListState()

        def record(error: str | None = None) -> None:
            nonlocal recorded
            watch.check()  # this process may have been stopped for so long that another took the list
            recorded = time.monotonic()
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
        record()
        try:
            with progress_line(f"list {name}") as show_line:
                report = prepare(replace(self._config, inputs=inputs, output=output), listen)
        except (FanformerError, OSError) as error:
            with suppress(FanformerError):  # where another process writes the output, the list has not failed
                record(None if isinstance(error, InUseError) else str(error))
            if not isinstance(error, FanformerError) or isinstance(error, OF_EVERY_LIST):
                raise
            self._failures[name] = error
            return
        record()
        show(f"list {name}: {line}" for line in report.lines())
