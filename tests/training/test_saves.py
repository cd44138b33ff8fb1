"""The order in which a run's saves take place."""

from typing import Any
from unittest.mock import Mock, call

from megatron_fanformer.training.saves import Checkpointer


def test_a_save_begins_once_the_one_before_is_published() -> None:
    """Two that are written at a time would share what the writers hold, and may be published in either order."""
    saves: Any = Checkpointer.__new__(Checkpointer)
    order = Mock()
    order.saver.finish_due.return_value = order.saver.save.return_value = "step-00000002"
    saves._saver, saves._listener, saves._mirror, saves._note_saved = order.saver, order.listener, order.mirror, Mock()
    saves.save(3, progress={})
    assert order.mock_calls == [
        call.saver.finish_due(blocking=True),
        call.listener.save.end(),
        call.mirror.offer("step-00000002"),
        call.listener.save.begin(),
        call.saver.save(step=3, progress={}),
        call.listener.save.end(),
        call.mirror.offer("step-00000002"),
    ]
