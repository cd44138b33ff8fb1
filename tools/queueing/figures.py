"""Reads a part's figures from the files that it wrote."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from queueing.record import Figure, Setting

Read = Callable[[Setting], float]


def of_json(file: str, *keys: str | int) -> Read:
    """A number in a JSON file, by its keys from outside in."""

    def read(setting: Setting) -> float:
        found = json.loads((setting.folder / file).read_text())
        for key in keys:
            found = found[key]
        return float(found)

    return read


def of_case(file: str, case: str, key: str) -> Read:
    """A number of one of the cases that `tools/bench_steps.py` or `bench_train.py` wrote."""

    def read(setting: Setting) -> float:
        [line] = [each for each in json.loads((setting.folder / file).read_text())["cases"] if each["case"] == case]
        return float(line[key])

    return read


def ratio(one: Read, other: Read) -> Read:
    """One number over another."""
    return lambda setting: one(setting) / other(setting)


def of_line(file: str, key: str, **chosen: Any) -> Read:
    """A number of the one line of JSON lines that has the chosen values."""

    def read(setting: Setting) -> float:
        lines = [json.loads(line) for line in (setting.folder / file).read_text().splitlines()]
        [line] = [each for each in lines if all(each[name] == value for name, value in chosen.items())]
        return float(line[key])

    return read


def passed(*logs: str) -> Read:
    """How many tests passed, by pytest's last lines."""

    def read(setting: Setting) -> float:
        texts = [(setting.folder / log).read_text(encoding="utf-8") for log in logs]
        return sum(int(count) for text in texts for count in re.findall(r"^(?:=+ )?(?:.*, )?(\d+) passed", text, re.M))

    return read


def not_passed(*logs: str) -> Read:
    """How many logs of pytest do not end with tests that passed or were skipped, and none that failed."""

    def has_failed(file: Path) -> bool:
        last = re.findall(r"^=+ (.* in [\d.]+s.*) =+$", file.read_text(encoding="utf-8"), re.M)[-1:]
        return not last or not re.search(r"passed|skipped", last[0]) or bool(re.search(r"failed|error", last[0]))

    return lambda setting: sum(has_failed(setting.folder / log) for log in logs)


def finding(file: str, name: str) -> Read:
    """The figure of one finding of an experiment's result."""

    def read(setting: Setting) -> float:
        [found] = [each for each in _findings(setting.folder / file) if each["name"] == name]
        return float(found["ours"])

    return read


def cases(setting: Setting) -> list[Figure]:
    """Each case of `tools/bench_steps.py` as it is: a step, the rate, memory."""
    return [
        Figure(
            name=line["case"],
            value=line["step_seconds"],
            shown=f"{line['step_seconds']:.4f} s, {line['model_flops_per_second'] / 1e12:,.1f} TFLOP/s, "
            f"{line['peak_memory_bytes'] / 1e9:.1f} GB",
        )
        for line in json.loads((setting.folder / "step.json").read_text())["cases"]
    ]


def numbers(file: str) -> Callable[[Setting], list[Figure]]:
    """All numbers of a JSON file, as one figure."""

    def read(setting: Setting) -> list[Figure]:
        found = json.loads((setting.folder / file).read_text())
        shown = ", ".join(f"{name} {value:,.4g}" for name, value in found.items() if value is not None)
        return [Figure(name="measured", value=None, shown=shown)]

    return read


def judged_findings(setting: Setting) -> list[Figure]:
    """Return what a sweep's report judges by its own rule: the comparisons that were stated beforehand."""
    return [
        Figure(
            name=each["name"],
            value=each["ours"],
            shown=_with_interval(each),
            rule="the whole interval on the expected side",
            met=None if setting.rehearses else each["shows"],
        )
        for each in _findings(setting.folder / "result.json")
        if each["interval"] is not None and not each.get("exploratory")
    ]


def _findings(file: Path) -> list[dict[str, Any]]:
    return json.loads(file.read_text())["findings"]


def _with_interval(found: dict[str, Any]) -> str:
    low, high = ("none" if bound is None else f"{bound:+.4f}" for bound in found["interval"])
    return f"{found['ours']:+.4f} ({low} to {high})"
