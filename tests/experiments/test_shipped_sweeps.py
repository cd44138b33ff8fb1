"""The sweeps in examples/sweeps: they read, and their points are what they are called."""

from pathlib import Path

import pytest

from megatron_fanformer.experiments.cells import Sweep, read_sweep
from megatron_fanformer.model.config import FANConfig
from tests.small_runs import ROOT

FOLDER = ROOT / "examples" / "sweeps"
BASES = {FOLDER / "laptop.yaml", FOLDER / "one-gpu.yaml"}
SWEEPS = sorted(set(FOLDER.glob("*.yaml")) - BASES)
OWN_SIZE = "-dim"  # ends the name of a point at the Transformer's dimension
EQUAL = 1.5e-3  # of parameters: one of d_ff is 0.2% at a width of 128

VARIANTS = {  # the paper's table 2: fields of `model.fan`, and losses at 1B parameters after 10B tokens
    "transformer": (FANConfig(placement="none"), 2.889),
    "ffn-fan-our-reading": (FANConfig(placement="ffn", activation="gelu"), 2.880),
    "atm": (FANConfig(p_ratio=0.0, activation="gelu"), 2.890),
    "atl": (FANConfig(p_ratio=0.0), 2.882),
    "original-fan": (FANConfig(activation="gelu"), 2.893),
    "fanformer": (FANConfig(), 2.863),
    "atm-dim": (FANConfig(p_ratio=0.0, activation="gelu"), 2.886),
    "atl-dim": (FANConfig(p_ratio=0.0), 2.879),
    "original-fan-dim": (FANConfig(activation="gelu"), 2.887),
    "fanformer-dim": (FANConfig(), 2.856),
}


@pytest.mark.parametrize("file", SWEEPS, ids=lambda file: file.stem)
def test_every_cell_can_run_and_points_at_the_same_parameters_have_them(file: Path) -> None:
    sweep = read_sweep(file, needs_data=False)
    report = sweep.config.report
    if file.stem.startswith(("compare", "variants", "p", "claim")):
        (baseline,) = {cell.parameters for cell in sweep.cells if cell.points[report.compare] == report.baseline}
        for cell in sweep.cells:
            is_equal = abs(cell.parameters / baseline - 1) < EQUAL
            assert is_equal == (not cell.points[report.compare].endswith(OWN_SIZE)), cell.name


@pytest.mark.parametrize("name", ["variants", "variants-paper"])
def test_the_variants_are_those_of_the_one_table(name: str) -> None:
    sweep = read_sweep(FOLDER / f"{name}.yaml", needs_data=False)
    models = {cell.points["variant"]: cell.config.model for cell in sweep.cells}
    assert {point: model.fan for point, model in models.items()} == {point: fan for point, (fan, _) in VARIANTS.items()}
    assert sweep.config.report.paper == {point: loss for point, (_, loss) in VARIANTS.items()}


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
