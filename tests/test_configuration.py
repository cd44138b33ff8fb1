"""Plain values against dataclasses: what is told, what is built, overrides, earlier names, descriptions."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from megatron_fanformer.checkpoint import run_folder
from megatron_fanformer.configuration import (
    build,
    describe_fields,
    overlay,
    read_overrides,
    rename_moved_fields,
    value_problems,
    yaml_value,
)
from megatron_fanformer.errors import InputError
from megatron_fanformer.model.config import PRESETS
from megatron_fanformer.runtime.layout import MOVED_FIELDS
from megatron_fanformer.train.config import config_from_dict, load_config
from tests.small_runs import small_run, write_config


@dataclass(frozen=True, kw_only=True)
class Inner:
    """What is inside."""

    rate: float = 0.5
    """How fast;
    in metres."""


@dataclass(frozen=True, kw_only=True)
class Outer:
    """All of it."""

    count: int
    """How many."""
    kind: Literal["a", "b"] | None = None
    """Which."""
    rates: list[float] = field(default_factory=list)
    """Of each."""
    inner: Inner = field(default_factory=Inner)
    """Inside."""


def test_values_become_the_dataclass() -> None:
    built = build({"count": 3, "inner": {"rate": 1}}, Outer)
    assert built == Outer(count=3, inner=Inner(rate=1.0))
    assert isinstance(built.inner.rate, float)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"count": "1"}, 'count is "1"; it must be an integer'),
        ({"count": 1.0}, "count is 1.0; it must be an integer"),
        ({"count": True}, "count is true; it must be an integer"),
        ({}, "count is missing; it must be an integer"),
        ({"count": 1, "kind": "c"}, 'kind is "c"; it must be one of a, b or null'),
        ({"count": 1, "rates": ["1"]}, 'rates is ["1"]; it must be a list of numbers'),
        ({"count": 1, "rates": [1, float("inf")]}, "rates is [1, Infinity]; it must be a list of numbers"),
        ({"count": 1, "inner": {"rate": True}}, "inner.rate is true; it must be a finite number"),
        ({"count": 1, "inner": None}, "inner is null; it must be a section with keys such as rate"),
        ({"count": 1, "inner": {"rte": 1}}, "unknown configuration key inner.rte; did you mean inner.rate?"),
        ({"count": 1, 7: 8}, "unknown configuration key 7; the keys here are count, kind, rates, inner"),
    ],
)
def test_what_is_wrong_is_told_in_words(values: Any, message: str) -> None:
    assert value_problems(values, Outer)[:1] == [message]
    with pytest.raises(InputError):
        build(values, Outer)


def test_all_that_is_wrong_is_told_at_once_under_its_whole_name() -> None:
    problems = value_problems({"kind": 3, "inner": {"rate": "fast"}}, Outer, "outer.")
    assert [line.split(" is ")[0] for line in problems] == ["outer.count", "outer.kind", "outer.inner.rate"]


# -- overrides


def test_overrides_are_yaml_laid_over_values_field_by_field() -> None:
    values = {"a": {"x": 1, "y": {"z": 2}}, "b": None}
    changes = read_overrides(["--a.y.z=3", "--b.c", "[1, two]", "--a.w", "4e-4", "--a.w", "5e-4", "--d.e", "null"])
    merged = overlay(values, changes)
    assert merged == {"a": {"x": 1, "y": {"z": 3}, "w": 5e-4}, "b": {"c": [1, "two"]}, "d": {"e": None}}
    assert values == {"a": {"x": 1, "y": {"z": 2}}, "b": None}
    assert overlay(values, read_overrides(["--a.y", "{w: 2}"]))["a"] == {"x": 1, "y": {"w": 2}}


def test_aliases_are_read_and_a_key_stands_once() -> None:
    merged = {"lr": 4e-4, "beta": 1}
    aliased = yaml_value("{a: &a {lr: 4e-4}, b: {<<: *a, beta: 1}, c: [*a, *a]}")
    assert aliased == {"a": {"lr": 4e-4}, "b": merged, "c": [{"lr": 4e-4}] * 2}
    with pytest.raises(ValueError, match="model stands twice in one mapping"):
        yaml_value("model: {}\ndata: {}\nmodel: {}")


# -- earlier names


def test_every_earlier_name_is_of_a_field(tmp_path: Path) -> None:
    defaults = dataclasses.asdict(config_from_dict({**small_run("x", tmp_path), "kernels": {}, "runtime": {}}))
    for old, new in MOVED_FIELDS.items():
        (earlier_section, *inner, earlier), (section, _, name) = old.split("."), new.partition(".")
        values = {**small_run("x", tmp_path), "kernels": {}, "runtime": {}}
        kept = {} if new else values.get(earlier_section, {})
        stated = {earlier: defaults[section][name] if new else True}
        values[earlier_section] = {**kept, **({inner[0]: stated} if inner else stated)}
        notices: list[str] = []
        config = config_from_dict(values, report=notices.append)
        assert config.as_dict() == defaults
        assert len(notices) == 1


def test_of_two_names_the_present_one_counts_and_an_override_before_the_file(tmp_path: Path) -> None:
    moved, earlier = rename_moved_fields({"parallel": {"device": "cpu"}, "runtime": {"device": "cuda"}}, MOVED_FIELDS)
    assert (moved, earlier) == ({"parallel": {}, "runtime": {"device": "cuda"}}, ["parallel.device"])
    assert rename_moved_fields({"a": 3}, {"a.b": "c.d"}) == ({"a": 3}, [])  # only out of sections
    file = write_config(tmp_path / "config.yaml", small_run("x", tmp_path))
    assert load_config(file, ["--parallel.device", "cuda"]).runtime.device == "cuda"


def test_a_checkpoint_of_an_earlier_version_is_read_under_the_present_names(tmp_path: Path) -> None:
    model = dataclasses.asdict(PRESETS["fanformer-300m"])
    parallel = {"tensor_model_parallel_size": 2, "data_parallel_size": 1, "device": "cpu", "transformer_impl": "local"}
    write_config(tmp_path / "config.yaml", {"model": model, "parallel": parallel})
    saved = run_folder.saved_config(tmp_path)
    assert saved["runtime"] == {"device": "cpu"} and saved["kernels"] == {"transformer_impl": "local"}
    assert run_folder.saved_model(tmp_path) == PRESETS["fanformer-300m"]


# -- descriptions


def test_fields_are_described_from_the_source() -> None:
    described = [(field.name, field.type, field.default, field.text) for field in describe_fields(Outer)]
    assert described == [
        ("count", "an integer", None, "How many."),
        ("kind", "one of a, b or null", "null", "Which."),
        ("rates", "a list of numbers", "[]", "Of each."),
        ("inner.rate", "a finite number", "0.5", "How fast; in metres."),
    ]
