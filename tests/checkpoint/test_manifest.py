"""The manifest of a checkpoint: every byte of every file is covered, by any number of ranks."""

import hashlib
import random
from pathlib import Path

import pytest

from megatron_fanformer.checkpoint.manifest import MANIFEST, check_files, read_manifest, write_manifest, write_rank_sums
from megatron_fanformer.checkpoint.run_folder import checkpoint_name
from megatron_fanformer.checkpoint.stored_files import check_stored
from megatron_fanformer.errors import CorruptError
from tests.checkpoint.stores import save

SIZES = {"__0_0.distcp": 1000, "__0_1.distcp": 30, "__1_0.distcp": 256, ".metadata": 100, "config.yaml": 0}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Files with their manifest."""
    generator = random.Random(0)
    for name, size in SIZES.items():
        (tmp_path / name).write_bytes(generator.randbytes(size))
    write_rank_sums(tmp_path, 0)  # rank 1's are left to the publication
    write_manifest(tmp_path, 7)
    return tmp_path


def check(checkpoint: Path, shares: int) -> list[str]:
    """What each rank refuses."""
    manifest = read_manifest(checkpoint)
    refused = []
    for share in range(shares):
        try:
            check_files(checkpoint, manifest, share=share, shares=shares)
        except CorruptError as error:
            refused.append(str(error))
    return refused


def test_a_manifest_has_the_sizes_and_sums_of_all_files_and_nothing_else_is_left(checkpoint: Path) -> None:
    manifest = read_manifest(checkpoint)
    assert (manifest.step, {name: file.bytes for name, file in manifest.files.items()}) == (7, SIZES)
    for name, file in manifest.files.items():
        assert file.sha256 == hashlib.sha256((checkpoint / name).read_bytes()).hexdigest()
    assert sorted(path.name for path in checkpoint.iterdir()) == sorted([*SIZES, MANIFEST])


@pytest.mark.parametrize("shares", [1, 3, 50])
def test_ranks_share_the_check_and_one_of_them_finds_the_damage(checkpoint: Path, shares: int) -> None:
    assert check(checkpoint, shares) == []
    generator = random.Random(shares)
    for name, size in SIZES.items():
        if not size:
            continue
        file, at = checkpoint / name, generator.randrange(size)
        content = file.read_bytes()
        file.write_bytes(content[:at] + bytes([content[at] ^ 1 << generator.randrange(8)]) + content[at + 1 :])
        (message,) = check(checkpoint, shares)
        assert message.startswith(f"{file} is damaged (its SHA-256 is not its manifest's)")
        file.write_bytes(content)


def test_a_checkpoint_under_the_name_of_another_step_is_refused(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, 3)
    check_stored(checkpoint)
    check_stored(checkpoint := checkpoint.rename(tmp_path / "kept"))
    with pytest.raises(CorruptError, match="is of step 3, another than its name says"):
        check_stored(checkpoint.rename(tmp_path / checkpoint_name(4)))
