"""What the environment says about this process."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_fanformer.errors import InputError
from megatron_fanformer.runtime import device
from megatron_fanformer.runtime.parallel import ParallelConfig

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "MASTER_ADDR")


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_a_plain_start_has_no_address(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("SLURM_NTASKS", "16")  # a batch script sees this too; only srun's own tasks join
    assert device.rank_address() is None


def test_torchruns_variables(environment: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}.items():
        environment.setenv(name, value)
    environment.setenv("MASTER_ADDR", "node-0")
    environment.setenv("MASTER_PORT", "1234")
    numbers = {"rank": 5, "world_size": 8, "local_rank": 1, "local_world_size": 4, "master_port": 1234}
    assert device.rank_address() == device.RankAddress(**numbers, master_address="node-0")


def test_slurms_variables(environment: pytest.MonkeyPatch) -> None:
    for name, value in {"STEP_NUM_TASKS": "16", "PROCID": "9", "LOCALID": "1", "STEP_TASKS_PER_NODE": "8(x2)"}.items():
        environment.setenv(f"SLURM_{name}", value)
    with pytest.raises(InputError, match="MASTER_ADDR"):
        device.rank_address()
    environment.setenv("MASTER_ADDR", "node-0")
    address = device.rank_address()
    assert address is not None
    assert (address.rank, address.world_size, address.local_rank, address.local_world_size) == (9, 16, 1, 8)


def test_cuda_is_not_replaced_quietly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(InputError, match="finds no usable GPU"):
        device.resolve_device("cuda")
    (tmp_path / "version").touch()  # a driver is loaded, torch cannot use it
    monkeypatch.setattr(device, "NVIDIA_DRIVER", tmp_path)
    with pytest.raises(InputError, match="cannot use a GPU"):
        device.resolve_device("auto")
    assert device.resolve_device("cpu") == "cpu"
    device.hide_gpus()
    assert device.resolve_device("auto") == "cpu"
    with pytest.raises(InputError, match="finds no usable GPU"):  # asked for by name, hidden or not
        device.resolve_device("cuda")


def test_a_usable_gpu_must_be_hidden_for_a_cpu_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert device.resolve_device("auto") == "cuda"
    with pytest.raises(InputError, match="hide it with an empty CUDA_VISIBLE_DEVICES"):
        device.resolve_device("cpu")


def test_world_size_and_layout_must_agree() -> None:
    config = ParallelConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    assert config.resolve_data_parallel_size(8) == 2
    with pytest.raises(InputError, match=r"not a multiple of .* 2 x 1 x 2 = 4"):
        config.resolve_data_parallel_size(6)
    with pytest.raises(InputError, match="data_parallel_size is 3"):
        ParallelConfig(data_parallel_size=3).resolve_data_parallel_size(2)
    with pytest.raises(InputError, match="data_parallel_size is 1, but 2 ranks hold 2 replicas"):
        ParallelConfig(data_parallel_size=1).resolve_data_parallel_size(2)


def test_deterministic_algorithms(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", asked.append)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _number: None)
    device.configure_process("cuda", 0, 1)
    assert asked == []
    device.configure_process("cuda", 0, 1, deterministic=True)
    assert asked == [True]


def test_gpus_are_known_by_the_driver_without_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(device, "NVIDIA_DRIVER", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert not device.sees_gpus() and not device.is_after_hopper()
    for number, model in enumerate(("NVIDIA H100 80GB HBM3", "NVIDIA B200")):
        information = tmp_path / "gpus" / f"0000:1{number}:00.0" / "information"
        information.parent.mkdir(parents=True)
        information.write_text(f"Model: \t\t {model}\nIRQ:   \t\t 16\n")
        assert (device.gpu_models()[-1], device.sees_gpus(), device.is_after_hopper()) == (model, True, number == 1)
    device.hide_gpus()
    assert not device.sees_gpus()


FAULTS_OF_A_TENSOR = """
import ctypes, os, resource, sys
from megatron_fanformer.runtime import device
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: no huge pages, whatever the machine has them for
import torch
if not (child := os.fork()):
    os.environ["MALLOC_TOP_PAD_"] = "131072"
device.configure_process("cpu", 0, 1)
for _ in range(20):  # at first the memory has to come from the kernel, until small things have found their places
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(64 * 2**20 // 4)
if child:
    os.waitpid(child, 0)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
resident = lambda: int(open("/proc/self/statm").read().split()[1])
before = resident()
device.return_freed_memory()
print(before - resident(), flush=True)
"""


def test_freed_memory_is_kept_until_it_is_returned() -> None:
    """But for who asks for something else, as the second process does: glibc's own way."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "THP_"))}
    message = subprocess.check_output([sys.executable, "-c", FAULTS_OF_A_TENSOR], env=environment, text=True)
    by_itself, _, kept, returned = map(int, message.split())
    pages = 64 * 2**20 // resource.getpagesize()
    assert kept < pages / 100
    assert by_itself >= pages
    assert returned >= 0.9 * pages


@pytest.mark.parametrize(
    ("binding", "tasks", "ranks", "threads"),
    [
        ("none", "2", None, 4),
        ("cores,mask_cpu:", "2", "2", 8),  # gives each task its own
        ("cores,mask_cpu:", "2", "4", 4),  # torchrun as each node's task
        ("cores,mask_cpu:", "1", None, 4),  # `srun -n1`, about to start local ranks
    ],
)
def test_the_cores_of_a_task_are_shared_by_its_ranks(
    binding: str, tasks: str | None, ranks: str | None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "usable_cores", lambda: 8)
    stated = {"SLURM_CPU_BIND_TYPE": binding, "SLURM_STEP_NUM_TASKS": tasks, "RANK": ranks and "0", "WORLD_SIZE": ranks}
    for name in ("OMP_NUM_THREADS", *stated):
        monkeypatch.delenv(name, raising=False)
    for name, value in stated.items():
        if value is not None:
            monkeypatch.setenv(name, value)
    assert device.threads_per_rank(2) == threads


@pytest.mark.parametrize(("stated", "threads"), [("", 4), ("3", 3), ("6,2", 6), ("all", 4)])
def test_threads_of_the_environment_are_kept(stated: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "usable_cores", lambda: 8)
    monkeypatch.setenv("OMP_NUM_THREADS", stated)
    assert device.threads_per_rank(2) == threads
