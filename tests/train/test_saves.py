"""The order in which a run's saves take place."""

from typing import Any
from unittest.mock import Mock, call

import pytest

from megatron_fanformer.checkpoint.remote import FINISH_SECONDS
from megatron_fanformer.train.interrupts import Interrupts
from megatron_fanformer.train.saves import STOPPED_MIRROR_SECONDS, Checkpointer


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
        call.listener.clear_save_requests(),
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
    saves._config, saves._mirror, saves._listener = Mock(), Mock(), Mock()
    saves._listener.pending.side_effect = [Interrupts(stop=stop) for stop in signals]
    asked = []
    saves._mirror.finish.side_effect = lambda is_enough, seconds: asked.append((is_enough(), seconds))
    saves.finish_copies(was_stopped=was_stopped)
    assert asked == [(is_enough, seconds)]
