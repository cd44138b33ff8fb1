"""Stands in for `train --config FILE` in the tests of sweeps: a run's folder as the trainer leaves it, in milliseconds.

Its losses are those of a known power law, by the seed; it resumes from its checkpoint, and saves on a signal.
"""

import json
import math
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from megatron_fanformer.checkpoint.run_folder import CHECKPOINTS, CONFIG, MEGATRON_METADATA, METRICS, checkpoint_name

BASE_THAT_FAILS = 13  # the model.rotary_base of a run that diverges
USUAL_RATE = 0.01  # of tests that have one rate
PLANTED = 0.05 + 0.1 * math.log(2) ** 2  # FANformer's lead, each at its best rate


def save(run: Path, step: int) -> None:
    folder = run / CHECKPOINTS / checkpoint_name(step)
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    partial.mkdir(parents=True)
    for name in (CONFIG, MEGATRON_METADATA):
        (partial / name).write_text("{}")
    os.rename(partial, folder)


def newest(run: Path) -> int:
    return max((int(folder.name[5:]) for folder in (run / CHECKPOINTS).glob("step-*")), default=0)


def loss_at(values: dict[str, Any], step: int) -> float:
    size = values["model"]["hidden_size"]
    better = 0.05 if values["model"]["fan"]["placement"] != "none" else 0.0
    noise = random.Random(f"{values['training']['seed']} {size} {better} {step}").gauss(0, 1e-3)
    best_rate = 0.02 if better else 0.01
    off, off_at_usual = (math.log(rate / best_rate) ** 2 for rate in (values["optimizer"]["lr"], USUAL_RATE))
    return 0.1 * (off - off_at_usual) + 2.0 + 3.0 * size**-0.5 + math.exp(-step) - better + noise


def train(values: dict[str, Any], *, pause: float = 0.0, stop: Sequence[int] = ()) -> int:
    """A run of a configuration, or the rest of it; returns the exit code.

    Args:
        pause: seconds of a step.
        stop: is not empty once a signal came.
    """
    run = Path(values["training"]["run_dir"])
    run.mkdir(parents=True, exist_ok=True)
    data = {**values["data"], "num_workers": 0}  # as the trainer fills in what is left to the machine
    (run / CONFIG).write_text(yaml.safe_dump({**values, "data": data}))
    first = newest(run)
    metrics = run / METRICS
    kept = metrics.read_text().splitlines()[:first] if metrics.exists() else []
    metrics.write_text("".join(f"{line}\n" for line in kept))
    for step in range(first + 1, values["training"]["train_iters"] + 1):
        time.sleep(pause)
        entry = {"step": step, "loss": loss_at(values, step), "step_seconds": 0.5, "tokens": 64 * step}
        entry["validation_loss/held-out"] = entry["loss"]
        with metrics.open("a") as stream:
            stream.write(json.dumps(entry) + "\n")
        if stop or step % 4 == 0 or step == values["training"]["train_iters"]:
            save(run, step)
        if stop:
            return 5
    return 0


def main() -> int:
    values = yaml.safe_load(Path(sys.argv[-1]).read_text())
    if values["model"]["rotary_base"] == BASE_THAT_FAILS:
        print("megatron-fanformer: step 3: the loss is nan; lower optimizer.lr")
        return 4
    stop: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: stop.append(number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))
    return train(values, pause=0.01, stop=stop)


if __name__ == "__main__":
    sys.exit(main())
