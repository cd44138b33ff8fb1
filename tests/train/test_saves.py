"""The order in which a run's saves take place."""

import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest

from megatron_fanformer.checkpoint import run_folder
from megatron_fanformer.checkpoint.remote import FINISH_SECONDS
from megatron_fanformer.data.chat_template import attached_files
from megatron_fanformer.data.tokenizer import load_tokenizer
from megatron_fanformer.train.interrupts import Interrupts
from megatron_fanformer.train.saves import STOPPED_MIRROR_SECONDS, Checkpointer


def test_what_goes_into_checkpoints_is_read_once(tmp_path: Path, small_tokenizer_file: Path) -> None:
    shutil.copy(small_tokenizer_file, tmp_path / "own.model")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<0x41>"}')
    stated = load_tokenizer(tmp_path / "own.model").eod_id
    attached = attached_files(tmp_path / "own.model", "{{ messages }}")
    (tmp_path / "own.model").unlink()
    partial = run_folder.temporary_folder(tmp_path / run_folder.CHECKPOINTS, 1)
    saved = run_folder.publish_checkpoint(tmp_path / run_folder.CHECKPOINTS, 1, partial, {}, attached)
    assert (saved / "tokenizer.model").read_bytes() == small_tokenizer_file.read_bytes()
    assert (saved / "chat_template.jinja").read_text() == "{{ messages }}"
    assert load_tokenizer(saved).eod_id == stated != load_tokenizer(small_tokenizer_file).eod_id


def test_a_save_begins_once_the_one_before_is_published() -> None:
    """Two that are written at a time would share what the writers hold, and may be published in either order."""
    saves: Any = Checkpointer.__new__(Checkpointer)
    order = Mock()
    order.saver.finish_due.return_value = order.saver.save.return_value = "step-00000002"
    saves._saver, saves._listener, saves._mirror, saves._note_saved = order.saver, order.listener, order.mirror, Mock()
    saves.save(3, progress={})
    assert order.mock_calls == [
        call.saver.finish_due(blocking=True),
        call.mirror.offer("step-00000002"),
        call.listener.grant_save(),
        call.saver.save(step=3, progress={}),
        call.mirror.offer("step-00000002"),
    ]


@pytest.mark.parametrize(
    ("was_stopped", "signals", "seconds", "is_enough"),
    [
        (False, [False, False], FINISH_SECONDS, False),
        (False, [False, True], FINISH_SECONDS, True),  # while it waits
        (False, [True, True], STOPPED_MIRROR_SECONDS, False),  # in the last step, which is no end by a signal
        (True, [True, True], STOPPED_MIRROR_SECONDS, False),
    ],
)
def test_a_signal_that_came_before_leaves_the_mirror_its_minute(
    was_stopped: bool, signals: list[bool], seconds: float, is_enough: bool
) -> None:
    saves: Any = Checkpointer.__new__(Checkpointer)
    saves._has_mirror, saves._mirror, saves._listener = True, Mock(), Mock()
    saves._listener.now.side_effect = [Interrupts(stop=stop) for stop in signals]
    asked = []
    saves._mirror.finish.side_effect = lambda is_enough, seconds: asked.append((is_enough(), seconds))
    saves.finish_copies(was_stopped=was_stopped)
    assert asked == [(is_enough, seconds)]
