"""The check of a run's token files."""

import os
from pathlib import Path
from typing import Any

import pytest

from megatron_fanformer.data.blends import PART_NAMES, split_bounds
from megatron_fanformer.data.check import check_files
from megatron_fanformer.data.config import DataConfig
from megatron_fanformer.data.manifest import ChatSettings
from megatron_fanformer.data.token_files import read_index
from megatron_fanformer.errors import CorruptError, InputError
from tests.chat_pairs import write_chats
from tests.data.test_blends import SPLITS
from tests.data.token_making import write_manifest, write_npy, write_pair


@pytest.mark.parametrize("split", SPLITS)
def test_the_tokens_of_parts_are_counted_as_the_index_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: str
) -> None:
    monkeypatch.setattr("megatron_fanformer.data.token_files.CHECKED_ENTRIES", 7)
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


def test_the_template_of_chats_is_that_of_the_first_to_train_on(tmp_path: Path) -> None:
    first, unknown, other = (
        write_chats(tmp_path / name, [([5, 6], [False, True])]) for name in ("first", "unknown", "other")
    )
    for prefix, template in ((first, "a"), (other, "b")):
        stated: dict[str, Any] = {"template": template, "template_variables": {"eos_token": "</s>"}}
        settings = ChatSettings(**stated, learn="all", max_tokens=None, too_long="cut", pad_id=None)
        write_manifest(prefix, dtype="uint16", max_token_id=6, chat=settings)

    def read_standalone_template(*train: str) -> str | None:
        return check_files(DataConfig(format="sft", train_data=list(train), valid_data={"v": [other]})).chat_template

    assert read_standalone_template(unknown, first, other) == '{% set eos_token = "</s>" %}\na'
    assert read_standalone_template(unknown) is None
