import shutil
from pathlib import Path

import numpy as np
import pytest

from megatron_fanformer.data.token_files import check_token_ids, read_index, token_dtype
from megatron_fanformer.errors import CorruptError, InputError


@pytest.fixture
def copied(token_prefix: str, tmp_path: Path) -> str:
    """Token files of the samples that a test may spoil; without a manifest."""
    prefix = str(tmp_path / "copy")
    for suffix in (".bin", ".idx"):
        shutil.copyfile(token_prefix + suffix, prefix + suffix)
    return prefix


def write_tokens(prefix: str, dtype: type, ids: list[int]) -> None:
    """A pair of one document, by megatron-core's own writer."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(prefix + ".bin", dtype=dtype)
    builder.add_document(np.array(ids), [len(ids)])
    builder.finalize(prefix + ".idx")


def test_the_token_type_follows_megatrons_rule() -> None:
    from megatron.core.datasets.indexed_dataset import DType

    for vocab_size in (100, 65_499, 65_500, 100_000):
        assert np.dtype(token_dtype(vocab_size)) == np.dtype(DType.optimal_dtype(vocab_size))


def test_an_index_of_megatrons_own_writer_is_read(tmp_path: Path) -> None:
    write_tokens(str(tmp_path / "own"), np.int32, [1, 2, 70_000])
    index = read_index(str(tmp_path / "own"))
    assert (index.dtype, index.lengths.tolist(), index.tokens) == (np.dtype(np.int32), [3], 3)


def test_ids_within_the_vocabulary_pass(token_prefix: str) -> None:
    check_token_ids([token_prefix], 600)


def test_an_id_beyond_the_vocabulary_is_named_out_of_the_manifest(token_prefix: str) -> None:
    with pytest.raises(InputError, match=r"samples holds token id 5\d\d, outside the vocabulary of 500"):
        check_token_ids([token_prefix], 500)


def test_an_id_beyond_the_vocabulary_is_named_without_a_manifest(copied: str) -> None:
    largest = int(np.fromfile(copied + ".bin", np.uint16).max())
    with pytest.raises(InputError, match=f"copy holds token id {largest}, outside the vocabulary of {largest}"):
        check_token_ids([copied], largest)


def test_a_manifest_of_another_bin_file_is_not_believed(token_prefix: str, tmp_path: Path) -> None:
    prefix = str(tmp_path / "other")
    shutil.copyfile(token_prefix + ".manifest.json", prefix + ".manifest.json")
    write_tokens(prefix, np.uint16, [1, 9_999])
    with pytest.raises(InputError, match="token id 9999"):
        check_token_ids([prefix], 600)


def test_a_negative_id_is_outside_the_vocabulary(tmp_path: Path) -> None:
    write_tokens(str(tmp_path / "negative"), np.int32, [1, -3])
    with pytest.raises(InputError, match="token id -3"):
        check_token_ids([str(tmp_path / "negative")], 600)


def test_a_missing_file_is_an_input_error(copied: str) -> None:
    Path(copied + ".idx").unlink()
    with pytest.raises(InputError, match=r"copy\.idx does not exist"):
        read_index(copied)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_truncated_file_is_corrupt(copied: str, suffix: str) -> None:
    path = Path(copied + suffix)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(CorruptError, match="truncated"):
        read_index(copied)


def test_a_file_of_another_format_is_corrupt(copied: str) -> None:
    Path(copied + ".idx").write_bytes(b"something else" * 100)
    with pytest.raises(CorruptError, match="no Megatron index"):
        read_index(copied)
