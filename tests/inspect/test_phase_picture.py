"""The picture of phase health: what is drawn of a run's metrics, and what is said where there is nothing to draw."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from matplotlib import image
from matplotlib.figure import Figure

from megatron_fanformer.inspect.phase_picture import PANELS
from tests.inspect.conftest import Inspect
from tests.small_runs import small_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder that holds its configuration and the metrics of six steps, of which two are looks."""
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(small_run("tokens", tmp_path / "run")))
    with (tmp_path / "run" / "metrics.jsonl").open("w") as file:
        for step in range(1, 7):
            last = None if step == 6 else 0.5  # null is what was not finite
            look = {name: [step / 10, number / 10, last] for number, name in enumerate(PANELS)} if step % 3 == 0 else {}
            file.write(json.dumps({"step": step, "loss": 1.0, **look}) + "\n")
    return tmp_path / "run"


def test_a_run_is_drawn(inspect: Inspect, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, *to, **how: (drawn.append(figure), save(figure, *to, **how)))
    output = inspect(run, "--phases", run / "phases.png")
    assert (output.code, output.error, output.out) == (0, "", f"{run / 'phases.png'}: the phases of {run}\n")
    [figure] = drawn
    panels = [axes for axes in figure.axes if axes.get_title()]
    assert [axes.get_title() for axes in panels] == list(PANELS.values())
    for number, axes in enumerate(panels):
        shown = axes.images[0].get_array().filled(np.nan)
        np.testing.assert_array_equal(shown, [[0.3, 0.6], [number / 10, number / 10], [0.5, np.nan]])
        assert [label.get_text() for label in axes.get_xticklabels()] == ["3", "6"]
        assert (axes.images[0].get_clim() == (0, 1)) == axes.get_title().startswith("share")
    assert image.imread(run / "phases.png").shape == (1080, 1320, 4)


def test_a_run_without_phase_health_has_no_picture(inspect: Inspect, run: Path) -> None:
    (run / "metrics.jsonl").unlink()
    assert "has no phase health: the run has not reached" in inspect(run, "--phases", run / "phases.png").error
    assert "--step has no effect with --phases" in inspect(run, "--phases", "phases.png", "--step", "0").error
