"""Machines by name and by file: what a file may say, and what is wrong with one in a line each."""

import csv
import dataclasses
import json
from pathlib import Path

import pytest

from megatron_fanformer.errors import InputError
from megatron_fanformer.plan.machines import known_machines, load_machine


@pytest.mark.parametrize("name", known_machines())
def test_every_known_machine_says_where_its_figures_are_from(name: str) -> None:
    machine = load_machine(name.upper())
    assert not [*machine.problems()] and machine.sources


def test_an_error_is_stated_for_what_was_compared_alone() -> None:
    """The published runs' chips and formats, and those of the same architecture."""
    with (Path(__file__).parent / "published_runs.csv").open() as file:
        runs = {(row["gpu"].lower(), "bf16" if row["prec"] == "bf16" else "fp8") for row in csv.DictReader(file)}
    compared = runs | {("h200", format_) for gpu, format_ in runs if gpu == "h100"}
    stated = {
        (name, format_): machine.error_in(format_)
        for name, machine in known_machines().items()
        for format_ in ("fp32", "bf16", "fp8")
        if getattr(machine, f"{format_}_flops_per_second") is not None
    }
    assert {key for key, error in stated.items() if error} == compared
    assert all(0 <= error < 1 for error in stated.values())


def test_a_file_with_all_fields_is_the_machine(tmp_path: Path) -> None:
    file, values = tmp_path / "mine.json", dataclasses.asdict(load_machine("h100"))
    file.write_text(json.dumps(values))
    assert load_machine(str(file)) == load_machine("h100")
    # One error for all formats, as a report of tools/bench_train.py on a CPU may have it.
    file.write_text(json.dumps({**values, "fp32_relative_error": None, "relative_error": 0.17}))
    assert [load_machine(str(file)).error_in(format_) for format_ in ("fp32", "bf16", "fp8")] == [0.17, 0.17, 0.11]


def test_a_file_may_say_only_what_differs(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"machine": {"like": "H100", "name": "mine", "network": {"bytes_per_second": 25e9}}}))
    mine, h100 = load_machine(str(file)), load_machine("h100")
    assert mine.network.bytes_per_second == 25e9 and mine.network.efficiency == h100.network.efficiency
    assert mine.domain == h100.domain and mine.name == "mine"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("like: h100\nproduct_efficiency: 1.5\noverlap: -1", ["machine.overlap is -1", "at most 1"]),
        ("like: h100\nmemory_bandwidth: 1e12", ["machine.memory_bandwidth", "did you mean"]),
        ("like: h10", ["like is 'h10'", "h100"]),
        ("name: mine", ["machine.memory_bytes is missing"]),
        ("like: h100\ndomain: {efficiency: 0}", ["machine.domain.efficiency is 0.0; it must be above 0"]),
        ("[1, 2]", ["holds no fields of a machine"]),
        ("a: [", ["cannot be read as a machine"]),
    ],
)
def test_a_wrong_file_is_refused(text: str, message: list[str], tmp_path: Path) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text(text)
    with pytest.raises(InputError) as refused:
        load_machine(str(file))
    assert all(part in str(refused.value) for part in message)
    assert all(line.startswith(str(file)) for line in str(refused.value).splitlines())
