"""Kills runs that copy their checkpoints to another store, and takes their folders away: they end as if nobody had.

    python -m tests.faults.mirror_kills --kills 50          # a folder, by file://
    python -m tests.faults.mirror_kills --kills 50 --s3     # moto's S3 server, in a process of its own

After each kill every checkpoint in the store is fetched and verified; half of the time the run's folder is removed.
"""

import argparse
import functools
import importlib.util
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from megatron_fanformer.checkpoint import run_folder
from megatron_fanformer.checkpoint.remote import RemoteRun
from megatron_fanformer.train.config import RunConfig, config_from_dict
from tests.patience import PATIENCE_SECONDS
from tests.small_runs import small_run, write_tokens

# torch, and what imports it, is imported by functions: the processes that copy import this module, too.
BUCKET = "checkpoints"
MISSING = [name for name in ("moto", "s3fs") if importlib.util.find_spec(name) is None]
needs_server = pytest.mark.skipif(bool(MISSING), reason=f"needs {' and '.join(MISSING)}: pip install moto[server] s3fs")


@contextmanager
def s3_server(folder: Path) -> Iterator[str]:
    """moto's S3 server with a bucket, whose URL this is; this process and its children use it by their environment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with (folder / "server.log").open("wb") as log:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        server = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{port}"
        os.environ["AWS_ACCESS_KEY_ID"] = os.environ["AWS_SECRET_ACCESS_KEY"] = "testing"
        os.environ["AWS_DEFAULT_REGION"] = "us-east-1"
        _wait_for(port)
        import s3fs

        s3fs.S3FileSystem().mkdir(BUCKET)
        yield f"s3://{BUCKET}"
    finally:
        server.kill()
        server.wait()


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def verified(url: str, folder: Path) -> int:
    """Fetch every checkpoint that a store publishes, which verifies it; how many there are."""
    remote = RemoteRun(url)
    names = remote.complete()
    for name in names:
        remote.fetch([name], folder, lambda _: None)
    shutil.rmtree(folder, ignore_errors=True)
    return len(names)


def campaign(layout: str, url: str, *, kills: int, seed: int, folder: Path) -> str:
    """Kill runs of a layout until there were that many kills; a line of figures.

    Raises:
        AssertionError: a run ended otherwise than one that nobody touched.
        CorruptError: a published checkpoint in the store does not verify.
    """
    from tests.faults.kills import LAYOUTS, STEPS, Moment, outcome_of, run_once

    ranks, parallel = LAYOUTS[layout]
    tokens = write_tokens(folder / "tokens")

    def configuration(name: str, **checkpoint: object) -> RunConfig:
        saved = {"save_interval": 1, "keep": 2, **checkpoint}
        training = {"train_iters": STEPS}
        return config_from_dict(
            small_run(tokens, folder / name, parallel=parallel, training=training, checkpoint=saved)
        )

    straight = configuration("straight")
    run_once(straight, ranks, None)
    expected = outcome_of(Path(straight.training.run_dir))
    timed = configuration("timed", mirror=f"{url}/mirror-timed", mirror_keep=2)
    started = time.monotonic()
    run_once(timed, ranks, None)
    seconds = time.monotonic() - started
    chance, done, runs, lost, seen = random.Random(seed), 0, 0, 0, 0
    while done < kills:
        name = f"killed-{runs}"
        mirror = f"{url}/mirror-{runs}"
        config = configuration(name, mirror=mirror, mirror_keep=2)
        run = Path(config.training.run_dir)
        while done < kills and not run_once(config, ranks, Moment(chance, seconds)):
            done += 1
            seen += verified(mirror, folder / "fetched")
            if chance.random() < 0.5:
                shutil.rmtree(run, ignore_errors=True)
                lost += 1
        run_once(config, ranks, None)
        assert outcome_of(run)[:2] == expected[:2], f"{layout}, run {runs}: ended otherwise"
        assert RemoteRun(mirror).candidates()[0] == run_folder.checkpoint_name(STEPS)
        seen += verified(mirror, folder / "fetched")
        runs += 1
    return (
        f"{layout}, {url.partition(':')[0]}: {done} kills in {runs} runs of {seconds:.1f} s, {lost} folders lost, "
        f"{seen} copies verified, every one ended the same"
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20, help="for each of two layouts (20)")
    parser.add_argument("--s3", action="store_true", help="on moto's S3 server")
    parser.add_argument("--seed", type=int, default=14)
    options = parser.parse_args()
    import torch

    from megatron_fanformer.runtime import device

    device.prepare_megatron(on_cpu=True)
    torch.set_num_threads(1)
    import megatron_fanformer.train.trainer  # noqa: F401  # before the forks

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with s3_server(folder) if options.s3 else nullcontext(f"file://{folder}") as url:
            for layout in ("one rank", "dp 2"):
                place = folder / layout.replace(" ", "-")
                place.mkdir()
                run = functools.partial(campaign, layout, f"{url}/{place.name}", kills=options.kills, seed=options.seed)
                print(run(folder=place), flush=True)


if __name__ == "__main__":
    main()
