import itertools
from pathlib import Path
from typing import Any

import pytest

from megatron_fanformer.data.config import DataConfig
from megatron_fanformer.data.origins import Span, sample_spans
from tests.data.token_making import build, raw_tokens, write_npy, write_pair

SEQ_LENGTH = 32
SAMPLES = 300


@pytest.fixture
def names(tmp_path: Path) -> dict[str, str]:
    """Two pairs, the first with documents of several sequences, and two .npy files."""
    documents = [[5 + number, 40, 3] for number in range(30)]
    return {
        "a": write_pair(tmp_path / "a", [*documents, [], [900]]),
        "b": write_pair(tmp_path / "b", [[1500], [70]], seed=500),
        "x": write_npy(tmp_path / "x.npy", 1000, seed=600),
        "y": write_npy(tmp_path / "y.npy", 777, seed=700),
    }


def assert_spans_are_the_tokens(dataset: Any) -> set[str]:
    """Of all samples, over several epochs; returns the prefixes met."""
    met: set[str] = set()
    for index in range(len(dataset)):
        spans, item = sample_spans(dataset, index), dataset[index]
        raw = [token for span in spans for token in raw_tokens(span.prefix, span.first_token, span.length)]
        is_npy = not item["loss_mask"][-1]
        assert raw == item["tokens"].tolist() + ([] if is_npy else [int(item["labels"][-1])])
        met.update(span.prefix for span in spans)
    return met


@pytest.mark.parametrize(
    "blend", ["a", "a b", "x", "x y", "1 a 2 b", "1 x 3 y", "1 a 2 x 1 y", "a x b y"], ids=lambda blend: blend
)
def test_the_spans_hold_the_samples_tokens(names: dict[str, str], blend: str) -> None:
    dataset = build(
        DataConfig(train_data=[names.get(word, word) for word in blend.split()]), SAMPLES, 20, seq_length=SEQ_LENGTH
    ).train
    assert len(dataset) >= SAMPLES
    expected = {names[word].removesuffix(".npy") for word in blend.split() if word in names}
    assert assert_spans_are_the_tokens(dataset) == expected


def test_the_spans_of_a_split_hold_its_samples_tokens(names: dict[str, str]) -> None:
    datasets = build(DataConfig(train_data=[names["a"], names["b"]], split="60,40"), SAMPLES, 20, seq_length=SEQ_LENGTH)
    for dataset in (datasets.train, *datasets.valid.values()):
        assert_spans_are_the_tokens(dataset)


def test_the_spans_of_a_validation_set_hold_its_samples_tokens(names: dict[str, str]) -> None:
    config = DataConfig(train_data=[names["a"]], valid_data={"mixed": [names["b"], names["x"]]})
    assert len(assert_spans_are_the_tokens(build(config, SAMPLES, 20, seq_length=SEQ_LENGTH).valid["mixed"])) == 2


def test_runs_that_follow_each_other_are_one_span(tmp_path: Path) -> None:
    """Of four documents of 20 tokens, shuffled over many epochs, some come to stand in the file's own order."""
    prefix = write_pair(tmp_path / "short", [[20]] * 4)
    dataset = build(DataConfig(train_data=[prefix]), SAMPLES, 20, seq_length=SEQ_LENGTH).train
    samples = [sample_spans(dataset, index) for index in range(len(dataset))]
    assert max(span.length for spans in samples for span in spans) > 20
    for spans in samples:
        assert all(one.first_token + one.length != two.first_token for one, two in itertools.pairwise(spans))


def test_a_sample_of_npy_files_is_one_span(tmp_path: Path) -> None:
    dataset = build(
        DataConfig(train_data=[write_npy(tmp_path / "a.npy", 2 * SEQ_LENGTH)]), SAMPLES, 20, seq_length=SEQ_LENGTH
    ).train
    spans = {span for index in range(2) for span in sample_spans(dataset, index)}
    assert spans == {Span(str(tmp_path / "a"), first, SEQ_LENGTH) for first in (0, SEQ_LENGTH)}
