"""When `train` starts its ranks again after a failure; killed processes are in tests/faults."""

from pathlib import Path
from unittest import mock

import pytest

from megatron_fanformer.data.check import CheckedData
from megatron_fanformer.data.fingerprint import DataFingerprint, SetFingerprint
from megatron_fanformer.runtime.launch import RankFailed
from megatron_fanformer.train import start
from megatron_fanformer.train.config import config_from_dict
from megatron_fanformer.train.preflight import RunStart
from tests.small_runs import small_run

KILLED = RankFailed("rank 1: was killed by SIGKILL", 1)


def begun(step: int) -> RunStart:
    """What a run starts from when its last checkpoint is of that step."""
    candidates = (Path(f"step-{step}"),) if step else ()
    identity = DataFingerprint(train=SetFingerprint(digest=""))
    return RunStart(candidates=candidates, data=mock.create_autospec(CheckedData), identity=identity, train_iters=1)


class Launches:
    """Stands for the ranks: each launch fails as it is told, until none is left, which succeeds."""

    def __init__(self, tmp_path: Path, failures: list[RankFailed], saved: list[int], *, max_restarts: int) -> None:
        self.pauses: list[float] = []
        self.found: list[RunStart] = []
        self._failures, self._saved = iter(failures), iter(map(begun, saved))
        self._config = config_from_dict(small_run("tokens", tmp_path, training={"max_restarts": max_restarts}))

    def run(self) -> int:
        """Returns how often the ranks were launched."""
        with (
            mock.patch.object(start, "launch_ranks", self._launch),
            mock.patch.object(start, "find_start", lambda *_, **__: next(self._saved)),
            mock.patch.object(start.time, "sleep", self.pauses.append),
        ):
            start._launch(self._config, 2, [], begun(0))
        return len(self.found)

    def _launch(self, *_: object, found: tuple[RunStart, str | None], **__: object) -> None:
        self.found.append(found[0])
        if (failure := next(self._failures, None)) is not None:
            raise failure


def test_each_new_checkpoint_allows_the_restarts_anew(tmp_path: Path) -> None:
    launches = Launches(tmp_path, [KILLED] * 4, [0, 10, 10, 20], max_restarts=2)
    assert launches.run() == 5
    assert [found.resumed and found.resumed.name for found in launches.found] == [
        None,
        None,
        "step-10",
        "step-10",
        "step-20",
    ]
    assert launches.pauses == [1, 1, 2, 1]


def test_without_a_new_checkpoint_the_restarts_come_to_an_end(tmp_path: Path) -> None:
    launches = Launches(tmp_path, [KILLED] * 99, [10] * 99, max_restarts=9)
    with pytest.raises(RankFailed, match="rank 1"):
        launches.run()
    assert launches.pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]


@pytest.mark.parametrize("code", [2, 3, 4])
def test_what_would_fail_again_is_not_started_again(tmp_path: Path, code: int) -> None:
    with pytest.raises(RankFailed):
        Launches(tmp_path, [RankFailed("rank 0: it is wrong", code)], [], max_restarts=5).run()


def test_a_run_that_was_told_to_stop_is_not_started_again(tmp_path: Path) -> None:
    failure = RankFailed("rank 0: the checkpoint of step 3 was not written", 1, was_stopping=True)
    with pytest.raises(RankFailed):
        Launches(tmp_path, [failure], [], max_restarts=5).run()


def test_by_default_nothing_is_started_again(tmp_path: Path) -> None:
    with pytest.raises(RankFailed):
        Launches(tmp_path, [KILLED], [], max_restarts=0).run()
