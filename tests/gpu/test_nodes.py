"""What `check-node` reads off a GPU itself."""

import json

import pytest
import torch

from megatron_fanformer.cli import main
from megatron_fanformer.runtime import topology
from tests.gpu.making import needs_gpu, needs_real_gpu

pytestmark = [
    *needs_gpu,
    needs_real_gpu,  # nvidia-smi, NCCL and CUDA's events
]


def test_each_gpu_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    count = torch.cuda.device_count()
    main(["check-node", "--json", "--gpus", str(count)])  # another test may be using the GPU: then it is not idle
    [node] = json.loads(capsys.readouterr().out)["nodes"]
    assert {"CUDA", "NCCL", "the driver"} < node["facts"]["versions"].keys()
    assert len(node["facts"]["gpus"]) == count
    for gpu in node["facts"]["gpus"]:
        assert 1e12 < gpu["flops_per_second"] < 1e16 and 100 < gpu["clock_mhz"] < 10_000
    assert not [problem for problem in node["problems"] if "a second time" in problem]
    assert node["facts"]["network"]  # by NCCL's log
    assert not [what for what in node["facts"]["unseen"] if "nvidia-smi" in what]


def test_the_driver_lists_the_gpu_and_the_kernel_its_cores() -> None:
    if not (listed := topology.gpus()):
        pytest.skip("this container does not see /proc/driver/nvidia/gpus")
    [gpu] = [gpu for gpu in listed if gpu.uuid == f"GPU-{torch.cuda.get_device_properties(0).uuid}"]
    assert gpu.model == torch.cuda.get_device_name(0)
    assert gpu.is_after_hopper == (torch.cuda.get_device_capability(0) >= (10, 0))
    assert topology.near_cores(gpu.address)
