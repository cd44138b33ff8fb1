"""`sweep FILE dry-run`: what the cells are and cost; no token file is read."""

from pathlib import Path

import pytest

from megatron_fanformer import cli
from megatron_fanformer.experiments.cells import read_sweep
from tests.experiments.making import write_sweep


def test_what_would_run_is_listed_with_its_parameters_and_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_sweep(tmp_path, "no-tokens")
    for options, message in (
        (["--gpus", "2"], "--gpus has no effect without --gpu"),
        (["--gpus", "0"], "'0' is not a"),
    ):
        assert cli.main(["sweep", str(file), "dry-run", *options]) == 2
        assert message in capsys.readouterr().err
    assert cli.main(["sweep", str(file), "dry-run", "--gpu", "h100"]) == 0
    shown = capsys.readouterr().out
    sweep = read_sweep(file, needs_data=False)
    model = next(
        cell.config.model for cell in sweep.cells if cell.points == {"architecture": "transformer", "size": "d16"}
    )
    outside = model.num_parameters - model.padded_vocab_size * model.hidden_size
    (row,) = [line.split() for line in shown.splitlines() if line.startswith("transformer") and "d16" in line]
    assert row[2:5] == ["2", f"{outside:,}", "640"]
    assert "16 cells, 0 of them complete" in shown and "time: by formula, on 1 x NVIDIA H100" in shown


def test_the_time_of_a_recipe_that_a_machine_lacks_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fp8 = {"precision.dtype": "bf16", "precision.fp8": "hybrid", "precision.fp8_recipe": "mxfp8"}
    changes = {**fp8, "kernels.transformer_impl": "auto", "model.num_attention_heads": 1}
    axes = {"size": {"d128": {"model.hidden_size": 128}}}
    report = {"compare": "size", "baseline": "d128"}
    file = write_sweep(tmp_path, "no-tokens", axes=axes, seeds=1, report=report, changes=changes)
    assert cli.main(["sweep", str(file), "dry-run", "--gpu", "h100"]) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert "cell d128,seed=1234: precision.fp8_recipe is mxfp8, whose blocks of 32 NVIDIA H100" in told
    assert cli.main(["sweep", str(file), "dry-run", "--gpu", "b200"]) == 0
