"""Kills runs at random moments until they are over, and compares how they end with a run that nobody touched.

    python -m tests.faults.test_kills --kills 1000

Every second kill is aimed at a save: it comes at a random moment after one has begun.

Runs are forked from this process, which has imported what they need: a start takes a tenth of a second, not ten.
"""

import argparse
import contextlib
import functools
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from megatron_fanformer.checkpoint import run_folder
from megatron_fanformer.checkpoint.stored_files import check_stored
from megatron_fanformer.runtime import device
from megatron_fanformer.train.config import RunConfig, config_from_dict
from megatron_fanformer.train.metrics import read_metrics
from tests.patience import PATIENCE_SECONDS
from tests.small_runs import ROOT, free_port, small_run, write_tokens

STEPS = 10

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "dp 2": (2, {"data_parallel_size": 2, "use_distributed_optimizer": True}),
}


class Outcome(NamedTuple):
    """How a run ended, after all its starts."""

    numbers: list[tuple[Any, ...]]
    """Of each step."""
    state: str
    """SHA-256 of all tensors of the last checkpoint."""


def random_moment(generator: random.Random, seconds: float) -> Callable[[], bool]:
    """Whether a random moment has come, within some seconds from now; to be called again and again."""
    end = time.monotonic() + generator.uniform(0, seconds)
    return lambda: time.monotonic() >= end


def moment_of_a_save(generator: random.Random, seconds: float, checkpoints: Path) -> Callable[[], bool]:
    """The same, within some seconds of the beginning of a save, one of the next three."""
    known, saves_before = set(checkpoints.glob("*.tmp")), generator.randrange(3)  # their names are unique
    moments: list[Callable[[], bool]] = []

    def is_reached() -> bool:
        begun = set(checkpoints.glob("*.tmp")) - known
        known.update(begun)
        moments.extend(random_moment(generator, seconds) for _ in begun)
        return len(moments) > saves_before and moments[saves_before]()

    return is_reached


def run_once(config: RunConfig, ranks: int, moment: Callable[[], bool] | None) -> bool:
    """Start a run, and kill all its ranks at a moment, if there is one; whether it came to its end."""
    port = free_port()
    children = [_forked(functools.partial(_train, config, rank, ranks, port)) for rank in range(ranks)]
    deadline = time.monotonic() + PATIENCE_SECONDS
    codes: dict[int, int] = {}
    while len(codes) < ranks and time.monotonic() < deadline and not (moment and moment()):
        for child in children:
            if child not in codes and (ended := os.waitpid(child, os.WNOHANG))[0]:
                codes[child] = os.waitstatus_to_exitcode(ended[1])
        time.sleep(0.001)
    for child in children:
        if child not in codes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)  # the writers of its checkpoints, too
            os.waitpid(child, 0)
    if moment is None and set(codes.values()) != {0}:
        raise AssertionError(f"a run that nobody touched ended with {codes}")
    return len(codes) == ranks and set(codes.values()) == {0}


def _forked(function: Callable[[], None]) -> int:
    child = os.fork()
    if child:
        return child
    os.setpgid(0, 0)
    code = 1
    try:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        function()
        code = 0
    finally:
        os._exit(code)


def _train(config: RunConfig, rank: int, ranks: int, port: int) -> None:
    from megatron_fanformer.runtime.parallel import distributed
    from megatron_fanformer.train.trainer import Trainer

    address = device.RankAddress(
        rank=rank,
        world_size=ranks,
        local_rank=rank,
        local_world_size=ranks,
        master_address="localhost",
        master_port=port,
    )
    with distributed(config.parallel, address if ranks > 1 else None, config.runtime) as grid:
        trainer = Trainer(config, grid)
        trainer.train()
        trainer.close()


