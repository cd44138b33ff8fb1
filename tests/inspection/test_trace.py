"""Where the time of profiled steps went: the arithmetic, on traces whose times are known."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_fanformer.cli import main
from megatron_fanformer.errors import CorruptError, InputError
from megatron_fanformer.inspection import trace, trace_table
from megatron_fanformer.inspection.trace import Gap, rank_times
from megatron_fanformer.training.traces import trace_file, trace_folder

MAIN, BACKWARD, GLOO = 1, 2, 3  # threads


def event(name: str, start: float, length: float, *, thread: Any = MAIN, cat: str = "cpu_op", **args: Any) -> Any:
    """An event as torch writes it, in milliseconds."""
    times = {"ts": 1000 * (500 + start), "dur": 1000 * length}
    return {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": thread, **times, "args": {"External id": 1, **args}}


def marked(name: str, start: float, length: float, thread: Any = MAIN) -> Any:
    return event(name, start, length, cat="user_annotation", thread=thread)


def kernel(name: str, start: float, length: float, launch: int, stream: int = 7) -> list[Any]:
    """A kernel, and its launch by the backward thread 1 ms before."""
    launching = event("cudaLaunchKernel", start - 1, 0.01, thread=BACKWARD, cat="cuda_runtime", correlation=launch)
    running = event(name, start, length, thread=stream, cat="kernel", correlation=launch, stream=stream)
    return [launching, running]


def write(file: Path, events: list[Any]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    others = [{"ph": "M", "name": "process_name", "pid": 0, "tid": "", "args": {"name": "python"}}]
    content = {"schemaVersion": 1, "deviceProperties": [], "traceEvents": [*others, *events], "traceName": "x"}
    file.write_bytes(gzip.compress(json.dumps(content).encode()))
    return file


def milliseconds(seconds: dict[str, float]) -> dict[str, float]:
    return {name: round(1000 * value, 6) for name, value in seconds.items()}


def test_kernels_that_overlap_count_once_and_communication_where_it_is_exposed(tmp_path: Path) -> None:
    events = [
        marked("step 7", 0, 100),
        marked("phase loading samples", 0, 10),
        marked("phase forward", 10, 80),
        marked("phase update", 90, 10),
        event("cudaStreamSynchronize", 80, 5, cat="cuda_runtime"),
        # Backward's thread: what a kernel is of, by what launches it.
        event("autograd::engine::evaluate_function: _LossHeadFunctionBackward", 38, 3, thread=BACKWARD),
        *kernel("nvjet_tst_128x256", 12, 18, 1),  # products, 12 to 30
        *kernel("ncclDevKernel_AllReduce_Sum_f32", 25, 20, 2, stream=20),  # 25 to 45: exposed 30 to 40
        *kernel("void at::native::vectorized_elementwise_kernel", 40, 10, 3),  # the loss head's, 40 to 50
        *kernel("fmha_cutlass", 60, 20, 4),  # attention's, although a cutlass product, 60 to 80
        *kernel("_fan_activate", 70, 10, 5, stream=8),  # beside it: half of 70 to 80 each
        *kernel("multi_tensor_apply_kernel", 95, 15, 6),  # goes on after the step, until 110
        event("Memset (Device)", 5, 1, thread=7, cat="gpu_memset"),
        event("step 7", 12, 98, thread=7, cat="gpu_user_annotation"),  # spans kernels
    ]
    found = rank_times(write(tmp_path / "trace.json.gz", events))
    assert (found.steps, found.on_gpu) == ((7,), True)
    assert milliseconds(found.seconds) == {
        "communication": 10,
        "optimizer": 15,
        "attention": 15,
        "matrix products": 18,
        "FAN activation": 5,
        "loss head": 10,
        "loading samples": 9,
        "other operations": 1,
        "host": 27,  # 10 to 12, 50 to 60, 80 to 95
    }
    assert found.step_seconds == pytest.approx(0.110)
    assert found.communication == pytest.approx(0.020)
    assert found.idle == pytest.approx(0.036)
    assert found.gaps[:2] == [
        Gap("attention", "optimizer", pytest.approx(0.015), 1),
        Gap("loss head", "attention", pytest.approx(0.010), 1),
    ]


def test_on_a_cpu_the_innermost_operation_counts_and_what_waits_for_others_is_exposed(tmp_path: Path) -> None:
    events = [
        marked("step 7", 0, 40),
        marked("step 8", 60, 40),  # between them: metrics, of which one operation
        event("aten::sum", 45, 5),
        marked("phase loading samples", 0, 4),
        event("aten::stack", 1, 2),  # is of loading, too
        marked("phase forward", 4, 36),
        event("LinearWithGradAccumulation", 5, 10),  # 3 of its own around a product
        event("aten::mm", 6, 7),
        event("c10d::allreduce_", 16, 1),
        marked("gloo:all_reduce", 17, 8, GLOO),  # waited for from 20 on
        event("_SwiGLU", 17, 3),
        marked("wait for a collective", 20, 5),
        marked("gloo:send", 26, 6),  # torch files it under the thread that began it: not what that one does
        event("_RMSNorm", 27, 10),
        marked("phase update", 60, 40),
        event("aten::mm", 70, 20),  # Muon's
        event("aten::add", 65, 2, thread=GLOO),  # of another thread
    ]
    found = rank_times(write(tmp_path / "trace.json.gz", events))
    assert (found.steps, found.on_gpu) == ((7, 8), False)
    of_both = {name: round(2 * value, 6) for name, value in milliseconds(found.seconds).items()}
    assert of_both == {
        "communication": 6,
        "optimizer": 20,
        "matrix products": 7,
        "norms": 10,
        "SwiGLU": 3,
        "loading samples": 4,
        "other operations": 3,
        "host": 27,
        "between steps": 20,
    }
    assert 2 * found.step_seconds == pytest.approx(0.100)
    assert 2 * found.communication == pytest.approx(0.015)  # 16 to 25 and 26 to 32, once each


def test_ranks_stand_beside_each_other_and_of_many_the_least_and_the_most(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for ranks, first in ((2, 3), (6, 7)):
        folder = trace_folder(tmp_path / "run", first, first)
        for rank in range(ranks):
            events = [marked(f"step {first}", 0, 10), event("aten::mm", 0, 4 + rank / 2)]
            write(trace_file(folder, rank), events)
    (tmp_path / "run" / "config.yaml").write_text("model: {}\n")
    (tmp_path / "run" / "checkpoints").mkdir()
    assert main(["inspect", str(tmp_path / "run"), "--trace"]) == 0
    newest = capsys.readouterr().out
    assert "step 7 on ranks 0, 1, 2, 3 … 5 (CPU)" in newest
    assert ["matrix", "products", "52.5%", "5.25", "4.00", "(rank", "0)", "6.50", "(rank", "5)"] in cells(newest)
    assert "1 earlier profile" in newest and "step-00000003-00000003" in newest
    assert main(["inspect", str(trace_folder(tmp_path / "run", 3, 3)), "--trace"]) == 0
    earlier = cells(capsys.readouterr().out)
    assert ["matrix", "products", "42.5%", "4.00", "4.50"] in earlier
    assert ["whole", "step", "100.0%", "10.00", "10.00"] in earlier
    assert main(["inspect", str(tmp_path / "run"), "--trace", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["ranks"]["5"]["seconds"] == {"matrix products": 0.0065, "host": 0.0035}


def cells(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


@pytest.mark.parametrize(
    ("damage", "error", "says"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:-20]), CorruptError, "is not a whole trace"),
        (lambda file: file.write_bytes(b"not gzip"), CorruptError, "is not a whole trace"),
        (lambda file: file.write_bytes(gzip.compress(b'{"traceEvents": [{"ph": 3}]}')), CorruptError, "whole trace"),
        (lambda file: file.write_bytes(gzip.compress(b"[" * 10**6)), CorruptError, "is not a whole trace"),
        (lambda file: write(file, [event("aten::mm", 0, 1)]), InputError, "has no step of a run"),
        (lambda file: file.write_bytes(gzip.compress(b" " * 5000)), InputError, "profile fewer steps"),
    ],
)
def test_what_is_no_trace_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], Any], error: type[Exception], says: str
) -> None:
    file = write(tmp_path / "trace.json.gz", [marked("step 7", 0, 40)])
    damage(file)
    if says == "profile fewer steps":
        monkeypatch.setattr(trace, "MOST_BYTES", 4096)
    with pytest.raises(error) as refused:
        rank_times(file)
    assert says in str(refused.value) and str(file) in str(refused.value) and "\n" not in str(refused.value)


def test_a_run_without_profiled_steps_says_how_to_get_them(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"set logging\.profile_steps, or request a profile"):
        trace_table.trace_folders(tmp_path)


def test_options_that_have_no_effect_with_it_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tmp_path), "--trace", "--full"]) == 2
    assert "--full has no effect with --trace; use one at a time" in capsys.readouterr().err
