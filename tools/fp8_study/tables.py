"""A report as Markdown tables: docs/fp8-phase.md has them."""

import itertools
import math
from collections.abc import Iterator, Sequence

from fp8_study.comparison import (
    LAST_STEPS,
    Report,
    deviation,
    differences,
    last_loss,
    trainings,
    validation_loss,
)
from fp8_study.phase_errors import EDGES, Row
from fp8_study.trainings import ARMS, BASES, FAN_ALL_FP8, FAN_BF16
from megatron_fanformer import markdown

LOSSES = {"validation": validation_loss, f"training, last {LAST_STEPS} steps": last_loss}


def tables(report: Report) -> str:
    """All of them."""
    parts = [*_losses(report), *_recipes(report), *_phases(report), *_qkv_inputs(report)]
    return "\n\n".join(parts)


def _losses(report: Report) -> Iterator[str]:
    for name, loss in LOSSES.items():
        rows = []
        for arm in ARMS:
            found = [loss(training) for training in trainings(report, arm)]
            cells = [arm.name, f"{sum(found) / len(found):.4f}", f"{deviation(found):.4f}", "", "", ""]
            if arm in BASES:
                apart = differences(report, arm, loss)
                by_seed = ", ".join(f"{value:+.4f}" for value in apart.by_seed)
                cells[3:] = [f"{apart.mean:+.4f}", f"{apart.standard_error:.4f}", by_seed]
            rows.append(cells)
        head = ["", f"{name} loss", "± seeds", "minus bf16", "± standard error", "by seed"]
        yield _table(head, rows)


def _recipes(report: Report) -> Iterator[str]:
    recipes = sorted({training["recipe"] for training in report["trainings"]} - {None, report["recipe"]})
    if not recipes:
        return
    rows = []
    for recipe in [report["recipe"], *recipes]:
        apart = [differences(report, FAN_ALL_FP8, loss, recipe).by_seed[0] for loss in LOSSES.values()]
        (last,) = list(trainings(report, FAN_ALL_FP8, recipe)[0]["phases"].values())[-1:]
        cos = math.sqrt(sum(row["share"] * row.get("cos", 0.0) ** 2 for row in last["fp8_errors"]))
        rows.append([recipe, *(f"{value:+.4f}" for value in apart), f"{cos:.4f}"])
    yield _table(["recipe", *(f"{name} loss minus bf16's" for name in LOSSES), "rms error of cos p"], rows)


def _phases(report: Report) -> Iterator[str]:
    for step, found in trainings(report, FAN_BF16)[0]["phases"].items():
        summary = found["phases"]
        yield f"Step {step}: rms of p {summary['rms']:.2f}, largest {summary['largest']:.1f}"
        formats = [f"{format_}: {error}" for format_ in ("bf16", "FP8") for error in ("δp", "δcos", "δsin")]
        head = ["size of p", "share", *formats, "independent: δp", "δcos", "aligned: δp"]
        rows = zip(found["bf16_errors"], found["fp8_errors"], strict=True)
        yield _table(head, [[label, *_errors(*pair)] for label, pair in zip(bin_labels(), rows, strict=True)])


def _errors(bf16: Row, fp8: Row) -> list[str]:
    if not fp8["count"]:
        return ["0", *[""] * 9]
    measured = [row[name] for row in (bf16, fp8) for name in ("phase", "cos", "sin")]
    formulas = [fp8[name] for name in ("expected_phase", "expected_cos", "half_ulp_phase")]
    share = f"{fp8['share']:.2%}" if fp8["share"] >= 1e-4 else f"{fp8['count']:.0f}"
    return [share, *(f"{value:.4f}" for value in [*measured, *formulas])]


def bin_labels() -> list[str]:
    """The bins of |p|."""
    return [
        f"{low:g}–{high:g}" if math.isfinite(high) else f"{low:g} and more" for low, high in itertools.pairwise(EDGES)
    ]


def _qkv_inputs(report: Report) -> Iterator[str]:
    rows = []
    for step, found in trainings(report, FAN_BF16)[0]["phases"].items():
        bf16, fp8 = found["bf16_qkv_input"], found["fp8_qkv_input"]
        numbers = [
            found["phases"]["plain_input_relative"],
            bf16["relative"],
            fp8["relative_with_map"],
            bf16["cos_sin"],
            bf16["linear"],
        ]
        rows.append([step, *(f"{value:.4f}" for value in numbers), f"{bf16['largest']:.2f}"])
    head = ["step", "x", "X_F, map in bf16", "X_F, map in FP8", "δcos, δsin", "δg", "largest of X_F"]
    yield _table(head, rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return markdown.table(head, rows, align="l" + "r" * (len(head) - 1))
