"""When Python collects by itself, and when not."""

import gc

import pytest

from megatron_fanformer.runtime import garbage


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_collects_by_itself_again_when_it_is_over(fails: bool) -> None:
    frozen = gc.get_freeze_count()
    try:
        with garbage.manual_gc():
            assert not gc.isenabled()
            if fails:
                raise KeyError
    except KeyError:
        assert fails
    assert gc.isenabled() and gc.get_freeze_count() <= frozen  # what these tests froze for themselves
