"""How checkpoints are told apart in tables and pictures."""

from pathlib import Path

import pytest

from megatron_fanformer.checkpoint.run_folder import step_of
from megatron_fanformer.evaluate.results import Result, lines_of, names_of


def results(*checkpoints: str) -> list[Result]:
    return [Result(checkpoint=path, step=step_of(Path(path)), versions={}) for path in checkpoints]


def step(run: str, number: int) -> str:
    return f"runs/{run}/checkpoints/step-{number:08d}"


@pytest.mark.parametrize(
    ("checkpoints", "names"),
    [
        ([step("a", 40), step("a", 1000)], ["40", "1,000"]),
        ([step("a", 40), step("b", 40), step("b", 80)], ["a/40", "b/40", "b/80"]),
        ([step("x/run", 40), step("y/run", 80)], ["x/run/40", "y/run/80"]),
        (["a/x/hf", "b/x/hf"], ["a/x/hf", "b/x/hf"]),
        (["exports/a", step("b", 40)], ["a", "b/40"]),
    ],
)
def test_a_name_is_as_much_of_the_path_as_differs(checkpoints: list[str], names: list[str]) -> None:
    assert names_of(results(*checkpoints)) == names


def test_a_picture_has_a_line_for_each_run() -> None:
    lines = lines_of(results(step("a", 80), step("a", 40), step("b", 40)))
    assert {name: [place for place, _ in line] for name, line in lines.items()} == {"a": [40, 80], "b": [40]}
    (line,) = lines_of(results(step("a", 40), "hf")).values()
    assert [place for place, _ in line] == [0, 1]
