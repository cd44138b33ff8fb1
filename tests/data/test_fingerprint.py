"""Changes of the data that a resumed run refuses, and those that it does not notice."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from megatron_fanformer.data.check import check_files
from megatron_fanformer.data.config import DataConfig
from megatron_fanformer.data.fingerprint import (
    BLOCK_BYTES,
    BLOCKS,
    DataFingerprint,
    file_fingerprint,
    fingerprint_data,
    fingerprint_from_plain,
    resumed_fingerprint,
)
from megatron_fanformer.data.sample_counts import SampleCounts
from megatron_fanformer.errors import CorruptError, InputError
from tests.data.token_making import build, drawn, write_npy, write_pair

DOCUMENTS = [[300 + 10 * number] for number in range(12)]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder of two pairs of the same lengths and a .npy file."""
    folder = tmp_path / "data"
    folder.mkdir()
    write_pair(folder / "a", DOCUMENTS)
    write_pair(folder / "b", DOCUMENTS, seed=500)
    write_npy(folder / "c.npy", 1000)
    return folder


def identify(folder: Path, train: str = "1 a 3 b", split: str | None = None, **valid: str) -> DataFingerprint:
    def words(text: str) -> list[str]:
        return [word if word.replace(".", "").isdigit() else str(folder / word) for word in text.split()]

    sets = {name: words(text) for name, text in valid.items()}
    config = DataConfig(train_data=words(train), valid_data=sets, split=split)
    return fingerprint_data(config, check_files(config))


def refusal(before: DataFingerprint, present: DataFingerprint, allowed: tuple[str, ...] = ()) -> str:
    """The error of a resume with `present` data; empty if there is none."""
    before = (
        fingerprint_from_plain(msgspec.json.decode(msgspec.json.encode(before.as_plain())), Path("step")) or present
    )
    try:
        resumed_fingerprint(before, present, step=5, allowed=allowed, run="runs/a")
    except InputError as error:
        return str(error)
    return ""


def test_a_copy_with_other_times_is_the_same_data(data: Path, tmp_path: Path) -> None:
    before = identify(data, "1 a 3 b", v="c.npy")
    copy = Path(shutil.copytree(data, tmp_path / "copy"))
    for file in copy.iterdir():
        os.utime(file, (1, 1))
    assert refusal(before, identify(copy, "0.25 a 0.75 b", v="c.npy")) == ""  # proportions count


def flip(file: Path, place: int = 100) -> None:
    """Change a file under its name, its size and its time."""
    times = file.stat()
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def after_flipping(data: Path, name: str) -> DataFingerprint:
    flip(data / name)
    return identify(data, v="c.npy")


def with_other_lengths(data: Path) -> DataFingerprint:
    write_pair(data / "b", [[301], [309], *DOCUMENTS[2:]], seed=500)
    return identify(data, v="c.npy")


CHANGES: dict[str, tuple[Callable[[Path], DataFingerprint], str]] = {
    "bin replaced": (
        lambda data: after_flipping(data, "b.bin"),
        "data.train_data is not what the run in runs/a has used so far (",
    ),
    "npy replaced": (lambda data: after_flipping(data, "c.npy"), "data.valid_data.v is not"),
    "lengths": (with_other_lengths, "other files, weights or split"),
    "order": (lambda data: identify(data, "1 b 3 a", v="c.npy"), "other files"),
    "weights": (lambda data: identify(data, "1 a 2 b", v="c.npy"), "other files"),
    "other": (lambda data: identify(data, "1 a 3 c.npy", v="c.npy"), "other files"),
    "split": (lambda data: identify(data, split="90,10"), "other files"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_each_change_is_refused_in_one_line_and_allowed_by_name(data: Path, name: str) -> None:
    change, message = CHANGES[name]
    before = identify(data, v="c.npy")
    present = change(data)
    line = refusal(before, present)
    assert message in line and len(line.splitlines()) == 1
    changed = "v" if "valid_data" in message else "train"
    assert f"data.allow_change, as [{changed}]" in line
    assert refusal(before, present, allowed=(changed,)) == ""
    assert refusal(before, present, allowed=("v" if changed == "train" else "train",)) == line


def test_every_changed_set_has_its_line_and_sets_that_come_and_go_have_none(data: Path) -> None:
    before = identify(data, v="b", w="c.npy", x="a")
    flip(data / "b.bin")
    flip(data / "c.npy")
    lines = refusal(before, identify(data, v="b", w="c.npy", y="a")).splitlines()
    assert [line.split()[0] for line in lines] == ["data.train_data", "data.valid_data.v", "data.valid_data.w"]


def test_a_large_files_fingerprint_reads_blocks_from_end_to_end(tmp_path: Path) -> None:
    size = 3 * BLOCKS * BLOCK_BYTES
    file = tmp_path / "large.bin"
    file.write_bytes(bytes(size))
    before = file_fingerprint(file)
    for place in (0, (size - BLOCK_BYTES) // (BLOCKS - 1), size - 1):
        flip(file, place)
        assert file_fingerprint(file) != before
        flip(file, place)
    assert file_fingerprint(file) == before
    file.write_bytes(bytes(size + 1))
    assert file_fingerprint(file) != before


@pytest.mark.parametrize("values", [[], {"train": 3}, {"valid": {}}])
def test_an_identity_that_is_none_is_corrupt(values: Any) -> None:
    with pytest.raises(CorruptError, match="step-1 holds no fingerprint of data"):
        fingerprint_from_plain(values, Path("step-1"))


# -- how the order of samples depends on their number


@pytest.mark.parametrize("blend", ["a", "a b", "1 a 3 b", "a c.npy", "1 c.npy 1 a"])
def test_the_order_is_the_same_for_any_number_of_samples_that_repeats_no_pair(data: Path, blend: str) -> None:
    """And it changes with the number where one is repeated, else there were no reason to refuse that."""
    words = [str(data / word) if word[0] in "abc" else word for word in blend.split()]
    config = DataConfig(train_data=words)
    counts = SampleCounts(check_files(config), 64)

    def order(samples: int) -> list[Any]:
        return list(drawn(build(config, samples).train, 30))

    numbers = (30, 45, 60, 66, 100, 130, 250)
    repeats = {n: counts.repeats_pairs(config, train_samples=n) for n in numbers}
    assert (repeats[30], repeats[250]) == (False, True)
    first = order(30)
    same = {n: all(map(torch.equal, first, order(n))) for n in numbers}
    assert all(same[n] for n in numbers if not repeats[n])
    assert not same[250]


def test_near_the_end_of_an_epoch_a_pair_counts_as_repeated(data: Path) -> None:
    """megatron-core asks for half a percent more of each source of a blend, and rounds up twice."""
    config = DataConfig(train_data=["1", str(data / "a"), "1", str(data / "b")])
    checked_data = check_files(config)
    counts = SampleCounts(checked_data, 64)
    epoch = min(int(counts.source_epoch_samples(source)) for source in checked_data.train.sources)
    repeats = {n: counts.repeats_pairs(config, train_samples=n) for n in range(1, 2 * epoch + 4)}
    first = min(n for n in repeats if repeats[n])
    assert first < 2 * epoch and first / 2 * 1.005 + 3 > epoch >= (first - 1) / 2 * 1.005 + 3
