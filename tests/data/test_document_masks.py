"""Documents within samples: marked where the token files have their bounds, in the order that samples have anyway."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_fanformer.data.batches import micro_batches
from megatron_fanformer.data.config import DataConfig
from megatron_fanformer.data.origins import sample_spans
from megatron_fanformer.data.survey import survey_data
from megatron_fanformer.errors import InputError
from tests.data.test_datasets import SEQ_LENGTH
from tests.data.token_making import VOCAB_SIZE, build, random_ids, write_manifest
from tests.token_pairs import write_token_pair

EOD = 0  # in the manifests of `write_manifest`; `random_ids` never draws it
LENGTHS = [1, 2, 5, 17, 64, 65, 130, 3, 40, 1, 1, 90, 33, 128] * 3
SAMPLES = 60  # several epochs
ALL = {"reset_attention_mask": True, "reset_position_ids": True, "eod_mask_loss": True}


def documents() -> list[list[np.ndarray]]:
    """Of LENGTHS tokens with the end of text; long ones in two sequences, as other tools write them."""
    whole = [np.append(random_ids(length - 1, seed=number), EOD) for number, length in enumerate(LENGTHS)]
    return [np.split(document, [30]) if len(document) > 60 else [document] for document in whole]


def write_source(folder: Path, kind: str) -> list[str]:
    prefix = write_token_pair(folder / "pair", documents())
    np.concatenate([sequence for document in documents() for sequence in document]).astype("<u2").tofile(
        folder / "flat.npy"
    )
    for name in ("pair", "flat"):
        write_manifest(str(folder / name), dtype="uint16", max_token_id=VOCAB_SIZE - 1)
    flat = str(folder / "flat.npy")
    return {"pair": [prefix], "npy": [flat], "both": ["1", prefix, "2", flat]}[kind]


@pytest.mark.parametrize("kind", ["pair", "npy", "both"])
def test_documents_are_those_of_the_token_files_and_nothing_else_changes(tmp_path: Path, kind: str) -> None:
    source = write_source(tmp_path, kind)
    config = DataConfig(train_data=source, valid_data={"v": source})
    plain = build(config, train_samples=SAMPLES).train
    indices = sorted(tmp_path.rglob("*"))
    datasets = build(DataConfig(train_data=source, valid_data={"v": source}, **ALL), train_samples=SAMPLES)
    marked = datasets.train
    assert sorted(tmp_path.rglob("*")) == indices  # the cached order of samples is the same, and was used
    assert "document_ids" in datasets.valid["v"][0]
    ends = np.cumsum(LENGTHS)
    sequences = np.cumsum([len(sequence) for document in documents() for sequence in document])
    several = 0
    for number in range(SAMPLES):
        ours, theirs = marked[number], plain[number]
        assert all(torch.equal(ours[name], theirs[name]) for name in ("tokens", "labels"))
        spans = sample_spans(marked, number)
        assert spans == sample_spans(plain, number)
        places, numbers = [], []
        for span in spans:
            own = np.arange(span.first_token, span.first_token + span.length)
            places.append(own)
            numbers.append(np.searchsorted(sequences if span.prefix.endswith("pair") else ends, own, side="right"))
        place, document = np.concatenate(places)[:SEQ_LENGTH], np.concatenate(numbers)[:SEQ_LENGTH]
        changes = np.append(0, (np.diff(document) != 0) | (np.diff(place) != 1))  # an epoch may repeat a document
        assert ours["document_ids"].tolist() == np.cumsum(changes).tolist()
        first = [int(np.flatnonzero(ours["document_ids"] == each)[0]) for each in ours["document_ids"]]
        assert ours["position_ids"].tolist() == (np.arange(SEQ_LENGTH) - first).tolist()
        at_end = np.isin(place + 1, ends)
        assert ours["loss_mask"].tolist() == (theirs["loss_mask"].numpy() * ~at_end).tolist()
        several += len(set(document))
    assert several > 2 * SAMPLES


def test_a_batch_has_what_is_asked_for(tmp_path: Path) -> None:
    source = write_source(tmp_path, "pair")

    def batch_of(**fields: Any) -> dict[str, torch.Tensor]:
        dataset = build(DataConfig(train_data=source, **fields)).train
        places = {"data_parallel_rank": 0, "data_parallel_size": 1}
        return next(micro_batches(dataset, consumed_samples=0, micro_batch_size=3, **places))

    plain = batch_of()
    within = batch_of(reset_attention_mask=True)
    assert within.pop("document_ids").dtype == torch.int32
    assert all(torch.equal(within[name], plain[name]) for name in plain) and plain.keys() == within.keys()
    masked = batch_of(eod_mask_loss=True)
    assert masked.keys() == plain.keys() and masked["loss_mask"].sum() < plain["loss_mask"].sum()
    assert torch.equal(masked["position_ids"], plain["position_ids"])


def test_the_id_that_ends_documents_is_known_or_refused(tmp_path: Path, olmo_tokenizer_file: Path) -> None:
    """By the manifest, else by the tokenizer; one for all."""
    (prefix,) = write_source(tmp_path, "pair")
    bare = write_token_pair(tmp_path / "bare", [[random_ids(40)]])
    tokenizer = str(olmo_tokenizer_file)
    assert survey_data(DataConfig(train_data=[prefix], tokenizer=tokenizer, **ALL)).eod_id == EOD
    assert survey_data(DataConfig(train_data=[bare], tokenizer=tokenizer, **ALL)).eod_id == 50279  # <|endoftext|>
    assert survey_data(DataConfig(train_data=[bare])).eod_id is None  # nobody asks for it
    with pytest.raises(InputError, match=r"bare has no manifest that says which id ends a document.*set data\.token"):
        survey_data(DataConfig(train_data=[bare], eod_mask_loss=True))
    both = DataConfig(train_data=[prefix], valid_data={"v": [bare]}, tokenizer=tokenizer, reset_attention_mask=True)
    with pytest.raises(InputError, match=r"end with ids 0 \(.*pair\.manifest\.json\) and 50279 \(.*\), which must be"):
        survey_data(both)


def test_positions_begin_anew_only_where_attention_does() -> None:
    *_, problem = DataConfig(reset_position_ids=True).problems()
    assert problem.startswith("data.reset_position_ids: true without data.reset_attention_mask")
