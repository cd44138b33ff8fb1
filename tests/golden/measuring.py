"""The losses of twenty steps of one small configuration in each layout, which a refactor must not move.

They are kept in `losses.json` by kind of machine: where processor, torch and megatron-core are the same, so is every
bit.
"""

import io
import json
import platform
from contextlib import redirect_stdout
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from megatron_fanformer.model.layouts import layout_fields
from megatron_fanformer.runtime.rank_pool import RankPool
from megatron_fanformer.train.config import config_from_dict
from megatron_fanformer.train.metrics import read_metrics
from tests.small_runs import small_run, trainer_of, write_tokens

FILE = Path(__file__).parent / "losses.json"
STEPS = 20

Losses = dict[str, list[float]]

LAYOUTS = {
    "one process": "",
    "tp2": "tp=2",
    "tp2 sp": "tp=2,sp=true",
    "tp2 sp, FAN sequence": "tp=2,sp=true,fan=sequence",
    "pp2": "pp=2",
    "pp2 vpp2": "pp=2,vpp=2",
    "cp2": "cp=2",
    "dp2": "dp=2,distributed_optimizer=false",
    "dp2, distributed optimizer, overlap": "dp=2,overlap=true,ddp_bucket_size=10000",
    "recompute full": "recompute=full",
}
MODELS: dict[str, dict[str, Any]] = {
    "": {},
    ", qk_and_v": {"fan": {"placement": "qk_and_v"}},
    ", ffn": {"fan": {"placement": "ffn"}},
    ", no FAN": {"fan": {"placement": "none"}},
}
CASES = {
    **{layout: (layout, "") for layout in LAYOUTS},
    **{layout + model: (layout, model) for layout in ("one process", "tp2") for model in MODELS if model},
}


def machine_kind() -> str:
    """What the last bit of a loss depends on, besides the code."""
    return (
        f"{_processor()}, torch {torch.__version__.split('+')[0]}, megatron-core {version('megatron-core')}, "
        f"Python {platform.python_version_tuple()[0]}.{platform.python_version_tuple()[1]}"
    )


def _processor() -> str:
    """Its name and generation (virtual ones share names), and what PyTorch uses of its instructions."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in reversed(lines))}
    name = facts.get("model name", platform.processor()).partition(" @ ")[0]  # a clock moves no bit
    generation = f"family {facts.get('cpu family')} model {facts.get('model')}"
    instructions = torch.backends.cpu.get_cpu_capability()
    if instructions == "AVX2" and "avx512f" in facts.get("flags", "").split():
        instructions += ", though it has AVX512"  # by ATEN_CPU_CAPABILITY, which libraries beside PyTorch do not read
    return f"{name}, {generation} ({instructions})"


def recorded() -> dict[str, Losses]:
    """The losses in the file, by kind of machine and case."""
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def record(measured: Losses) -> None:
    """Put this kind of machine's losses into the file."""
    losses = {**recorded(), machine_kind(): measured}
    lines = ",\n".join(
        f" {json.dumps(kind)}: {{\n"
        + ",\n".join(f"  {json.dumps(case)}: {json.dumps(values)}" for case, values in cases.items())
        + "\n }"
        for kind, cases in sorted(losses.items())
    )
    FILE.write_text("{\n" + lines + "\n}\n")


def measure(pool: RankPool, folder: Path, case: str, steps: int = STEPS) -> list[float]:
    """The losses of a case, or the first of them, trained in a folder of its own by the whole trainer."""
    layout, model = CASES[case]
    folder.mkdir(parents=True)
    values = small_run(
        write_tokens(folder / "tokens"),
        folder / "run",
        model={"num_layers": 4, **MODELS[model]},
        parallel=layout_fields(LAYOUTS[layout]),
        optimizer={"lr": 3e-3},
        schedule={"lr_decay_iters": STEPS},
        training={"train_iters": STEPS},
    )
    parallel = config_from_dict(values).parallel
    pool.run(parallel.model_parallel_size * parallel.resolve_data_parallel_size(None), _train, values, steps)
    return [metrics["loss"] for metrics in read_metrics(folder / "run")]


def _train(values: dict[str, Any], steps: int) -> None:
    with redirect_stdout(io.StringIO()), trainer_of(values) as trainer:
        for _ in range(steps):
            trainer.take_step()
