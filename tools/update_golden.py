"""Record the golden losses anew for this kind of machine, and print the differences: `python tools/update_golden.py`.

For a change that is meant to move the losses; its commit message says why. `--check` only prints the differences.
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from megatron_fanformer.runtime import device, megatron_cpu

device.hide_gpus()
device.quieten_libraries()
megatron_cpu.install()

from megatron_fanformer.runtime.rank_pool import RankPool  # noqa: E402
from tests.golden.measuring import CASES, Losses, machine_kind, measure, record, recorded  # noqa: E402


def main() -> int:
    """Measure every case, print the differences and record the losses; return 1 if --check finds a difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="record nothing; exit 1 if a loss differs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, RankPool() as pool:
        measured = {case: measure(pool, Path(folder) / str(number), case) for number, case in enumerate(CASES)}
    print(machine_kind())
    before = recorded().get(machine_kind(), {})
    differs = [case for case in measured if _print_difference(case, before, measured)]
    if options.check:
        return int(bool(differs))
    record(measured)
    return 0


def _print_difference(case: str, before: Losses, measured: Losses) -> bool:
    """Print how a case's losses differ from the recorded ones, and return whether they do."""
    if case not in before:
        print(f"{case}: new; ends at {measured[case][-1]:.6f}")
        return True
    pairs = list(zip(before[case], measured[case], strict=True))
    steps = [step for step, (old, new) in enumerate(pairs, 1) if old != new]
    if not steps:
        print(f"{case}: unchanged")
        return False
    largest = max(abs(new - old) / abs(old) for old, new in pairs)
    print(f"{case}: differs from step {steps[0]} on, by up to {largest:.1e} relative; ends at {measured[case][-1]:.6f}")
    return True


if __name__ == "__main__":
    sys.exit(main())
