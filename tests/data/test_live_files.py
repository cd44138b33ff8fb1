"""Data overwritten while a run reads them: what is read of indices and ids is what was checked, or an error."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_fanformer.data.blends import parse_chats
from megatron_fanformer.data.chat_dataset import ChatDataset
from megatron_fanformer.data.config import DataConfig
from megatron_fanformer.data.live_files import BLOCK_BYTES, SummedFile, block_sums, block_sums_of_file
from megatron_fanformer.data.packing import Conversations
from megatron_fanformer.data.token_files import INDEX_HEADER
from megatron_fanformer.errors import CorruptError
from megatron_fanformer.evaluation.config import PerplexityConfig
from megatron_fanformer.evaluation.perplexity_sets import find_sets
from tests.chat_pairs import write_chats
from tests.data.token_making import VOCAB_SIZE, build, write_manifest, write_npy, write_pair

SEQ_LENGTH = 64
SAMPLES = 40
LENGTHS = [200 + number for number in range(30)]
FOREIGN = 60_000


def read(dataset: Any) -> torch.Tensor:
    items = [dataset[number] for number in range(SAMPLES)]
    return torch.stack([torch.cat([item["tokens"], item["labels"]]) for item in items])


def overwrite(path: Path, change: Callable[[np.ndarray], Any], *, first: int = 0, dtype: str = "u1") -> None:
    """In place, as a program does that opens the file and writes into it."""
    values = np.memmap(path, dtype, mode="r+", offset=first)
    values[:] = change(values.copy())
    values.flush()


# -- a part of a file, by its sums


@pytest.mark.parametrize("size", [1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES - 5])
def test_what_is_read_is_what_was_summed(tmp_path: Path, size: int) -> None:
    content = np.random.default_rng(size).bytes(100 + size + 50)
    (path := tmp_path / "file").write_bytes(content)
    part = content[100 : 100 + size]
    file = SummedFile(path, block_sums(part), first=100, size=size)
    spans = [(0, size), (0, 1), (size - 1, size), (size // 2, size), (max(0, BLOCK_BYTES - 3), size)]
    for begin, end in spans:
        assert file.read(max(0, end - begin), min(begin, size - 1))[: end - begin] == part[begin:end]
    assert block_sums_of_file(path, blocks_at_once=1).tolist() == block_sums(content).tolist()
    overwrite(path, lambda values: np.where(np.arange(len(values)) == 100 + size - 1, values ^ 1, values))
    with pytest.raises(CorruptError, match=f"{path} has been overwritten since it was checked"):
        file.read(1, size - 1)
    with pytest.raises(CorruptError, match="overwritten"):
        file.read(size, 0)
    if size > BLOCK_BYTES:
        assert file.read(7, 0) == part[:7]  # of a block that is as it was


# -- a pair's index


def of_pointers(change: Callable[[np.ndarray], Any]) -> Callable[[str], None]:
    return lambda prefix: overwrite(
        Path(f"{prefix}.idx"),
        lambda values: np.concatenate([change(values[: len(LENGTHS)]), values[len(LENGTHS) :]]),
        first=INDEX_HEADER.size + 4 * len(LENGTHS),
        dtype="<i8",
    )


@pytest.mark.parametrize(
    "spoil",
    [
        of_pointers(lambda pointers: np.full_like(pointers, -1)),
        of_pointers(np.zeros_like),
        of_pointers(lambda pointers: np.roll(pointers, 1)),
        of_pointers(lambda pointers: pointers + 2),
        of_pointers(lambda pointers: pointers // 4 * 4),  # every document begins where another token does, or there
    ],
    ids=["ones", "zeros", "rolled", "shifted", "rounded"],
)
def test_an_index_overwritten_during_a_run_is_an_error(tmp_path: Path, spoil: Callable[[str], None]) -> None:
    prefix = write_pair(tmp_path / "samples", [[length] for length in LENGTHS])
    train = build(DataConfig(train_data=[prefix]), SAMPLES, None).train
    read(train)
    spoil(prefix)
    for number in range(SAMPLES):
        with pytest.raises(CorruptError, match=f"{prefix}.idx has been overwritten since it was checked"):
            train[number]


# -- sample indices


@pytest.mark.parametrize("index", ["document_index", "sample_index", "shuffle_index"])
def test_a_sample_index_overwritten_during_a_run_is_an_error(tmp_path: Path, index: str) -> None:
    prefix = write_pair(tmp_path / "samples", [[length] for length in LENGTHS])
    config = DataConfig(train_data=[prefix])
    built = read(build(config, SAMPLES, None).train)  # writes the indices; the next one reads them
    train = build(config, SAMPLES, None).train
    assert torch.equal(read(train), built)
    (file,) = tmp_path.glob(f".index_cache/*/*-train-{index}.npy")
    overwrite(file, lambda values: np.concatenate([values[:128], values[128:][::-1]]))
    with pytest.raises(CorruptError, match=f"{file} has been overwritten since it was checked"):
        read(train)
    assert torch.equal(read(build(config, SAMPLES, None).train), built)  # a start builds them again


@pytest.mark.parametrize("index", ["dataset_index", "dataset_sample_index"])
@pytest.mark.parametrize("mixed", [False, True], ids=["pairs", "mixed"])
def test_a_blends_index_overwritten_during_a_run_is_an_error(tmp_path: Path, index: str, mixed: bool) -> None:
    first = write_pair(tmp_path / "first", [[length] for length in LENGTHS])
    other = write_npy(tmp_path / "b.npy", 3000) if mixed else write_pair(tmp_path / "second", [[3000]], seed=9)
    config = DataConfig(train_data=["0.7", first, "0.3", other])
    built = read(build(config, SAMPLES, None).train)
    train = build(config, SAMPLES, None).train
    assert torch.equal(read(train), built)
    (file,) = tmp_path.glob(f".index_cache/*/*-train-{index}.npy")
    overwrite(file, lambda values: np.concatenate([values[:128], np.zeros_like(values[128:])]))
    with pytest.raises(CorruptError, match=f"{file} has been overwritten since it was checked"):
        read(train)


# -- ids


def foreign(path: Path, token: int, dtype: str = "<u2") -> None:
    overwrite(path, lambda values: np.where(np.arange(len(values)) == token, FOREIGN, values), dtype=dtype)


def refused(path: Path | str, place: str, id_: int = FOREIGN) -> Any:
    message = f"{path} holds token id {id_} ({place}, counted from 0), outside the vocabulary of {VOCAB_SIZE}; it is "
    return pytest.raises(CorruptError, match=re.escape(message))


@pytest.mark.parametrize("is_late", [False, True], ids=["before the run", "during the run"])
def test_an_id_of_a_pair_that_its_manifest_does_not_know(tmp_path: Path, is_late: bool) -> None:
    prefix = write_pair(tmp_path / "samples", [[100, 60], [140], [20]])
    write_manifest(prefix, dtype="uint16", max_token_id=VOCAB_SIZE - 1)
    config = DataConfig(train_data=[prefix])
    train = build(config, SAMPLES, None).train
    foreign(Path(f"{prefix}.bin"), 250)
    train = train if is_late else build(config, SAMPLES, None).train
    outcomes = set()
    for number in range(len(train)):
        try:
            item = train[number]
        except CorruptError as error:
            assert f"{prefix}.bin holds token id {FOREIGN} (token 250 of the file, in document 1, " in str(error)
            outcomes.add("refused")
        else:
            assert max(item["tokens"].max(), item["labels"].max()) < VOCAB_SIZE
            outcomes.add("whole")
    assert outcomes == {"refused", "whole"}


def test_an_id_that_is_a_label_alone(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "samples", [[SEQ_LENGTH + 1]])
    train = build(DataConfig(train_data=[prefix]), SAMPLES, None).train
    foreign(Path(f"{prefix}.bin"), SEQ_LENGTH)
    with refused(f"{prefix}.bin", f"token {SEQ_LENGTH} of the file, in document 0"):
        train[0]


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int32"])
def test_an_id_of_a_npy_file(tmp_path: Path, dtype: str) -> None:
    path = Path(write_npy(tmp_path / "a.npy", SEQ_LENGTH, dtype=dtype))
    write_manifest(str(tmp_path / "a"), dtype=dtype, max_token_id=VOCAB_SIZE - 1)
    train = build(DataConfig(train_data=[str(path)]), SAMPLES, None).train
    (whole,) = find_sets(PerplexityConfig(sets={"own": [str(path)]}), seq_length=SEQ_LENGTH, vocab_size=VOCAB_SIZE)
    id_ = -5 if dtype == "int32" else FOREIGN
    overwrite(path, lambda values: np.where(np.arange(len(values)) == 63, id_, values), dtype=dtype)
    with refused(path, "token 63", id_):
        train[0]
    with refused(path, "token 63", id_):
        whole.read(whole.pieces()[0])


def test_an_id_of_a_conversation(tmp_path: Path) -> None:
    prefix = write_chats(tmp_path / "chats", [([5, 6, 7], [False, True, True]), ([8, 9, 10, 11], [False] + [True] * 3)])
    sizes = {"seq_length": 7, "seed": 1, "vocab_size": VOCAB_SIZE}
    chats = ChatDataset(Conversations(parse_chats([prefix])), **sizes)
    chats[0]
    foreign(Path(f"{prefix}.bin"), 5)
    with refused(f"{prefix}.bin", "token 5 of the file, in document 1"):
        chats[0]
