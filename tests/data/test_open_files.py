"""More files than descriptors: all are read, each the one that it was."""

import gc
import os
import pickle
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from megatron_fanformer.data import live_files
from megatron_fanformer.data.live_files import LiveFile
from megatron_fanformer.data.open_files import MOST_OPEN, OpenFiles
from megatron_fanformer.errors import CorruptError
from tests.patience import PATIENCE_SECONDS

FILES, MOST = 40, 3


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenFiles]:
    """A process that may keep three files open."""
    monkeypatch.setattr(live_files, "OPEN", files := OpenFiles())
    files._most = MOST
    yield files
    gc.collect()
    assert len(files) == 0  # whoever is gone has none


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    for number in range(FILES):
        np.full(8, number, "<u2").tofile(tmp_path / f"{number}.npy")
    return [tmp_path / f"{number}.npy" for number in range(FILES)]


def test_many_files_are_read_with_few_descriptors(few: OpenFiles, paths: list[Path]) -> None:
    files = [LiveFile(path) for path in paths]
    for number in np.random.default_rng(0).integers(FILES, size=200):
        assert files[number].values(np.dtype("<u2"), 3, 2).tolist() == [number] * 2
        assert len(few) <= MOST
    assert len(pickle.loads(pickle.dumps(files[7])).read(16, 0)) == 16


def test_one_that_was_replaced_meanwhile_is_noticed(few: OpenFiles, paths: list[Path]) -> None:
    files = [LiveFile(path) for path in paths[: MOST + 1]]  # the first is closed
    other = paths[0].with_name("other")
    other.write_bytes(paths[0].read_bytes())
    os.replace(other, paths[0])
    for _ in range(2):
        with pytest.raises(CorruptError, match=r"0\.npy is another file than when the run began"):
            files[0].read(2, 0)
    assert files[1].read(2, 0) == b"\1\0"


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
from pathlib import Path
from megatron_fanformer.data.live_files import LiveFile
held = [open("/dev/null") for _ in range({held})]
files = [LiveFile(path) for path in sorted(Path(sys.argv[1]).glob("*.npy"))]
print(sum(file.read(1, 0)[0] for file in files), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.parametrize(
    ("soft", "hard", "held", "message"),
    [
        (24, 4096, 0, f"{FILES * (FILES - 1) // 2} 4096"),  # raised
        (48, 48, 30, f"{FILES * (FILES - 1) // 2} 48"),  # others took theirs: fewer are kept open
    ],
)
def test_the_limit_is_raised_and_kept(soft: int, hard: int, held: int, message: str, paths: list[Path]) -> None:
    code = LIMITED.format(soft=soft, hard=hard, held=held)
    done = subprocess.run(
        [sys.executable, "-c", code, str(paths[0].parent)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.stdout.strip() == message, done.stderr


def test_none_left_is_one_line(paths: list[Path]) -> None:
    code = """
import resource, sys
from pathlib import Path
from megatron_fanformer.data.live_files import LiveFile
from megatron_fanformer.errors import InputError
resource.setrlimit(resource.RLIMIT_NOFILE, (30, 30))
held = []
try:
    while True:
        held.append(open("/dev/null"))
except OSError:
    pass
try:
    LiveFile(Path(sys.argv[1]))
except InputError as error:
    held.clear()
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code, str(paths[0])], capture_output=True, text=True, check=False)
    assert "may have 30 files open, and no more; raise the limit" in done.stdout, done.stderr


def test_this_process_may_have_as_many_as_the_system_allows(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"1")
    LiveFile(tmp_path / "file")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft >= min(hard, 2 * MOST_OPEN) or hard == resource.RLIM_INFINITY
