"""The check of a run's token files, and copies of those on other stores: whole or not there, once for a node."""

import os
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from megatron_fanformer.data import check, remote_files
from megatron_fanformer.data.blends import PART_NAMES, split_bounds
from megatron_fanformer.data.check import CheckedData, check_files
from megatron_fanformer.data.config import DataConfig
from megatron_fanformer.data.datasets import build_datasets
from megatron_fanformer.data.fingerprint import fingerprint_data
from megatron_fanformer.data.manifest import ChatSettings
from megatron_fanformer.data.token_files import CHECKED_ENTRIES, read_index
from megatron_fanformer.errors import CorruptError, InputError
from tests.chat_pairs import write_chats
from tests.data.failing_stores import Plan, planned
from tests.data.test_blends import SPLITS
from tests.data.test_remote_files import assert_equal, config_of, folder, items
from tests.data.token_making import VOCAB_SIZE, write_manifest, write_npy, write_pair


@pytest.mark.parametrize("block", [7, CHECKED_ENTRIES])
@pytest.mark.parametrize("split", SPLITS)
def test_the_tokens_of_parts_are_counted_as_the_index_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: str, block: int
) -> None:
    monkeypatch.setattr("megatron_fanformer.data.token_files.CHECKED_ENTRIES", block)
    prefix = write_pair(tmp_path / "samples", [[20 + number] for number in range(40)])
    facts = check_files(DataConfig(train_data=[prefix], split=split)).pairs[prefix]
    lengths = read_index(prefix).lengths
    for number, bounds in enumerate(split_bounds(split)):
        if bounds is None:
            assert number not in facts.part_tokens
        else:
            begin, end = (round(bound * 40) for bound in bounds)
            assert facts.part_tokens[number] == lengths[begin:end].sum()
    assert (facts.sequences, facts.tokens, len(PART_NAMES)) == (40, lengths.sum(), 3)


def test_ids_that_manifests_state_are_checked_at_the_start(tmp_path: Path) -> None:
    """Also of files on other stores; those without a manifest are checked as they are read."""
    unread, stated = write_npy(tmp_path / "unread.npy", 100), write_npy(tmp_path / "stated.npy", 90)
    pair = write_pair(tmp_path / "pair", [[90], [80]])
    write_manifest(str(tmp_path / "stated"), dtype="uint16", max_token_id=5_000)
    write_manifest(pair, dtype="uint16", max_token_id=6_000)
    for wrong, largest in ((stated, 5_000), (pair, 6_000), (f"file://{stated}", 5_000)):
        config = DataConfig(train_data=[unread, wrong], cache_path=str(tmp_path / "cache"))
        with pytest.raises(InputError, match=f"token id {largest}, outside the vocabulary of 600"):
            check_files(config, 600)


def test_a_file_that_changes_during_a_run_is_named(tmp_path: Path) -> None:
    paths = [write_npy(tmp_path / f"{name}.npy", 100) for name in "ab"]
    checked_data = check_files(DataConfig(train_data=paths))
    checked_data.refuse_changed_files()
    os.utime(paths[1], (1, 1))
    with pytest.raises(CorruptError, match=r"b\.npy has changed since the run began; put it back and resume"):
        checked_data.refuse_changed_files()


def test_chats_of_one_run_have_one_template(tmp_path: Path) -> None:
    """Those of training and of validation, or none that is known."""

    def chats(name: str, template: str | None, eos_token: str = "</s>") -> str:
        prefix = write_chats(tmp_path / name, [([5, 6], [False, True])])
        if template is not None:
            stated: dict[str, Any] = {"template": template, "template_variables": {"eos_token": eos_token}}
            settings = ChatSettings(**stated, learn="all", max_tokens=None, too_long="cut", pad_id=None)
            write_manifest(prefix, dtype="uint16", max_token_id=6, chat=settings)
        return prefix

    def template_of(train: list[str], *valid: str) -> str | None:
        sets = {str(number): [prefix] for number, prefix in enumerate(valid)}
        return check_files(DataConfig(format="sft", train_data=train, valid_data=sets)).chat_template

    first, alike, unknown = chats("first", "a"), chats("alike", "a"), chats("unknown", None)
    assert template_of([first, unknown], unknown, alike) == template_of([first])
    assert template_of([unknown], first) is None
    for other in (chats("another", "b"), chats("of other tokens", "a", "<eos>")):
        for train, *valid in ([[first, other]], [[first], alike, other], [[unknown], first, other]):
            with pytest.raises(InputError, match=f"^{first} and {other} were prepared with different chat templates"):
                template_of(train, *valid)