def killed_to_the_end(config: RunConfig, ranks: int, generator: random.Random, seconds: float, kills: int) -> int:
    """Start a run again and again, each time killed; the last start is left alone. Returns the number of kills.

    Args:
        seconds: that the run takes if it is left alone.
    """
    checkpoints, done = Path(config.training.run_dir) / run_folder.CHECKPOINTS, 0
    while done < kills:
        aimed = moment_of_a_save(generator, seconds / STEPS, checkpoints)
        if run_once(config, ranks, random_moment(generator, seconds) if done % 2 else aimed):
            break
        done += 1
    run_once(config, ranks, None)
    return done


def outcome_of(run: Path) -> Outcome:
    """How the run in a folder ended, whose checkpoints are all found sound."""
    for checkpoint in run_folder.complete_checkpoints(run):
        check_stored(checkpoint)
    last = run_folder.latest_checkpoint(run)
    assert last is not None and run_folder.step_of(last) == STEPS
    return Outcome([(m["step"], m["loss"], m["grad_norm"]) for m in read_metrics(run)], _digest(last))


def _digest(checkpoint: Path) -> str:
    """Of every tensor, the optimizer's too, by name; not of the files, in which tensors stand in any order."""
    from megatron_fanformer.checkpoint.full_tensors import StoredTensors
    from megatron_fanformer.checkpoint.stored_files import read_table

    stored = StoredTensors(checkpoint, read_table(checkpoint))
    digest = hashlib.sha256()
    for name in sorted(stored.described):
        tensor = stored.read(name)
        digest.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def campaign(layout: str, *, async_save: bool, kills: int, seed: int, folder: Path) -> str:
    """Kill runs of a layout until there were that many kills; a line of figures.

    Raises:
        AssertionError: a run ended otherwise than one that nobody touched, or left a checkpoint that does not verify.
    """
    ranks, parallel = LAYOUTS[layout]
    tokens = write_tokens(folder / "tokens")

    def configuration(name: str) -> RunConfig:
        values = small_run(
            tokens,
            folder / name,
            parallel=parallel,
            training={"train_iters": STEPS},
            checkpoint={"save_interval": 1, "keep": 3, "async_save": async_save},
        )
        return config_from_dict(values)

    straight = configuration("straight")
    run_once(straight, ranks, None)
    started = time.monotonic()
    shutil.rmtree(straight.training.run_dir)
    run_once(straight, ranks, None)  # again, for the time, and to show that it ends the same
    seconds = time.monotonic() - started
    expected = outcome_of(Path(straight.training.run_dir))
    generator, done, runs = random.Random(seed), 0, 0
    while done < kills:
        config = configuration(f"killed-{runs}")
        done += killed_to_the_end(config, ranks, generator, seconds, kills - done)
        assert outcome_of(Path(config.training.run_dir)) == expected, f"{layout}, run {runs}: ended otherwise"
        shutil.rmtree(config.training.run_dir)
        runs += 1
    how = "asynchronous" if async_save else "synchronous"
    return f"{layout}, {how} saves: {done} kills in {runs} runs of {seconds:.1f} s, every one ended the same"


@pytest.mark.full
@pytest.mark.timeout(1_800)
def test_killed_runs_end_as_if_nobody_had_touched_them() -> None:
    """In a process of its own, of which the runs are forks."""
    command = [sys.executable, "-m", "tests.faults.test_kills", "--kills", "40"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("every one ended the same") == 2 * len(LAYOUTS)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=60, help="in all, spread over layouts and kinds of saves (60)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    device.prepare_megatron(on_cpu=True)
    torch.set_num_threads(1)
    import megatron_fanformer.train.trainer  # noqa: F401  # before the forks

    cases = [(layout, async_save) for layout in LAYOUTS for async_save in (False, True)]
    for number, (layout, async_save) in enumerate(cases):
        with tempfile.TemporaryDirectory() as folder:
            kills = options.kills // len(cases) + (number < options.kills % len(cases))
            seed = options.seed + number
            print(campaign(layout, async_save=async_save, kills=kills, seed=seed, folder=Path(folder)), flush=True)


if __name__ == "__main__":
    sys.exit(main())
