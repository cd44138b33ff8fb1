"""The report of a layout that diverges."""

import json
import math
from types import SimpleNamespace
from typing import Any, cast

from megatron_fanformer.parity.comparison import KINDS, Bounds, Differences, Finding
from megatron_fanformer.parity.report import as_json
from megatron_fanformer.parity.run import Calibration, LayoutResult, ParityResult
from tests.tiny import tiny_model


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


def result_with(loss: float, gradient: float) -> ParityResult:
    """A result of one layout, of which these two differ from one process."""

    def differences(*losses: float, gradient: float = 0.0) -> Differences:
        values = {"outputs": 0.0, "gradients": gradient, "weights": 0.0}
        return Differences(losses=list(losses), tensors={kind: {"norm": values[kind]} for kind in KINDS})

    bounds = Bounds(losses=[1e-6] * 2, tensors={kind: {"norm": 1e-6} for kind in KINDS})
    found = differences(0.0, loss, gradient=gradient)
    layout = LayoutResult(name="tp=2", ranks=2, differences=found, findings=tuple(bounds.findings(found)))
    calibration: Any = SimpleNamespace(
        small=SimpleNamespace(model=tiny_model(), changes=[], global_batch_size=2, micro_batch_size=1),
        trial=SimpleNamespace(device="cpu", dtype="fp32", steps=2),
        noise=[differences(0.0, 0.0)],
        bounds=bounds,
    )
    return ParityResult(calibration=cast(Calibration, calibration), layouts=[layout], communication=[])


def test_what_is_not_finite_is_null_in_the_report() -> None:
    result = result_with(loss=math.nan, gradient=math.inf)
    assert result.layouts[0].findings[0] == Finding("gradient", "norm", math.inf, 1e-6)
    [layout] = json.loads(as_json(result, "config.yaml"), parse_constant=refuse)["layouts"]
    assert layout["verdict"] == "differs first in the gradient of norm (inf, bound 1.0e-06)"
    assert layout["first_differing"] == {"kind": "gradient", "name": "norm", "difference": None, "bound": 1e-6}
    assert layout["differences"] == {
        "losses": [0.0, None],
        "outputs": {"norm": 0.0},
        "gradients": {"norm": None},
        "weights": {"norm": 0.0},
    }
