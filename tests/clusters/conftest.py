"""What the tests on several machines need, and why they are skipped where it is not there."""

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clusters import namespaces, slurm_here
from tests.clusters.slurm_here import SlurmCluster
from tests.small_runs import ROOT


@pytest.fixture(scope="session")
def program_environment() -> dict[str, str]:
    """Of programs that are to find this checkout and its interpreter."""
    return {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


@pytest.fixture(scope="session")
def slurm_packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("slurm-packages")
    if reason := namespaces.missing() or slurm_here.unpack(folder):
        pytest.skip(reason)
    return folder


@pytest.fixture
def cluster(slurm_packages: Path, program_environment: dict[str, str]) -> Iterator[SlurmCluster]:
    # Not in pytest's folder: the path of a socket has 108 bytes at most, and Slurm ends no job whose socket has more.
    with (
        tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as folder,
        SlurmCluster(slurm_packages, Path(folder), program_environment) as cluster,
    ):
        yield cluster
