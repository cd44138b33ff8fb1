"""Samples of .npy files in the authors' order, the tokens that samples are made of, and the marks of documents."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_fanformer.data.check import check_files
from megatron_fanformer.data.config import DataConfig
from megatron_fanformer.data.samples import NpyDataset, Span, sample_spans
from megatron_fanformer.data.token_files import open_npy_files
from megatron_fanformer.errors import InputError
from tests.data.token_making import VOCAB_SIZE, build, random_ids, raw_tokens, write_manifest, write_npy, write_pair
from tests.token_pairs import write_token_pair

SEQ_LENGTH = 8
SEED = 6198
TOKENS = (9_001, 5, 8_000, 3_207)  # of each file: with a tail, without a whole sample, without a tail
SAMPLES = sum(tokens // SEQ_LENGTH for tokens in TOKENS)


# -- .npy files


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    return [write_npy(tmp_path / f"{number}.npy", tokens, seed=number) for number, tokens in enumerate(TOKENS)]


@pytest.mark.parametrize("epoch", [0, 1, 7])
def test_the_samples_of_an_epoch_are_those_of_numpys_own_shuffle(paths: list[str], epoch: int) -> None:
    numbers = np.arange(SAMPLES, dtype=np.uint32)
    np.random.Generator(np.random.PCG64(SEED + epoch)).shuffle(numbers)
    raw = [
        file[first : first + SEQ_LENGTH].tolist()
        for file in (np.fromfile(path, "<u2") for path in paths)
        for first in range(0, len(file) - SEQ_LENGTH + 1, SEQ_LENGTH)
    ]
    assert len(raw) == SAMPLES
    files = open_npy_files(paths, "uint16")
    dataset = NpyDataset(files, seq_length=SEQ_LENGTH, seed=SEED, vocab_size=VOCAB_SIZE, samples=8 * SAMPLES)
    drawn = [dataset[epoch * SAMPLES + position]["tokens"].tolist() for position in range(SAMPLES)]
    assert drawn == [raw[number] for number in numbers]
    for outside in (-1, 8 * SAMPLES):
        with pytest.raises(IndexError):
            dataset[outside]


# -- where a sample's tokens are in the token files

SPAN_LENGTH, SPAN_SAMPLES = 32, 300


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


def spans_of(dataset: Any) -> list[list[Span]]:
    """The spans of all samples, over several epochs, whose tokens are compared with the raw files."""
    all_spans = []
    for index in range(len(dataset)):
        spans, item = sample_spans(dataset, index), dataset[index]
        raw = [token for span in spans for token in raw_tokens(span.prefix, span.first_token, span.length)]
        is_npy = not item["loss_mask"][-1]
        assert raw == item["tokens"].tolist() + ([] if is_npy else [int(item["labels"][-1])])
        assert torch.equal(item["labels"][:-1], item["tokens"][1:]) and item["loss_mask"][:-1].all()
        assert item["position_ids"].tolist() == list(range(SPAN_LENGTH))
        all_spans.append(spans)
    return all_spans


@pytest.mark.parametrize(
    "blend", ["a", "a b", "x", "x y", "1 a 2 b", "1 x 3 y", "1 a 2 x 1 y", "a x b y"], ids=lambda blend: blend
)
def test_the_spans_hold_the_samples_tokens(names: dict[str, str], blend: str) -> None:
    words = [names.get(word, word) for word in blend.split()]
    dataset = build(DataConfig(train_data=words), SPAN_SAMPLES, 20, seq_length=SPAN_LENGTH).train
    assert len(dataset) >= SPAN_SAMPLES
    met = {span.prefix for spans in spans_of(dataset) for span in spans}
    assert met == {names[word].removesuffix(".npy") for word in blend.split() if word in names}


def test_runs_that_follow_each_other_are_one_span(tmp_path: Path) -> None:
    """Of four documents of 20 tokens, shuffled over many epochs, some come to stand in the file's own order."""
    prefix = write_pair(tmp_path / "short", [[20]] * 4)
    samples = spans_of(build(DataConfig(train_data=[prefix]), SPAN_SAMPLES, 20, seq_length=SPAN_LENGTH).train)
    assert max(span.length for spans in samples for span in spans) > 20
    for spans in samples:
        assert all(one.first_token + one.length != two.first_token for one, two in itertools.pairwise(spans))


# -- documents within samples: marked where the token files have their bounds, in the order that samples have anyway

EOD = 0  # in the manifests of `write_manifest`; `random_ids` never draws it
LENGTHS = [1, 2, 5, 17, 64, 65, 130, 3, 40, 1, 1, 90, 33, 128] * 3
MARKED_LENGTH, MARKED_SAMPLES = 64, 60  # several epochs
ALL = {"reset_attention_mask": True, "eod_mask_loss": True}


