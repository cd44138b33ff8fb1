"""Simulates sweeps of three arms, and counts how often their primary comparisons show, with an effect and without.

    python tools/sweep_power.py                        # five seeds, effects of 0 to 4 standard deviations
    python tools/sweep_power.py --seeds 3 --draws 1000

The losses are random numbers; the decision is that of `sweep … report`. An effect is what FANformer's loss lies below
the other arms', in standard deviations of the difference of two runs of one seed.
"""

import argparse
import random
from pathlib import Path

from megatron_fanformer.experiments.sweeps.cells import Group
from megatron_fanformer.experiments.sweeps.comparisons import comparisons, findings
from megatron_fanformer.experiments.sweeps.config import SweepConfig
from megatron_fanformer.experiments.sweeps.file import Sweep, read_sweep

ROOT = Path(__file__).resolve().parents[1]
EFFECTS = (0.0, 1.0, 1.5, 2.0, 3.0, 4.0)
SPREAD = 0.02  # nats, of an arm's loss about its seed's: only its ratio to the effect matters
OF_SEEDS = 0.1  # nats, between seeds: pairing takes it out


def main() -> None:
    """Print a row for each effect."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--draws", type=int, default=10_000, help="sweeps for each effect")
    options = parser.parse_args()
    sweep = read_sweep(ROOT / "examples" / "sweeps" / "claim-30m.yaml", needs_data=False)
    print("| effect | any primary comparison shows | both show |\n|--:|--:|--:|")
    for effect in EFFECTS:
        generator = random.Random(1)
        shown = [shows(sweep, planted(sweep.config, generator, effect, options.seeds)) for _ in range(options.draws)]
        print(f"| {effect:g} | {share(map(any, shown))} | {share(map(all, shown))} |")


def share(outcomes: "map[bool]") -> str:
    """Return how many of them are true."""
    found = list(outcomes)
    return f"{sum(found) / len(found):.1%}"


def planted(config: SweepConfig, generator: random.Random, effect: float, seeds: int) -> list[Group]:
    """Return losses of all arms, each at a rate of its own."""
    of_seed = {seed: generator.gauss(3.0, OF_SEEDS) for seed in range(seeds)}
    lead = effect * SPREAD * 2**0.5
    return [
        Group(
            {"arm": arm, "lr": generator.choice(list(config.axes["lr"]))},
            None,  # type: ignore[arg-type]  # no run has been
            {seed: mean + generator.gauss(0, SPREAD) - lead * (arm == "fanformer") for seed, mean in of_seed.items()},
        )
        for arm in config.axes["arm"]
    ]


def shows(sweep: Sweep, groups: list[Group]) -> list[bool]:
    """Return what the primary comparisons of a sweep show."""
    steps = sweep.cells[0].config.training.steps
    found = findings(sweep.config, comparisons(sweep.config, groups), steps=steps)
    return [bool(each.shows) for each in found if not each.exploratory]


if __name__ == "__main__":
    main()
