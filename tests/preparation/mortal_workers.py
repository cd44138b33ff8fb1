"""Workers of `prepare` that are killed while they encode a file, as often as a file beside it says."""

import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

from megatron_fanformer.preparation import workers
from megatron_fanformer.preparation.shards import ShardRecord

DEATHS = "deaths"
run_worker, encode = workers.run_worker, workers._FileEncoder.encode


def run_mortal(setup: workers.WorkerSetup, threads: int, connection: Connection) -> None:
    """In place of `run_worker`."""
    workers._FileEncoder.encode = _encode_or_die  # type: ignore[method-assign]
    run_worker(setup, threads, connection)


def _encode_or_die(self: workers._FileEncoder, task: workers.Task) -> ShardRecord:
    assert isinstance(task.path, Path)
    left = int((deaths := task.path.with_name(DEATHS)).read_text())
    if left:
        deaths.write_text(str(left - 1))
        os.kill(os.getpid(), signal.SIGKILL)
    return encode(self, task)