def documents() -> list[list[np.ndarray]]:
    """Of LENGTHS tokens with the end of text; long ones in two sequences, as other tools write them."""
    whole = [np.append(random_ids(length - 1, seed=number), EOD) for number, length in enumerate(LENGTHS)]
    return [np.split(document, [30]) if len(document) > 60 else [document] for document in whole]


def write_source(folder: Path, kind: str) -> list[str]:
    prefix = write_token_pair(folder / "pair", documents())
    ids = np.concatenate([sequence for document in documents() for sequence in document])
    ids.astype("<u2").tofile(folder / "flat.npy")
    for name in ("pair", "flat"):
        write_manifest(str(folder / name), dtype="uint16", max_token_id=VOCAB_SIZE - 1)
    flat = str(folder / "flat.npy")
    return {"pair": [prefix], "npy": [flat], "both": ["1", prefix, "2", flat]}[kind]


@pytest.mark.parametrize("kind", ["pair", "npy", "both"])
def test_documents_are_those_of_the_token_files_and_nothing_else_changes(tmp_path: Path, kind: str) -> None:
    source = write_source(tmp_path, kind)
    plain = build(DataConfig(train_data=source, valid_data={"v": source}), train_samples=MARKED_SAMPLES).train
    indices = sorted(tmp_path.rglob("*"))
    datasets = build(DataConfig(train_data=source, valid_data={"v": source}, **ALL), train_samples=MARKED_SAMPLES)
    marked = datasets.train
    assert sorted(tmp_path.rglob("*")) == indices  # the cached order of samples is the same, and was used
    assert "document_ids" in datasets.valid["v"][0]
    ends = np.cumsum(LENGTHS)
    sequences = np.cumsum([len(sequence) for document in documents() for sequence in document])
    several = 0
    for number in range(MARKED_SAMPLES):
        ours, theirs = marked[number], plain[number]
        assert all(torch.equal(ours[name], theirs[name]) for name in ("tokens", "labels", "position_ids"))
        spans = sample_spans(marked, number)
        assert spans == sample_spans(plain, number)
        places, numbers = [], []
        for span in spans:
            tokens = np.arange(span.first_token, span.first_token + span.length)
            places.append(tokens)
            numbers.append(np.searchsorted(sequences if span.prefix.endswith("pair") else ends, tokens, side="right"))
        place, document = np.concatenate(places)[:MARKED_LENGTH], np.concatenate(numbers)[:MARKED_LENGTH]
        changes = np.append(0, (np.diff(document) != 0) | (np.diff(place) != 1))  # an epoch may repeat a document
        assert ours["document_ids"].tolist() == np.cumsum(changes).tolist()
        at_end = np.isin(place + 1, ends)
        assert ours["loss_mask"].tolist() == (theirs["loss_mask"].numpy() * ~at_end).tolist()
        several += len(set(document))
    assert several > 2 * MARKED_SAMPLES


def test_only_the_marks_that_are_set_are_made(tmp_path: Path) -> None:
    source = write_source(tmp_path, "pair")
    plain, within, masked = (
        build(DataConfig(train_data=source, **fields)).train[0]
        for fields in ({}, {"reset_attention_mask": True}, {"eod_mask_loss": True})
    )
    assert within.keys() - plain.keys() == {"document_ids"} and torch.equal(within["loss_mask"], plain["loss_mask"])
    assert masked.keys() == plain.keys() and masked["loss_mask"].sum() < plain["loss_mask"].sum()


def test_the_id_that_ends_documents_is_known_or_refused(tmp_path: Path, olmo_tokenizer_file: Path) -> None:
    """By the manifest, else by the tokenizer; one for all."""
    (prefix,) = write_source(tmp_path, "pair")
    bare = write_token_pair(tmp_path / "bare", [[random_ids(40)]])
    tokenizer = str(olmo_tokenizer_file)
    assert check_files(DataConfig(train_data=[prefix], tokenizer=tokenizer, **ALL)).eod_id == EOD
    assert check_files(DataConfig(train_data=[bare], tokenizer=tokenizer, **ALL)).eod_id == 50279  # <|endoftext|>
    assert check_files(DataConfig(train_data=[bare])).eod_id is None  # not needed
    with pytest.raises(InputError, match=r"bare has no manifest that says which id ends a document.*set data\.token"):
        check_files(DataConfig(train_data=[bare], eod_mask_loss=True))
    both = DataConfig(train_data=[prefix], valid_data={"v": [bare]}, tokenizer=tokenizer, reset_attention_mask=True)
    with pytest.raises(InputError, match=r"end with ids 0 \(.*pair\.manifest\.json\) and 50279 \(.*\), which must be"):
        check_files(both)
