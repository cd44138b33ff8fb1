"""Reports of a comparison: lines for the terminal, and plain values for a file."""

import dataclasses
import platform
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import msgspec
import torch

from megatron_fanformer import __version__
from megatron_fanformer.model.layouts import SINGLE
from megatron_fanformer.parity.communication import LayoutCommunication
from megatron_fanformer.parity.comparison import FACTOR, KINDS, Bounds, Differences
from megatron_fanformer.parity.run import REORDERED_RUNS, LayoutResult, ParityResult
from megatron_fanformer.plan.communication import Total
from megatron_fanformer.terminal import table

COLUMNS = ("first loss", "outputs", "gradients", "losses", "weights")


def report_lines(result: ParityResult) -> Iterator[str]:
    """Yield the table: one row per layout, and what reordered sums alone showed."""
    small, trial = result.calibration.small, result.calibration.trial
    yield (
        f"The configuration made small: {'; '.join(small.changes) or 'it is small already'}. Global batch "
        f"{small.global_batch_size}, micro batch {small.micro_batch_size}, {trial.steps} steps, {trial.dtype}, "
        f"{trial.device}."
    )
    columns = ("layout", "ranks", *COLUMNS, "largest, of its bound", "verdict")
    yield from table(columns, _rows(result), align="l" + "r" * (1 + len(COLUMNS)) + "ll")
    yield (
        "Relative differences from one process; the largest, over all steps and tensors. Outputs and gradients are of "
        "the first step, and losses and weights of all; a weight's difference is relative to how far it moved. "
        f"A bound is {FACTOR:g} times what {REORDERED_RUNS} single-process runs with every sum reordered"
        f"{'' if trial.dtype == 'fp32' else ', and one in fp32,'} showed."
    )
    for counted in result.communication:
        yield from _communication_lines(counted, trial.dtype)


def _communication_lines(counted: LayoutCommunication, dtype: str) -> Iterator[str]:
    """Counted bytes, and what the formula says at the configuration's own size."""
    yield from ["", f"{counted.name}: bytes of a step, all ranks"]
    rows = [(*key, *(_count_cell(*pair) for pair in of_models)) for key, of_models in counted.totals.items()]
    align = "ll" + "r" * len(counted.models)
    yield from table(("group", "collective", *counted.models), rows, align=align)
    sent = {model: sum(groups.values()) for model, groups in counted.sent_bytes.items()}
    shown = ", ".join(f"{model} {size / 2**20:,.1f} MiB" for model, size in sent.items())
    yield (
        f"The formula {'equals the count exactly' if counted.agrees else 'does NOT equal the count'}. At the "
        f"configuration's own size, in {dtype}, a rank of the busiest stage sends in a step, "
        f"by the formula: {shown}."
    )


def _count_cell(counted: Total, formula: Total) -> str:
    text = f"{counted.message_bytes:,} in {counted.calls}" if counted.calls else "-"
    return text if counted == formula else f"{text} (formula {formula.message_bytes:,} in {formula.calls})"


def _rows(result: ParityResult) -> Iterator[tuple[str, ...]]:
    noise = [_largest(differences) for differences in result.calibration.noise]
    reordered = [f"{max(values):.1e}" for values in zip(*noise, strict=True)]
    yield (
        f"{SINGLE}, {'reordered' if result.calibration.trial.dtype == 'fp32' else 'reordered or in fp32'}",
        "1",
        *reordered,
        "",
        "",
    )
    for layout in result.layouts:
        cells, closest = [""] * len(COLUMNS), ""
        if layout.differences is not None:
            cells = [f"{value:.1e}" for value in _largest(layout.differences)]
            closest = _closest(layout.differences, result.calibration.bounds)
        yield layout.name, str(layout.ranks), *cells, closest, layout.verdict


def _largest(differences: Differences) -> list[float]:
    kinds = {kind: max(differences.tensors[kind].values()) for kind in KINDS}
    return [differences.losses[0], kinds["outputs"], kinds["gradients"], max(differences.losses), kinds["weights"]]


def _closest(differences: Differences, bounds: Bounds) -> str:
    """Return the tensor that comes closest to its bound, or goes furthest beyond it."""
    share, kind, name = max(
        (difference / bounds.tensors[kind][name], kind, name)
        for kind in KINDS
        for name, difference in differences.tensors[kind].items()
        if name in bounds.tensors[kind]
    )
    return f"{f'{share:.0%}' if share < 10 else f'{share:.0e}x'} {kind.removesuffix('s')} {name}"


def as_json(result: ParityResult, config_file: str) -> bytes:
    """Return the whole result as a file of JSON, which has no number that is not finite: it is null."""
    return msgspec.json.format(msgspec.json.encode(as_values(result, config_file)), indent=1) + b"\n"


def as_values(result: ParityResult, config_file: str) -> dict[str, Any]:
    """Return the whole result as plain values."""
    small, trial, bounds = result.calibration.small, result.calibration.trial, result.calibration.bounds
    return {
        "megatron_fanformer": __version__,
        "megatron_core": version("megatron-core"),
        "torch": str(torch.__version__),  # a class of its own
        "python": platform.python_version(),
        "config": config_file,
        "device": trial.device,
        "dtype": trial.dtype,
        "steps": trial.steps,
        "model": dataclasses.asdict(small.model),
        "changes": list(small.changes),
        "global_batch_size": small.global_batch_size,
        "micro_batch_size": small.micro_batch_size,
        "bound_factor": FACTOR,
        "noise_runs": [_differences(noise) for noise in result.calibration.noise],
        "bounds": {"losses": bounds.losses, **bounds.tensors},
        "layouts": [_layout(layout) for layout in result.layouts],
        "communication": [_communication(counted) for counted in result.communication],
        "same": all(layout.is_same for layout in result.layouts),
    }


def _differences(differences: Differences) -> dict[str, Any]:
    return {"losses": differences.losses, **differences.tensors}


def _communication(counted: LayoutCommunication) -> dict[str, Any]:
    rows = [
        {
            "group": group,
            "collective": kind,
            **{
                model: {"counted": of_ranks._asdict(), "formula": formula._asdict()}
                for model, (of_ranks, formula) in zip(counted.models, of_models, strict=True)
            },
        }
        for (group, kind), of_models in counted.totals.items()
    ]
    return {
        "layout": counted.name,
        "agrees": counted.agrees,
        "rows": rows,
        "sent_bytes_at_full_size": counted.sent_bytes,
    }


def _layout(layout: LayoutResult) -> dict[str, Any]:
    values: dict[str, Any] = {"layout": layout.name, "ranks": layout.ranks, "verdict": layout.verdict}
    values["same"] = layout.is_same
    if layout.failure:
        values["failure"] = layout.failure
    if layout.findings:
        first = layout.findings[0]
        values["first_differing"] = dataclasses.asdict(first)
        gradients = [finding.name for finding in layout.findings if finding.kind == "gradient"]
        # Backward runs the other way: the last of them in forward order is where gradients began to go wrong.
        values["gradients_wrong_from"] = gradients[-1] if gradients else None
    if layout.differences is not None:
        largest = dict(zip(COLUMNS, _largest(layout.differences), strict=True))
        values |= {"largest": largest, "differences": _differences(layout.differences)}
    return values
