"""What `examples/check_nodes.py` and the binding of cores read off a GPU itself."""

import pytest
import torch

from megatron_fanformer.runtime import topology
from tests.gpu.making import needs_gpu, needs_real_gpu
from tests.test_check_nodes import loaded

pytestmark = [
    *needs_gpu,
    needs_real_gpu,  # nvidia-smi, NCCL and CUDA's events
]


def test_a_gpu_is_measured_and_its_versions_are_known(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_nodes = loaded()
    monkeypatch.setattr("sys.argv", ["check_nodes.py"])
    assert check_nodes.main() == 0
    printed, errors = capsys.readouterr()
    assert 1 < float(printed.splitlines()[1].split()[1]) < 1e4 and "nvidia-smi" not in errors
    versions = check_nodes.facts_here(torch.device("cuda"), is_first=False)["versions"]
    assert {"GPU", "NCCL", "the driver"} < versions.keys() and versions["the driver"]


def test_the_driver_lists_the_gpu_and_the_kernel_its_cores() -> None:
    if not (listed := topology.gpus()):
        pytest.skip("this container does not see /proc/driver/nvidia/gpus")
    [gpu] = [gpu for gpu in listed if gpu.uuid == f"GPU-{torch.cuda.get_device_properties(0).uuid}"]
    assert gpu.model == torch.cuda.get_device_name(0)
    assert gpu.is_after_hopper == (torch.cuda.get_device_capability(0) >= (10, 0))
    assert topology.near_cores(gpu.address)
