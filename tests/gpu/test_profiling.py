"""A profile on a GPU: kernels by what they are of, whose times add up, and the memory's history."""

import pickle
from pathlib import Path

from megatron_fanformer.inspection.trace import rank_times
from megatron_fanformer.training.traces import memory_file, trace_file, trace_folder
from tests.gpu.making import finished, gpu_run, needs_gpu, needs_real_gpu

pytestmark = [*needs_gpu, needs_real_gpu]


def test_a_run_on_a_gpu_is_profiled_by_its_kernels(tokens: str, bf16_losses: list[float], tmp_path: Path) -> None:
    logged = {"tensorboard": False, "profile_steps": [6, 8], "record_memory_history": True}
    assert len(finished(gpu_run(tokens, tmp_path / "run", logging=logged), tmp_path / "run.yaml")) == len(bf16_losses)
    trace = trace_file(trace_folder(tmp_path / "run", 6, 8), 0)
    found = rank_times(trace)
    assert found.on_gpu and found.steps == (6, 7, 8)
    assert {"matrix products", "attention", "optimizer", "FAN activation", "loss head", "host"} <= set(found.seconds)
    assert 0 < found.idle < found.step_seconds
    snapshot = pickle.loads(memory_file(trace).read_bytes())  # this test's own
    assert any(snapshot["device_traces"]) and snapshot["segments"]
