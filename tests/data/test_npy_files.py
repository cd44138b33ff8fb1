from pathlib import Path

import numpy as np
import pytest

from megatron_fanformer.data.npy_files import open_npy_files
from megatron_fanformer.errors import CorruptError, InputError
from tests.data.token_making import write_manifest, write_npy


def test_a_file_is_its_tokens_in_little_endian_order(tmp_path: Path) -> None:
    (tmp_path / "a.npy").write_bytes(b"\x01\x00\x02\x01\xff\xff")
    (file,) = open_npy_files([str(tmp_path / "a.npy")], "uint16")
    assert (file.tokens, file.read(0, 3).tolist(), file.read(1, 1).tolist()) == (3, [1, 258, 65_535], [258])


@pytest.mark.parametrize("stated", ["uint16", "uint32"])
def test_the_manifest_says_the_type(tmp_path: Path, stated: str) -> None:
    path = write_npy(tmp_path / "a.npy", 10, dtype="<u4")
    write_manifest(str(tmp_path / "a"), dtype="uint32", max_token_id=599)
    (file,) = open_npy_files([path], stated)  # type: ignore[arg-type]
    assert (file.tokens, file.max_token_id) == (10, 599)


def test_without_a_manifest_the_stated_type_is_taken(tmp_path: Path) -> None:
    path = write_npy(tmp_path / "a.npy", 10, dtype="<u4")
    assert [open_npy_files([path], dtype)[0].tokens for dtype in ("uint16", "uint32")] == [20, 10]


def test_a_file_that_was_renamed_with_its_manifest_is_not_read_as_another_type(tmp_path: Path) -> None:
    write_npy(tmp_path / "a.npy", 10, dtype="<u4")
    write_manifest(str(tmp_path / "a"), dtype="uint32", max_token_id=599)
    for suffix in (".npy", ".manifest.json"):
        (tmp_path / f"a{suffix}").rename(tmp_path / f"b{suffix}")
    path = str(tmp_path / "b.npy")
    with pytest.raises(InputError, match=r"b\.manifest\.json is of files of another name, and not of .*b\.npy; give"):
        open_npy_files([path], "uint16")
    (tmp_path / "b.manifest.json").unlink()  # the remedy
    assert open_npy_files([path], "uint32")[0].tokens == 10


def test_numpys_own_header_is_refused_with_the_remedy(tmp_path: Path) -> None:
    path, other = tmp_path / "a.npy", tmp_path / "b.npy"
    np.save(path, np.arange(10))
    with pytest.raises(InputError, match=r"a\.npy has NumPy's own header"):
        open_npy_files([str(path)], "uint16")
    np.load(path).astype("<u4").tofile(other)  # the remedy
    assert open_npy_files([str(other)], "uint32")[0].read(0, 10).tolist() == list(range(10))


@pytest.mark.parametrize(
    ("content", "kind", "message"),
    [
        (None, InputError, r"a\.npy does not exist"),
        (b"abc", CorruptError, r"a\.npy holds 3 bytes, not a multiple of 2, a token of uint16"),
    ],
)
def test_what_is_no_file_of_tokens_is_named(
    tmp_path: Path, content: bytes | None, kind: type[Exception], message: str
) -> None:
    if content is not None:
        (tmp_path / "a.npy").write_bytes(content)
    with pytest.raises(kind, match=message):
        open_npy_files([str(tmp_path / "a.npy")], "uint16")


@pytest.mark.parametrize("change", [-2, 2])
def test_another_size_than_the_manifests_is_corrupt(tmp_path: Path, change: int) -> None:
    path = Path(write_npy(tmp_path / "a.npy", 10))
    write_manifest(str(tmp_path / "a"), dtype="uint16", max_token_id=599)
    data = path.read_bytes()
    path.write_bytes(data[:change] if change < 0 else data + bytes(change))
    with pytest.raises(CorruptError, match=f"holds {20 + change} bytes, but .*a.manifest.json says 20"):
        open_npy_files([str(path)], "uint16")
