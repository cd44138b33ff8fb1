"""A profile on a GPU has its kernels."""

import gzip
import json
from pathlib import Path

from tests.gpu.making import STEPS, finished, gpu_run, needs_gpu, needs_real_gpu

pytestmark = [*needs_gpu, needs_real_gpu]


def test_a_run_on_a_gpu_is_profiled_by_its_kernels(tokens: str, tmp_path: Path) -> None:
    logged = {"tensorboard": False, "profile_steps": [6, 8]}
    assert len(finished(gpu_run(tokens, tmp_path / "run", logging=logged), tmp_path / "run.yaml")) == STEPS
    folder = tmp_path / "run" / "traces" / "step-00000006-00000008"
    events = json.loads(gzip.decompress((folder / "rank-00000.json.gz").read_bytes()))["traceEvents"]
    assert {"step 6", "step 8"} < {event["name"] for event in events}
    assert [event for event in events if event.get("cat") == "kernel" and event["dur"] > 0]
    assert "Self CUDA" in (folder / "rank-00000.txt").read_text()
