"""What is found of token files in one pass, and what follows from it for megatron-core."""

import os
from pathlib import Path

import pytest

from megatron_fanformer.data.blends import PART_NAMES, split_bounds
from megatron_fanformer.data.config import DataConfig
from megatron_fanformer.data.manifest import ChatSettings
from megatron_fanformer.data.sample_counts import TRAIN, VALIDATION, SampleCounts
from megatron_fanformer.data.survey import survey_data
from megatron_fanformer.data.token_files import CHECKED_ENTRIES, read_index
from megatron_fanformer.errors import CorruptError, InputError
from tests.chat_pairs import write_chats
from tests.data.test_blends import SPLITS
from tests.data.token_making import write_manifest, write_npy, write_pair


@pytest.mark.parametrize("block", [7, CHECKED_ENTRIES])
@pytest.mark.parametrize("split", SPLITS)
def test_the_tokens_of_parts_are_counted_as_the_index_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: str, block: int
) -> None:
    monkeypatch.setattr("megatron_fanformer.data.token_files.CHECKED_ENTRIES", block)
    prefix = write_pair(tmp_path / "samples", [[20 + number] for number in range(40)])
    facts = survey_data(DataConfig(train_data=[prefix], split=split)).pairs[prefix]
    lengths = read_index(prefix).lengths
    for number, bounds in enumerate(split_bounds(split)):
        if bounds is None:
            assert number not in facts.part_tokens
        else:
            begin, end = (round(bound * 40) for bound in bounds)
            assert facts.part_tokens[number] == lengths[begin:end].sum()
    assert (facts.sequences, facts.tokens, len(PART_NAMES)) == (40, lengths.sum(), 3)


def test_each_file_is_looked_at_once_however_often_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = write_pair(tmp_path / "samples", [[90], [80]])
    npy = write_npy(tmp_path / "a.npy", 100)
    seen: list[str] = []

    def read(prefix: str, parts: dict[int, tuple[float, float]], **named: object) -> object:
        seen.append(prefix)
        return read_index(prefix, parts)

    monkeypatch.setattr("megatron_fanformer.data.survey.read_index", read)
    config = DataConfig(train_data=["1", prefix, "1", npy], valid_data={"a": [prefix], "b": [prefix, npy]})
    survey = survey_data(config, 600)
    assert seen == [prefix]
    assert (list(survey.pairs), list(survey.npy_files), survey.cache) == ([prefix], [npy], tmp_path / ".index_cache")


def test_a_part_without_documents_is_told_of_the_part_that_is_drawn_alone(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "samples", [[90], [80]])
    counts = SampleCounts(survey_data(DataConfig(train_data=[prefix], split="1,1,0")), 16)
    blend = survey_data(DataConfig(train_data=[prefix])).train
    assert counts.of_pairs(blend, {TRAIN: 3, VALIDATION: 2}, is_split=True)[1] == [3, 2, 0]
    config = DataConfig(train_data=[prefix], split="99,1,0")
    with pytest.raises(InputError, match="none is left for validation"):
        SampleCounts(survey_data(config), 16).check(config, train_samples=3, valid_samples=2)


def test_ids_that_manifests_state_are_checked_at_the_start(tmp_path: Path) -> None:
    """Also of files on other stores; those without a manifest are checked as they are read."""
    unread, stated = write_npy(tmp_path / "unread.npy", 100), write_npy(tmp_path / "stated.npy", 90)
    pair = write_pair(tmp_path / "pair", [[90], [80]])
    write_manifest(str(tmp_path / "stated"), dtype="uint16", max_token_id=5_000)
    write_manifest(pair, dtype="uint16", max_token_id=6_000)
    for wrong, largest in ((stated, 5_000), (pair, 6_000), (f"file://{stated}", 5_000)):
        config = DataConfig(train_data=[unread, wrong], cache_path=str(tmp_path / "cache"))
        with pytest.raises(InputError, match=f"token id {largest}, outside the vocabulary of 600"):
            survey_data(config, 600)


def test_a_file_that_changes_during_a_run_is_named(tmp_path: Path) -> None:
    paths = [write_npy(tmp_path / f"{name}.npy", 100) for name in "ab"]
    survey = survey_data(DataConfig(train_data=paths))
    survey.refuse_changed_files()
    os.utime(paths[1], (1, 1))
    with pytest.raises(CorruptError, match=r"b\.npy has changed since the run began; put it back and resume"):
        survey.refuse_changed_files()


def test_chats_of_one_run_have_one_template(tmp_path: Path) -> None:
    """Those of training and of validation, or none that is known."""

    def chats(name: str, template: str | None, eos_token: str = "</s>") -> str:
        prefix = write_chats(tmp_path / name, [([5, 6], [False, True])])
        if template is not None:
            variables = {"eos_token": eos_token}
            settings = ChatSettings(
                template=template,
                template_variables=variables,
                learn="all",
                max_tokens=None,
                too_long="cut",
                pad_id=None,
            )
            write_manifest(prefix, dtype="uint16", max_token_id=6, chat=settings)
        return prefix

    def template_of(train: list[str], **valid: list[str]) -> str | None:
        config = DataConfig(format="sft", train_data=train, valid_data=valid, cache_path=str(tmp_path / "cache"))
        return survey_data(config).chat_template

    one, alike, unknown = chats("one", "a"), chats("alike", "a"), chats("unknown", None)
    others = [chats("another", "b"), chats("of other tokens", "a", "<eos>")]
    assert template_of([one, unknown], first=[unknown, alike]) == template_of([one])
    assert template_of([unknown], first=[one]) is None
    for other in others:
        for first, train, valid in (
            (one, [one, other], {}),
            (one, [one], {"first": [alike], "second": [other]}),
            (one, [unknown], {"first": [one], "second": [other]}),
        ):
            with pytest.raises(InputError, match=f"^{first} and {other} were prepared with different chat templates"):
                template_of(train, **valid)
