"""`examples/slurm.sh` on a real Slurm: stopped and requeued three times."""

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_fanformer.train.metrics import METRICS
from tests.clusters import slurm_here
from tests.clusters.slurm_here import SlurmCluster
from tests.patience import wait_until
from tests.runtime.test_launch import losses, train_here
from tests.small_runs import ROOT, small_run, write_config, write_tokens

pytestmark = [pytest.mark.full, pytest.mark.timeout(3600)]

SECONDS = 600.0  # for ranks to start, or to save, on a machine that has much else to do
STEPS = 300
TWO_RANKS = {"tensor_model_parallel_size": 2}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[SlurmCluster]:
    if reason := slurm_here.missing() or slurm_here.unpack(tmp_path):
        pytest.skip(reason)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {"PATH": path, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    # Not in pytest's folder: the path of a socket has 108 bytes at most, and Slurm ends no job whose socket has more.
    with (
        tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as folder,
        SlurmCluster(tmp_path, Path(folder), environment) as cluster,
    ):
        yield cluster


class Job:
    """A job of `slurm.sh` that trains for `STEPS` steps on two nodes."""

    def __init__(self, cluster: SlurmCluster, folder: Path, values: dict[str, Any]) -> None:
        self.cluster, self.folder = cluster, folder
        self.run, self.log = Path(values["training"]["run_dir"]), folder / "job.log"
        here = (f"--output={self.log}", f"--chdir={ROOT}", "--ntasks-per-node=1", "--gpus-per-node=0", "--time=60")
        script = str(ROOT / "examples" / "slurm.sh")
        config = str(write_config(folder / "config.yaml", values))
        self.number = cluster.submit("--nodes=2", "--cpus-per-task=1", *here, script, "--config", config)

    @property
    def steps(self) -> int:
        metrics = self.run / METRICS
        return len(metrics.read_text().splitlines()) if metrics.is_file() else 0

    def is_loading(self) -> bool:
        """Return whether ranks have been started that take no step yet."""
        words = ("megatron_fanformer", "train", "SLURM_STEP_NUM_TASKS=2", "SLURM_LOCALID=0")
        return len(self.cluster.processes(words)) == 2

    def wait_for_steps(self, number: int) -> None:
        self.wait_until(lambda: self.steps >= number)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        wait_until(condition, seconds=SECONDS)

    def wait_for_turn(self, number: int) -> None:
        """Until it has been requeued so often; Slurm would let it wait for two minutes, and is told not to."""
        self.wait_until(lambda: self.state("Restarts") == str(number))
        time.sleep(2)  # Slurm tells a job's credential from that of its turn before by the second
        self.cluster.run("scontrol", "update", f"jobid={self.number}", "StartTime=now")

    def state(self, name: str = "JobState") -> str:
        return self.cluster.job(self.number)[name]

    def log_text(self) -> str:
        return self.log.read_text() if self.log.is_file() else ""

    def wait_for_end(self) -> None:
        self.wait_until(lambda: self.state() in ("COMPLETED", "FAILED", "NODE_FAIL", "TIMEOUT"))
        assert (self.state(), self.state("ExitCode")) == ("COMPLETED", "0:0"), self.log_text()


@pytest.fixture
def values(tmp_path: Path) -> dict[str, Any]:
    training = {"train_iters": STEPS}
    sections: dict[str, Any] = {"parallel": TWO_RANKS, "training": training, "checkpoint": {"save_interval": 40}}
    return small_run(write_tokens(tmp_path / "tokens"), tmp_path / "run", **sections)


def test_a_job_that_is_stopped_again_and_again_ends_as_if_it_had_not_been(
    cluster: SlurmCluster, values: dict[str, Any], tmp_path: Path, run_on_ranks: Callable[..., list[Any]]
) -> None:
    """After a few steps, while the second turn's ranks are loading, and after a few more steps."""
    job = Job(cluster, tmp_path, values)
    job.wait_for_steps(5)
    cluster.signal(job.number)
    job.wait_for_turn(1)
    saved = job.steps
    job.wait_until(job.is_loading)
    cluster.signal(job.number)
    job.wait_for_turn(2)
    assert job.steps == saved and "with no step in progress; nothing is lost" in job.log_text()
    job.wait_for_steps(saved + 5)
    cluster.signal(job.number)
    job.wait_for_turn(3)
    assert job.steps < STEPS
    job.wait_for_end()
    values["training"]["run_dir"] = str(tmp_path / "straight")
    run_on_ranks(2, train_here, values)
    assert losses(tmp_path / "run") == losses(tmp_path / "straight")
    assert [step for step, _ in losses(tmp_path / "run")] == list(range(1, STEPS + 1))
