"""Damage to the files of a checkpoint: none of it goes unseen, wherever it is."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_fanformer.checkpoint import run_folder
from megatron_fanformer.checkpoint.manifest import MANIFEST
from megatron_fanformer.checkpoint.stored_files import check_stored
from megatron_fanformer.errors import CorruptError
from megatron_fanformer.train.config import config_from_dict
from megatron_fanformer.train.preflight import find_start
from tests.small_runs import small_run, write_tokens
from tests.train.test_trainer import train

Damage = Callable[[bytes, random.Random], bytes]


@pytest.fixture(scope="module")
def values(run_on_ranks: Callable[..., list[Any]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run of two ranks with two checkpoints, that refuses to go on from the earlier one."""
    folder = tmp_path_factory.mktemp("trained")
    values = small_run(
        write_tokens(folder / "tokens"),
        folder / "run",
        parallel={"data_parallel_size": 2},
        training={"train_iters": 6},
        checkpoint={"save_interval": 3},
        recovery={"use_earlier_checkpoint": False},
    )
    run_on_ranks(2, train, values)
    return values


def checkpoints(values: dict[str, Any]) -> tuple[Path, Path]:
    earlier, latest = run_folder.complete_checkpoints(Path(values["training"]["run_dir"]))
    return earlier, latest


def refusal(values: dict[str, Any]) -> str | None:
    """What a run says that is started here: before its ranks are, and when they load."""
    try:
        start = find_start(config_from_dict(values), 2)
        assert start.resumed is not None
        check_stored(start.resumed)  # what `load_training_state` begins with, on all ranks together
    except CorruptError as error:
        return str(error)
    return None


def flipped(content: bytes, generator: random.Random) -> bytes:
    at = generator.randrange(len(content))
    return content[:at] + bytes([content[at] ^ 1 << generator.randrange(8)]) + content[at + 1 :]


def cut_off(content: bytes, generator: random.Random) -> bytes:
    return content[: generator.randrange(len(content))]


def unseen_damage(values: dict[str, Any], damage: Damage, count: int) -> list[str]:
    """Damage files in turn, one at a time, in proportion to their number; the cases that are not refused by name."""
    _, latest = checkpoints(values)
    files = sorted(file for file in latest.iterdir() if file.name != MANIFEST and file.stat().st_size)
    generator, unseen = random.Random(count), []
    for number in range(count):
        file = files[number % len(files)]
        sound = file.read_bytes()
        spoiled = damage(sound, generator)
        if spoiled == sound:
            continue
        file.write_bytes(spoiled)
        message = refusal(values)
        if message is None or str(file) not in message or "\n" in message:
            unseen.append(f"{file.name}: {message}")
        file.write_bytes(sound)
    return unseen


@pytest.mark.parametrize(
    ("damage", "count"),
    [(flipped, 60), (cut_off, 15), pytest.param(flipped, 10_000, marks=pytest.mark.full)],
)
def test_no_damage_goes_unseen(values: dict[str, Any], damage: Damage, count: int) -> None:
    assert refusal(values) is None
    assert unseen_damage(values, damage, count) == []
    assert refusal(values) is None


def test_a_file_of_another_step_does_not_pass(values: dict[str, Any], tmp_path: Path) -> None:
    earlier, latest = checkpoints(values)
    for file in sorted(latest.iterdir()):
        other = earlier / file.name
        if other.read_bytes() == file.read_bytes():
            continue
        shutil.copy(file, tmp_path / file.name)
        shutil.copy(other, file)
        assert str(latest) in (refusal(values) or "")
        shutil.copy(tmp_path / file.name, file)
    assert refusal(values) is None
