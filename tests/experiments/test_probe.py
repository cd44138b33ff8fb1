"""The command `experiment`: what a folder has, and what is refused."""

import json

import pytest

from megatron_fanformer import cli
from megatron_fanformer.experiments import mod
from megatron_fanformer.experiments.result import Finding, Measured


def measured_by(calls):
    """In place of a probe: notes what it is asked."""

    def measure(settings, _folder, _tell):
        calls.append(settings)
        finding = Finding(name="n", ours=1.0, unit="ratio", shows=None, sentence="It came to 1 | 2.")
        return Measured(findings=[finding], pictures={"fit.png": b"PNG"})

    return measure


def test_a_folder_has_all_of_a_result_and_is_measured_into_once(tmp_path, monkeypatch, capsys):
    calls = []
    monkeypatch.setattr(mod, "measure", measured_by(calls))
    command = ["experiment", "mod", "--output", str(tmp_path / "mod"), "--seeds", "2", "--mod.model_steps", "7"]
    assert cli.main(command) == 0
    assert cli.main(command) == 0, "the second time it is shown"
    assert [(settings.seeds, settings.model_steps) for settings in calls] == [(2, 7)]
    assert capsys.readouterr().out.count("It came to 1 | 2.") == 2
    result = json.loads((tmp_path / "mod/result.json").read_text())
    assert (result["experiment"], result["settings"]["seeds"], result["pictures"]) == ("mod", 2, ["fit.png"])
    readme = (tmp_path / "mod/README.md").read_text()
    assert r"It came to 1 \| 2." in readme and "Settings: seeds 2; " in readme

    assert cli.main([*command, "--mod.model_steps", "8"]) == 2
    assert "other settings" in capsys.readouterr().err
    (tmp_path / "mod/result.json").unlink()
    assert cli.main([*command, "--mod.model_steps", "8"]) == 0
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nod"], "'nod' is no experiment; name one of"),
        (["mod", "--mod.sedes", "2"], "did you mean mod.seeds?"),
        (["mod", "--holes.steps", "2"], "write --mod.FIELD VALUE"),
        (["mod", "--seeds", "0"], "mod.seeds is 0; it must be above 0"),
        (["holes", "--checkpoint", "x"], "unknown argument --checkpoint; holes trains its models from scratch"),
        (["lipschitz", "--lipschitz.depths", "two"], "it must be a list of integers"),
        (["holes", "--holes.tasks", "[]"], "holes.tasks is empty; name one or more"),
        (["holes", "--holes.hidden_size", "30"], "hidden_size is 30; it must be a multiple of four times num_heads 4"),
        (["cost", "--cost.presets", "[fanformer-2b]"], "'fanformer-2b', which is not a size"),
        (["--seeds", "3"], "--seeds has no effect without NAME"),
    ],
)
def test_what_cannot_be_asked_is_told_in_a_line(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["experiment", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not list(tmp_path.rglob("result.json"))