# -- copies of files on other stores


__all__ = ["folder"]  # a fixture


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_files, "PAUSES_SECONDS", (0.01,) * 40)


def check_copied(place: str, tmp_path: Path, blend: str = "mixed", **fields: Any) -> tuple[DataConfig, CheckedData]:
    stated = {"staging_path": str(tmp_path / "copies"), **fields}
    config = config_of(place, tmp_path / "cache", blend, **stated)
    return config, check_files(config, VOCAB_SIZE, for_run=True)


def copies(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "copies").glob("[!.]*/[!.]*"))


@pytest.mark.parametrize("blend", ["npy", "weights", "mixed", "blend"])
def test_samples_and_identity_are_those_of_the_local_files(blend: str, folder: Path, tmp_path: Path) -> None:
    local = config_of(folder, tmp_path / "cache", blend)
    wanted = fingerprint_data(local, check_files(local, VOCAB_SIZE))
    plan = Plan(0.2, seed=3)
    with planned(folder, plan) as url:
        config, checked_data = check_copied(url, tmp_path, blend)
        sizes = {"seq_length": 64, "train_samples": 40, "valid_samples": 4, "seed": 1}
        built = build_datasets(config, **sizes, vocab_size=VOCAB_SIZE, eod_id=0, data=checked_data)
        assert_equal([built.train[number] for number in range(40)], items(local))
        found = fingerprint_data(config, checked_data)
    assert found == wanted and plan.faults


def test_what_is_there_is_not_copied_again(folder: Path, tmp_path: Path) -> None:
    plan = Plan()
    with planned(folder, plan) as url:
        check_copied(url, tmp_path)
        assert copies(tmp_path) == ["first.bin", "first.idx", "first.manifest.json", "one.manifest.json", "one.npy"]
        plan.requests = 0
        check_copied(url, tmp_path)
        assert plan.requests == 3 + 2, "a look-up of each file, and its manifest"


def test_copies_that_were_cut_off_are_made_good(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped in the middle of the second file; what is whole by then is not requested again."""
    monkeypatch.setattr(check, "COPYING_THREADS", 1)
    copied: list[str] = []

    def stopped(file: remote_files.RemoteFile, path: Path) -> None:
        copied.append(path.name)
        if len(copied) == 2:
            raise KeyboardInterrupt
        remote_files.copy_to(file, path)

    with planned(folder) as url:
        with monkeypatch.context() as patch:
            patch.setattr(check, "copy_to", stopped)
            with pytest.raises(KeyboardInterrupt):
                check_copied(url, tmp_path)
        assert not list((tmp_path / "copies").glob(f"*/{copied[1]}"))
        check_copied(url, tmp_path)
        for name in ("first.bin", "first.idx", "one.npy"):
            (copy,) = (tmp_path / "copies").glob(f"*/{name}")
            assert copy.read_bytes() == (folder / name).read_bytes()


def test_a_disk_without_room_is_an_input_error(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10, 9, 1))
    with planned(folder) as url, pytest.raises(InputError, match="room for 1 bytes, and the run's token files need"):
        check_copied(url, tmp_path)
    assert not copies(tmp_path)


def test_a_new_version_is_another_copy(folder: Path, tmp_path: Path) -> None:
    with planned(folder) as url:
        check_copied(url, tmp_path, "npy")
        write_npy(folder / "one.npy", 3000, seed=9)
        write_manifest(str(folder / "one"), dtype="uint16", max_token_id=VOCAB_SIZE - 1)
        _, checked_data = check_copied(url, tmp_path, "npy")
        path = Path(checked_data.train.sources[0].paths[0])
        assert path.name == "one.npy" and path.read_bytes() == (folder / "one.npy").read_bytes()
