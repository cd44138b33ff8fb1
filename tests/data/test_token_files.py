"""Pairs and .npy files: read as they are written, and refused with the file and the field that is wrong."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_fanformer.data import token_files
from megatron_fanformer.data.config import DataConfig
from megatron_fanformer.data.token_files import INDEX_HEADER, PairReader, open_npy_files, read_index, token_dtype
from megatron_fanformer.errors import CorruptError, InputError
from tests.data.token_making import build, drawn, write_manifest, write_npy, write_pair
from tests.token_pairs import write_token_pair

LENGTHS = [5, 3, 8, 0, 2, 6]
SEQUENCES = len(LENGTHS)
# The fields of an index of LENGTHS, a sequence a document, in their order: name, bytes.
FIELDS = [
    ("magic", 9),
    ("version", 8),
    ("dtype code", 1),
    ("sequence count", 8),
    ("document count", 8),
    ("sequence length", 4 * SEQUENCES),
    ("sequence pointer", 8 * SEQUENCES),
    ("document bound", 8 * (SEQUENCES + 1)),
]

FLIPS = (0x01, 0x40, 0xFF)  # bits of a byte that are changed


@pytest.fixture
def pair(tmp_path: Path) -> str:
    return write_pair(tmp_path / "pair", [[length] for length in LENGTHS])


def test_the_token_type_follows_megatrons_rule() -> None:
    from megatron.core.datasets.indexed_dataset import DType

    for vocab_size in (100, 65_499, 65_500, 100_000):
        assert np.dtype(token_dtype(vocab_size)) == np.dtype(DType.optimal_dtype(vocab_size))


# -- the index


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.int32, np.int64, np.uint16])
def test_an_index_of_megatrons_own_writer_is_read(tmp_path: Path, dtype: type) -> None:
    """In every type of integers; ids, bounds and samples are the same in all."""
    documents = [[[5, 126, 7]], [[1, 2], [3, 4, 119]]] * 40
    pair, usual = (
        write_token_pair(tmp_path / f"{kind.__name__}", documents, dtype=kind) for kind in (dtype, np.uint16)
    )
    index = read_index(pair)
    assert (index.dtype, index.lengths.tolist(), index.tokens) == (np.dtype(dtype), [3, 2, 3] * 40, 320)
    with pytest.raises(CorruptError, match=r"holds token id 126 .* outside the vocabulary of 126"):
        PairReader(index, 126).get(0)
    reader = PairReader(index, 127)
    assert [reader.get(sequence).tolist() for sequence in range(3)] == [[5, 126, 7], [1, 2], [3, 4, 119]]
    assert torch.equal(*(drawn(build(DataConfig(train_data=[name])).train, 50) for name in (pair, usual)))


def test_documents_of_several_sequences_and_of_none_are_read(tmp_path: Path) -> None:
    index = read_index(write_pair(tmp_path / "sentences", [[3, 4], [], [5], [1, 2, 3]]))
    assert index.lengths.tolist() == [3, 4, 5, 1, 2, 3]
    assert index.bounds.tolist() == [0, 2, 2, 3, 6]


def test_a_missing_file_is_an_input_error(pair: str) -> None:
    Path(pair + ".idx").unlink()
    with pytest.raises(InputError, match=r"pair\.idx does not exist"):
        read_index(pair)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
@pytest.mark.parametrize("change", [-20, -1, 1, 2])
def test_a_file_of_another_length_is_corrupt(pair: str, suffix: str, change: int) -> None:
    path = Path(pair + suffix)
    data = path.read_bytes()
    path.write_bytes(data[:change] if change < 0 else data + bytes(change))
    with pytest.raises(CorruptError, match=f"^{path}: it is {'truncated' if change < 0 else 'extended'}"):
        read_index(pair)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        *((bytes(size), "it is truncated: the header has") for size in (0, 1, INDEX_HEADER.size - 1)),
        (b"something else" * 100, r"the magic is b'something', .* not a Megatron index"),
    ],
)
def test_a_file_of_another_format_is_corrupt(pair: str, content: bytes, expected: str) -> None:
    Path(pair + ".idx").write_bytes(content)
    with pytest.raises(CorruptError, match=expected):
        read_index(pair)


@pytest.mark.parametrize(
    ("field", "begin", "end"),
    [
        (name, sum(size for _, size in FIELDS[:number]), sum(size for _, size in FIELDS[: number + 1]))
        for number, (name, _) in enumerate(FIELDS)
    ],
)
def test_every_changed_byte_of_an_index_is_found(pair: str, field: str, begin: int, end: int) -> None:
    """The message names the file and the field."""
    path = Path(pair + ".idx")
    sound = path.read_bytes()
    for position in range(begin, end):
        for mask in FLIPS:
            spoilt = bytearray(sound)
            spoilt[position] ^= mask
            path.write_bytes(spoilt)
            with pytest.raises(CorruptError) as error:
                read_index(pair)
            message = str(error.value)
            assert str(path) in message and field in message and "\n" not in message, (position, mask, message)
    path.write_bytes(sound)


def test_an_index_longer_than_a_block_is_checked_throughout(pair: str, monkeypatch: pytest.MonkeyPatch) -> None:
    identity = read_index(pair).identity
    monkeypatch.setattr(token_files, "CHECKED_ENTRIES", 2)
    assert read_index(pair).identity == identity
    test_every_changed_byte_of_an_index_is_found(pair, "sequence pointer", 58, 106)
    test_every_changed_byte_of_an_index_is_found(pair, "document bound", 106, 162)


# -- the ids


def test_a_manifest_of_another_bin_file_is_not_believed(pair: str, tmp_path: Path) -> None:
    write_manifest(pair, dtype="uint16", max_token_id=777)
    write_token_pair(tmp_path / "pair", [[[1, 5]]])
    read_index(pair).refuse_stated_ids(600)


@pytest.mark.parametrize(("dtype", "wrong"), [(np.uint16, 9_999), (np.int32, -3)])
def test_an_id_outside_the_vocabulary_is_named_where_it_is_read(tmp_path: Path, dtype: Any, wrong: int) -> None:
    pair = write_token_pair(tmp_path / "wrong", [[[1, 5]], [[7, wrong]]], dtype=dtype)
    reader = PairReader(read_index(pair), 600)
    reader.get(0)
    with pytest.raises(CorruptError, match=rf"wrong\.bin holds token id {wrong} \(token 3, counted from 0\)"):
        reader.get(1)


def test_the_manifest_says_the_type_else_the_configuration_does(tmp_path: Path) -> None:
    path = write_npy(tmp_path / "a.npy", 10, dtype="<u4")
    assert [open_npy_files([path], dtype)[0].tokens for dtype in ("uint16", "uint32")] == [20, 10]
    write_manifest(str(tmp_path / "a"), dtype="uint32", max_token_id=599)
    (file,) = open_npy_files([path], "uint16")
    assert (file.tokens, file.max_token_id) == (10, 599)
    for suffix in (".npy", ".manifest.json"):
        (tmp_path / f"a{suffix}").rename(tmp_path / f"b{suffix}")
    with pytest.raises(InputError, match=r"b\.manifest\.json is of files of another name, and not of .*b\.npy; give"):
        open_npy_files([str(tmp_path / "b.npy")], "uint16")


def test_numpys_own_header_is_refused_with_the_remedy(tmp_path: Path) -> None:
    path, other = tmp_path / "a.npy", tmp_path / "b.npy"
    np.save(path, np.arange(10))
    with pytest.raises(InputError, match=r"a\.npy has NumPy's own header"):
        open_npy_files([str(path)], "uint16")
    np.load(path).astype("<u4").tofile(other)  # the remedy
    assert open_npy_files([str(other)], "uint32")[0].read(0, 10).tolist() == list(range(10))


def test_a_missing_npy_file_and_half_a_token_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"a\.npy does not exist"):
        open_npy_files([str(tmp_path / "a.npy")], "uint16")
    (tmp_path / "a.npy").write_bytes(b"abc")
    with pytest.raises(CorruptError, match=r"a\.npy holds 3 bytes, not a multiple of 2, a token of uint16"):
        open_npy_files([str(tmp_path / "a.npy")], "uint16")


@pytest.mark.parametrize("change", [-2, 2])
def test_another_size_than_the_manifests_is_corrupt(tmp_path: Path, change: int) -> None:
    path = Path(write_npy(tmp_path / "a.npy", 10))
    write_manifest(str(tmp_path / "a"), dtype="uint16", max_token_id=599)
    data = path.read_bytes()
    path.write_bytes(data[:change] if change < 0 else data + bytes(change))
    with pytest.raises(CorruptError, match=f"holds {20 + change} bytes, but .*a.manifest.json says 20"):
        open_npy_files([str(path)], "uint16")
