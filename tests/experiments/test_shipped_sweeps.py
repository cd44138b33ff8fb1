"""The sweeps in examples/sweeps: they read, and their points are what they are called."""

from pathlib import Path

import pytest

from megatron_fanformer.experiments.cells import Sweep, read_sweep
from megatron_fanformer.model.config import FANformerConfig
from megatron_fanformer.train.config import load_config
from tests.experiments.table_2 import LOSSES, Equal, variants
from tests.small_runs import ROOT

FOLDER = ROOT / "examples" / "sweeps"
BASES = {FOLDER / "laptop.yaml", FOLDER / "one-gpu.yaml"}
SWEEPS = sorted(set(FOLDER.glob("*.yaml")) - BASES)
OWN_SIZE = "-dim"  # ends the name of a point at the Transformer's dimension
EQUAL = 1.5e-3  # of parameters: one of d_ff is 0.2% at a width of 128


@pytest.mark.parametrize("file", SWEEPS, ids=lambda file: file.stem)
def test_every_cell_can_run_and_points_at_the_same_parameters_have_them(file: Path) -> None:
    sweep = read_sweep(file, needs_data=False)
    report = sweep.config.report
    if file.stem.startswith(("compare", "variants", "p", "claim")):
        (baseline,) = {cell.parameters for cell in sweep.cells if cell.points[report.compare] == report.baseline}
        for cell in sweep.cells:
            is_equal = abs(cell.parameters / baseline - 1) < EQUAL
            assert is_equal == (not cell.points[report.compare].endswith(OWN_SIZE)), cell.name


@pytest.mark.parametrize(("name", "multiple"), [("variants", 1), ("variants-paper", 4)])
def test_the_variants_are_those_of_the_one_table(name: str, multiple: int) -> None:
    sweep = read_sweep(FOLDER / f"{name}.yaml", needs_data=False)
    models = {cell.points["variant"]: cell.config.model for cell in sweep.cells}
    size = load_config(FOLDER / sweep.config.base).model
    expected: dict[str, FANformerConfig] = {}
    losses: dict[str, float] = {}
    endings: dict[Equal, str] = {"dimension": OWN_SIZE, "parameters": ""}
    for equal, ending in endings.items():
        for variant, model in variants(size, equal, multiple=multiple).items():
            point = {"transformer": variant, "ffn-fan": f"{variant}-our-reading"}.get(variant, f"{variant}{ending}")
            expected[point], losses[point] = model, LOSSES[equal][variant]
    assert models == expected and sweep.config.report.paper == losses


def lengths(sweep: Sweep) -> list[int]:
    return sorted({cell.tokens for cell in sweep.cells})


def test_the_papers_forms_have_the_papers_sizes_and_tokens() -> None:
    sizes = read_sweep(FOLDER / "scaling-paper.yaml", needs_data=False)
    transformers = [cell.parameters for cell in sizes.cells if cell.points["architecture"] == "transformer"]
    assert [round(each / 1e6) for each in transformers] == [268, 604, 1074, 2517, 6443]
    assert lengths(sizes)[0] == pytest.approx(200e9, rel=1e-3)
    assert lengths(read_sweep(FOLDER / "scaling-tokens-paper.yaml", needs_data=False))[-1] == pytest.approx(
        200e9, rel=1e-3
    )
    assert lengths(read_sweep(FOLDER / "variants-paper.yaml", needs_data=False)) == [pytest.approx(10e9, rel=1e-3)]
