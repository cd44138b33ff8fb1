"""`sweep FILE init` compares a run's model with others of as many parameters; `dry-run` lists cells and their cost."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_fanformer import cli
from megatron_fanformer.errors import InputError
from megatron_fanformer.experiments.cells import read_sweep
from megatron_fanformer.experiments.variants import NEAR_ENOUGH, VARIANTS, variant_like
from megatron_fanformer.model.config import PRESETS
from tests.experiments.making import changed, write_sweep
from tests.small_runs import ROOT, small_run, write_config, write_tokens

EXAMPLE = str(ROOT / "examples" / "tiny-cpu.yaml")


def init(file: Path, *words: str) -> int:
    return cli.main(["sweep", str(file), "init", *words])


@pytest.fixture
def tokens(tmp_path: Path) -> str:
    return write_tokens(tmp_path / "tokens")


def run_of(place: Path, tokens: str, **data: Any) -> str:
    return str(
        write_config(place / "run.yaml", small_run(tokens, place / "run", data={"train_data": [tokens], **data}))
    )


def test_a_run_is_compared_with_its_twin_of_as_many_parameters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "compare.yaml"
    assert init(file, "--config", EXAMPLE, "--compare", "transformer", "fanformer", "--seeds", "4") == 0
    shown = capsys.readouterr().out.splitlines()
    sweep = read_sweep(file, needs_data=False)
    by_point = {cell.points["model"]: cell.config.model for cell in sweep.cells}
    assert {point: (model.fan.placement, model.ffn_hidden_size) for point, model in by_point.items()} == {
        "transformer": ("none", 352),
        "fanformer": ("qkv", 320),
    }
    assert len(sweep.cells) == 8 and sweep.metric == "validation_loss/stdlib"
    assert sweep.config.report.baseline == "transformer"
    assert sweep.config.report.primary == [["fanformer", "transformer"]]
    assert sweep.folder == tmp_path / "compare"
    assert shown[1] == "parameters, without embedding and head, against transformer's: fanformer +0.05%"
    for line in shown[2:]:
        cli.read_command(line.split()[1:])
    assert cli.main(["sweep", str(file), "dry-run"]) == 0
    assert shown[1] in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("base", [PRESETS["fanformer-1b"], PRESETS["fanformer-1b-transformer"]])
@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_has_the_parameters_of_the_run(name: str, base: Any) -> None:
    found, other = variant_like(base, name, divided_by=8), base.num_parameters
    assert found.problems() == [] and found.fan.placement == VARIANTS[name].placement
    assert abs(found.num_parameters / other - 1) <= NEAR_ENOUGH and found.ffn_hidden_size % 8 == 0
    assert (found is base) == (name == ("fanformer" if base.placement.is_fanformer else "transformer"))


def test_the_validation_of_a_split_is_compared(tmp_path: Path, tokens: str) -> None:
    assert init(tmp_path / "compare.yaml", "--config", run_of(tmp_path, tokens, split="80,20,0")) == 0
    assert read_sweep(tmp_path / "compare.yaml", needs_data=True).metric == "validation_loss/validation"
    report = {"compare": "size", "baseline": "d16"}
    own = write_sweep(tmp_path, tokens, axes={"size": {"d16": {}}}, report=report)
    changed(own, base="run.yaml", changes={})
    assert read_sweep(own, needs_data=True).metric == "validation_loss/validation"
    changed(own, base="run.yaml", changes={"data.split": None})
    with pytest.raises(InputError, match=r"^report.metric is not set, and the runs have 0 validation sets; name one"):
        read_sweep(own, needs_data=True)


REFUSED = {
    "without a run": (["--seeds", "3"], "init needs the configuration of a run; add --config"),
    "without validation": (["--config", "RUN"], "has no validation, by which models are compared; set data.valid_data"),
    "one alone": (["--config", EXAMPLE, "--compare", "atl"], "name two or more of transformer, ffn-fan"),
    "twice the same": (["--config", EXAMPLE, "--compare", "atl", "atl"], "each once"),
    "unknown": (["--config", EXAMPLE, "--compare", "atl", "mamba"], "--compare is atl mamba; name two or more of"),
    "no periods": (["--config", EXAMPLE, "--model.fan.p_ratio", "0"], "p_ratio is 0, without a periodic row"),
    "a cell's own": (["--config", EXAMPLE, "--training.seed", "1"], "--training.seed has no effect with init"),
    "no seeds": (["--config", EXAMPLE, "--seeds", "0"], "seeds is 0; it must be at least 1"),
    "a wrong field": (["--config", EXAMPLE, "--training.train_iters", "0"], "in every cell: training.train_iters"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_nothing_is_written_where_it_would_not_run(
    case: str, tmp_path: Path, tokens: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words, message = REFUSED[case]
    run = run_of(tmp_path, tokens)
    assert init(tmp_path / "compare.yaml", *[run if word == "RUN" else word for word in words]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "compare.yaml").exists()


def test_a_file_is_not_replaced_and_other_actions_take_nothing_of_init(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "compare.yaml"
    assert init(file, "--config", EXAMPLE) == 0
    before = file.read_text()
    assert yaml.safe_load(before)["base"] != EXAMPLE  # but the way there
    assert init(file, "--config", EXAMPLE, "--seeds", "5") == 2 and file.read_text() == before
    assert init(tmp_path / "compare", "--config", EXAMPLE) == 2
    for words in (["--config", EXAMPLE], ["--compare", "atl", "atm"], ["--seeds", "3"], ["--optimizer.lr", "1"]):
        capsys.readouterr()
        assert cli.main(["sweep", str(file), "dry-run", *words]) == 2
        assert re.search(rf"{words[0]} has no effect with dry-run; use it with init", capsys.readouterr().err)


# -- dry-run


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
