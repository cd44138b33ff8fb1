"""The command `experiment`: what a folder has, and what is refused."""

import json

import pytest

from megatron_fanformer import cli
from megatron_fanformer.experiments import holes, mod
from megatron_fanformer.experiments.probe import PROBES
from megatron_fanformer.experiments.result import Finding, Measured
from tests.experiments.stand_in import save


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


def test_a_run_that_went_on_is_another_setting(tmp_path, monkeypatch, capsys):
    calls = []
    monkeypatch.setattr(holes, "measure", measured_by(calls))
    run = tmp_path / "run"
    command = ["experiment", "holes", "--checkpoint", str(run), "--output", str(tmp_path / "out")]
    save(run, 4)
    assert cli.main(command) == cli.main(command) == 0
    assert [settings.checkpoints for settings in calls] == [(str(run / "checkpoints/step-00000004"),)]
    save(run, 8)
    assert cli.main(command) == 2
    assert "holds the result of holes by other settings" in capsys.readouterr().err
    command[3] += "/checkpoints/step-00000004"
    assert cli.main(command) == 0
    assert cli.main([*command, "--checkpoint", str(run / "checkpoints/step-00000004")]) == 2
    assert "name each once" in capsys.readouterr().err
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nod"], "'nod' is no experiment; name one of"),
        (["mod", "--mod.sedes", "2"], "did you mean mod.seeds?"),
        (["mod", "--holes.steps", "2"], "write --mod.FIELD VALUE"),
        (["mod", "--seeds", "0"], "mod.seeds is 0; it must be above 0"),
        (["mod", "--checkpoint", "x"], "--checkpoint has no effect in mod"),
        (["mod", "--write-data", "x"], "--write-data has no effect in mod"),
        (["lipschitz", "--lipschitz.depths", "[2, 1]"], "lipschitz.depths is [2, 1]; name numbers of layers"),
        (["lipschitz", "--lipschitz.depths", "two"], "it must be a list of integers"),
        *(
            ([name, f"--{name}.num_heads", "0"], f"{name}.num_heads is 0; it must be above 0")
            for name in ("holes", "inference", "lipschitz")
        ),
        (["holes", "--holes.half_side", "57"], "so that the hole lies within"),
        (["holes", "--holes.cooldown", "2"], "cooldown is 2.0; it must lie in [0, 1]"),
        (["holes", "--holes.cooldown", "-0.5"], "cooldown is -0.5; it must lie in [0, 1]"),
        (["holes", "--holes.weight_decays", "[-1.0]"], "name numbers from 0 on"),
        (["holes", "--checkpoint", "none"], "none does not exist"),
        (["cost", "--cost.presets", "[fanformer-2b]"], "'fanformer-2b', which is not a size"),
        (["cost", "--cost.presets", "[]"], "cost.presets is empty; name sizes, such as fanformer-1b"),
        (["--seeds", "3"], "name one of"),
    ],
)
def test_what_cannot_be_asked_is_told_in_a_line(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["experiment", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not list(tmp_path.rglob("result.json"))


def test_the_list_has_every_probe_with_its_minutes(capsys):
    assert cli.main(["experiment"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(PROBES)
    assert all(f"{probe.minutes} min" in line for probe, line in zip(PROBES.values(), lines, strict=True))
