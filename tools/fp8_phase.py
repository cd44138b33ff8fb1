"""What FP8 does to a FANformer's phases: small models trained in bf16 and in FP8, compared, and their phases measured.

    python tools/fp8_phase.py                                 # docs/fp8-phase.md says what comes out
    python tools/fp8_phase.py --seeds 1 --steps 50 --output runs/short

Trained are a FANformer in bf16, in FP8 with its FAN map in bf16, and in FP8 altogether, and the Transformer of the same
width in bf16 and in FP8; and the FANformer in bf16 once more by other layers, whose roundings differ, for comparison.
They run on a GPU that has FP8, else by tests/engine_on_cpu, on one core. Written are a JSON file with every number, and
two figures. A training that is in the output folder already is not repeated.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from fp8_study.pictures import errors_picture, losses_picture
from fp8_study.tables import tables
from fp8_study.trainings import ARMS, FAN_ALL_FP8, Arm, Size, run_values, train, write_corpus

from megatron_fanformer.durable_files import write_atomically
from megatron_fanformer.runtime import device as devices
from megatron_fanformer.runtime.rank_pool import RankPool
from tests.engine_on_cpu import installing

TRAINING_SECONDS = 7200  # a training that takes longer is stuck
RECIPES = ("tensorwise", "delayed", "blockwise")


def main() -> int:
    """Train, measure, and write the JSON file, the figures and the tables."""
    options = _options()
    size = Size(**{name: getattr(options, name) for name in Size._fields})
    folder: Path = options.output.resolve()
    corpus = folder / f"corpus-{size.vocab_size}"
    write_corpus(corpus, size.vocab_size)
    has_fp8 = not any(map(devices.fp8_problem, {options.recipe, *options.other_recipes}))
    with _pool(has_fp8) as pool:
        results = [
            _result(pool, arm, size, recipe=recipe, seed=seed, corpus=corpus, folder=folder)
            for arm, recipe, seed in _plan(options)
        ]
    device = torch.cuda.get_device_name() if has_fp8 else "tests/engine_on_cpu"
    report = {"size": size._asdict(), "recipe": options.recipe, "device": device, "trainings": results}
    write_atomically(folder / "fp8-phase.json", json.dumps(report) + "\n")
    write_atomically(folder / "fp8-phase-loss.png", losses_picture(report))
    write_atomically(folder / "fp8-phase-errors.png", errors_picture(report))
    print(tables(report))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("runs/fp8-phase"), metavar="FOLDER")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="trainings of each kind")
    parser.add_argument("--recipe", choices=RECIPES, default="tensorwise", help="where FP8's scales come from")
    parser.add_argument(
        "--other-recipes", nargs="*", choices=RECIPES, default=[], help="train the FANformer all in FP8 with these, too"
    )
    for name, default in Size._field_defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default, metavar="N")
    return parser.parse_args()


def _plan(options: argparse.Namespace) -> list[tuple[Arm, str, int]]:
    """All arms with one seed, then with the next: what is there after an interruption can be compared."""
    plan = [(arm, options.recipe, seed) for seed in range(options.seeds) for arm in ARMS]
    return plan + [(FAN_ALL_FP8, recipe, 0) for recipe in options.other_recipes]


def _pool(has_fp8: bool) -> RankPool:
    """One rank on a GPU that has FP8, or on the stand-in for one."""
    if has_fp8:
        return RankPool("cuda", TRAINING_SECONDS)
    devices.hide_gpus()
    return RankPool("cuda", TRAINING_SECONDS, backend="gloo", prepare=installing.install)


def _result(
    pool: RankPool, arm: Arm, size: Size, *, recipe: str, seed: int, corpus: Path, folder: Path
) -> dict[str, Any]:
    name = "-".join([*arm.name.lower().replace(",", "").split(), *([recipe] if arm.fp8 else []), str(seed)])
    file, run = folder / "results" / f"{name}.json", folder / "trainings" / name
    values = run_values(arm, size, recipe=recipe, seed=seed, corpus=corpus, run=run)
    identity = {"arm": arm.name, "recipe": recipe if arm.fp8 else None, "seed": seed}
    if file.exists() and (before := json.loads(file.read_text())).pop("values") == values:
        return {**before, **identity}
    shutil.rmtree(run, ignore_errors=True)
    print(name, flush=True)
    (trained,) = pool.run(1, train, values)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps({"values": values, **trained}) + "\n")
    return {**trained, **identity}


if __name__ == "__main__":
    sys.exit(main())
