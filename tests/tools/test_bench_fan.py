import json
from collections.abc import Callable

import pytest
import torch

SMALL = ["--device", "cpu", "--tokens", "16", "--repeats", "2", "--threads", str(torch.get_num_threads())]


def test_each_case_and_direction_is_measured(run_tool: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_tool("bench_fan", *SMALL, "--hidden-sizes", "64", "--p-ratios", "0.25", "0.5", "--json") == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    cases = [(one["dtype"], one["p_ratio"], one["form"], one["direction"]) for one in found]
    ways = ("forward", "backward")
    assert cases == [(dtype, p, "eager", way) for dtype in ("fp32", "bf16") for p in (0.25, 0.5) for way in ways]
    # 16 tokens: 48 rows read and 64 columns written; 32 columns of X_F and its 64 gradients read, 48 written.
    assert [one["moved_bytes"] for one in found[:2]] == [16 * 112 * 4, 16 * 144 * 4]
    for one in found:
        assert one["bytes_per_second"] == pytest.approx(one["moved_bytes"] / one["seconds"])
        assert one["share_of_copy"] == pytest.approx(one["bytes_per_second"] / one["copy_bytes_per_second"])


def test_widths_come_from_presets(run_tool: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    presets = ["--presets", "fanformer-300m", "fanformer-300m-transformer"]
    assert run_tool("bench_fan", *SMALL, *presets, "--dtypes", "bf16") == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[:1] + row[2:6] for row in rows] == [["1024", "16", "bf16", "eager", w] for w in ("forward", "backward")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--presets", "fanformer-2b"], "fanformer-2b"),
        (["--p-ratios", "0.6"], "0.6"),
        (["--tokens", "0"], "--tokens 0"),
        (["--device", "cuda"], "nvidia-smi"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    run_tool: Callable[..., int], capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert run_tool("bench_fan", *SMALL, *arguments) == 2
    assert message in capsys.readouterr().err
