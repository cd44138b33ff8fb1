"""The layouts in the examples' headers: legal, with the figures that the formulas give now."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_fanformer.planning.machines import load_machine
from megatron_fanformer.sizing.candidates import laid_out, layout_name
from megatron_fanformer.sizing.estimate import GIB, estimate, for_machine, job_of, problems
from megatron_fanformer.training.config import load_config
from tests.small_runs import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("fanformer-*.yaml"))
ROW = re.compile(r"^# +(\d+) +([\d.]+) +([\d.]+)% +([\d.]+) +([\d.]+)  (\S+)$", re.MULTILINE)


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_the_figures_are_those_of_the_layouts(file: Path) -> None:
    machine = load_machine("h100")
    config = for_machine(load_config(file), machine, on_cpu=False)
    rows = ROW.findall(file.read_text())
    assert [int(row[0]) for row in rows] == [8, 64, 256, 1024]
    for gpus, seconds, utilization, memory, _, layout in rows:
        laid = laid_out(config, layout)
        assert problems(laid, int(gpus)) == []
        found = estimate(layout, laid, job_of(laid, int(gpus)), machine)
        assert found.fits
        assert f"{found.time.seconds:.3f}" == seconds
        assert f"{found.time.model_flops_utilization * 100:.1f}" == utilization
        assert f"{found.needed_bytes / GIB:.1f}" == memory


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_the_files_own_layout_is_the_one_of_its_ranks(file: Path) -> None:
    text = file.read_text()
    ranks = re.search(r"^# Ranks: (\d+)", text, re.MULTILINE)
    assert ranks
    (layout,) = (row[5] for row in ROW.findall(text) if row[0] == ranks[1])
    config = load_config(file)
    replicas = config.parallel.resolve_data_parallel_size(int(ranks[1]))
    own = laid_out(config, f"dp={replicas}")
    assert layout_name(own, config) == layout


@pytest.mark.full  # twenty searches
def test_a_search_finds_them() -> None:
    tool = ROOT / "tools" / "update_plans.py"
    done = subprocess.run([sys.executable, tool, "--check"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
