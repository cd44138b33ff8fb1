"""What nvidia-smi is asked, by a stand-in for it."""

from pathlib import Path

import pytest

from megatron_fanformer.nodes.hardware import query_nvidia_smi


def test_nvidia_smi_is_asked_while_the_load_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers once it has seen the load twice."""
    program, load = tmp_path / "nvidia-smi", tmp_path / "load"
    program.write_text(f'#!/bin/bash\nuntil [[ $(wc -c < {load}) -ge 2 ]]; do :; done\necho "1500 $*"\n')
    program.chmod(0o755)
    load.write_text("")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    def work() -> None:
        with load.open("a") as file:
            file.write("x")

    message = query_nvidia_smi("clocks.sm", "--id=GPU-1", meanwhile=work)
    assert message == ["1500 --query-gpu=clocks.sm --format=csv,noheader,nounits --id=GPU-1"]


@pytest.mark.parametrize("program", [None, "exit 9", ":"])
def test_a_node_without_a_working_nvidia_smi_goes_without_its_answer(
    program: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if program is not None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/bash\n{program}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not query_nvidia_smi("driver_version")
