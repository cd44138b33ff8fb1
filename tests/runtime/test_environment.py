"""What a run sets in the environment: the value of each setting by layout, before torch, and the user's own first."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_fanformer.errors import InputError
from megatron_fanformer.runtime import environment
from megatron_fanformer.runtime.environment import ANY_SHAPE, RunShape
from megatron_fanformer.runtime.layout import ParallelConfig
from tests.small_runs import ROOT, small_run, write_config, write_tokens

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
ALLOCATOR, ALLOCATOR_OLD, EXPANDABLE = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"
DETERMINISTIC = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}
MARGINS = ("NVTE_FWD_LAYERNORM_SM_MARGIN", "NVTE_BWD_LAYERNORM_SM_MARGIN")
TP_2 = {"tensor_model_parallel_size": 2}
INTERLEAVED = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}


def shape(parallel: dict[str, Any] | None = None, *, replicas: int = 1, **rest: Any) -> RunShape:
    return RunShape(parallel=ParallelConfig(**(parallel or {})), replicas=replicas, **rest)


def set_for(run: RunShape, **given: str) -> dict[str, str]:
    """What is set besides what the environment has, in one that has no cuDNN to find."""
    env = dict(given)
    environment.prepare(run, env)
    ours = env.keys() - given.keys() - {"CUDNN_HOME", environment.SET_HERE}
    return {name: env[name] for name in ours}


@pytest.mark.parametrize(
    ("run", "connections", "priority", "margin"),
    [
        (ANY_SHAPE, "1", None, None),  # a process that may take any layout
        (shape(replicas=8), "32", "1", "20"),
        (shape(TP_2, replicas=4), "1", "1", "20"),
        (shape(TP_2, replicas=4, is_after_hopper=True), "32", "1", "20"),
        (shape(INTERLEAVED), "32", "1", "20"),
        (shape({"overlap_grad_reduce": False}, replicas=8), "32", "1", None),
        (shape(replicas=8, over_nccl=False), "32", None, None),
    ],
)
def test_what_communication_needs(run: RunShape, connections: str, priority: str, margin: str) -> None:
    found = set_for(run)
    assert found[CONNECTIONS] == connections
    assert found.get("TORCH_NCCL_HIGH_PRIORITY") == priority
    assert [found.get(name) for name in MARGINS] == [margin, margin]


def test_what_memory_graphs_threads_and_reproducibility_need() -> None:
    alone = set_for(shape())
    assert alone == {CONNECTIONS: "1", ALLOCATOR: EXPANDABLE, "THP_MEM_ALLOC_ENABLE": "1"}
    assert set_for(shape(cuda_graphs=True)) == alone | {"NCCL_GRAPH_REGISTER": "0"}
    assert set_for(shape(threads=12)) == alone | {"OMP_NUM_THREADS": "12"}
    assert set_for(shape(deterministic=True)) == alone | DETERMINISTIC
    assert set_for(ANY_SHAPE) == {CONNECTIONS: "1", "THP_MEM_ALLOC_ENABLE": "1"}


def test_the_users_own_wins_and_is_reported_where_it_differs() -> None:
    env = {CONNECTIONS: "8", "TORCH_NCCL_HIGH_PRIORITY": "1", "OMP_NUM_THREADS": "3"}
    found = environment.prepare(shape(replicas=2, threads=4), env)
    assert (env[CONNECTIONS], env["OMP_NUM_THREADS"]) == ("8", "3")
    assert found == [f"{CONNECTIONS} 8 (this run would set 32)"]
    assert environment.prepare(shape(replicas=2), {}) == []
    env = {ALLOCATOR_OLD: "max_split_size_mb:512"}
    (line,) = environment.prepare(shape(), env)
    assert ALLOCATOR not in env and line.startswith(f"{ALLOCATOR_OLD} max_split_size")


def test_what_one_run_sets_is_no_users_value_for_the_next() -> None:
    env: dict[str, str] = {}
    environment.prepare(env=env)
    environment.prepare(shape(replicas=8), env)
    assert (env[CONNECTIONS], env[MARGINS[0]]) == ("32", "20")
    assert environment.prepare(shape(), env) == []
    assert env[CONNECTIONS] == "1" and MARGINS[0] not in env


def test_a_value_that_contradicts_the_run_is_refused_and_nothing_is_set() -> None:
    env = {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}
    with pytest.raises(InputError, match=r"CUBLAS_WORKSPACE_CONFIG is :16:8 .* this run needs :4096:8; unset it"):
        environment.prepare(shape(deterministic=True), env)
    assert env == {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}


def test_the_cudnn_beside_torch_unless_another_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia" / "cudnn" / "lib").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    for env, home in (({}, str(tmp_path / "nvidia" / "cudnn")), ({"CUDNN_PATH": "mine"}, None)):
        environment.prepare(env=env)
        assert env.get("CUDNN_HOME") == home


AT_TORCH = """
import os, sys
class Stop:
    def find_spec(self, name, *_):
        if name == "torch":
            print(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"), os.environ.get("PYTORCH_ALLOC_CONF"), flush=True)
            os._exit(0)
sys.meta_path.insert(0, Stop())
from megatron_fanformer.cli import main
main(sys.argv[1:])
"""
LAUNCHED = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("verb", "given", "seen"),
    [
        ("train", {}, f"1 {EXPANDABLE}"),
        ("train", LAUNCHED, f"32 {EXPANDABLE}"),  # two replicas
        ("parity", {}, "1 None"),
    ],
)
def test_it_is_set_before_torch_is_imported(verb: str, given: dict[str, str], seen: str, tmp_path: Path) -> None:
    config = write_config(tmp_path / "run.yaml", small_run(write_tokens(tmp_path / "tokens"), tmp_path / "run"))
    ours = (CONNECTIONS, ALLOCATOR, ALLOCATOR_OLD, environment.SET_HERE)
    others = {name: value for name, value in os.environ.items() if name not in ours}
    command = [sys.executable, "-c", AT_TORCH, verb, "--config", str(config)]
    output = subprocess.check_output(command, env={**others, **given}, cwd=ROOT, text=True)
    assert output.splitlines()[-1] == seen
