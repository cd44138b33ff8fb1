"""The figures that `examples/check_nodes.py` and a run's environment read off a GPU itself."""

import pytest
import torch

from megatron_fanformer.runtime import device
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


def test_the_driver_lists_the_gpu() -> None:
    if not (models := device.gpu_models()):
        pytest.skip("this container does not see /proc/driver/nvidia/gpus")
    assert torch.cuda.get_device_name(0) in models
    assert device.is_after_hopper() == (torch.cuda.get_device_capability(0) >= (10, 0))
