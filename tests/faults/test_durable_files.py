"""Files that are written where something else has their names already: a link, a pipe, what a killed process left."""

from pathlib import Path

import pytest

from megatron_fanformer.durable_files import new_folder, temporary_name, write_atomically
from tests.faults.hostile_files import pipe


def test_the_target_of_a_link_under_the_temporary_name_is_not_written(tmp_path: Path) -> None:
    target, file = tmp_path / "target", tmp_path / "latest"
    target.write_text("mine")
    temporary_name(file).symlink_to(target)
    write_atomically(file, "new")
    assert (target.read_text(), file.read_text(), file.is_symlink()) == ("mine", "new", False)


def test_a_pipe_is_not_replaced(tmp_path: Path) -> None:
    """Nor is /dev/null, which root could."""
    pipe(tmp_path / "report")
    with pytest.raises(OSError, match="it is a pipe"):
        write_atomically(tmp_path / "report", "new")
    assert (tmp_path / "report").is_fifo() and len(list(tmp_path.iterdir())) == 1


def test_what_a_process_of_the_same_number_left_is_in_nobodys_way(tmp_path: Path) -> None:
    left = temporary_name(tmp_path / "out")
    left.mkdir()
    (left / "old").touch()
    with new_folder(tmp_path / "out") as folder:
        (folder / "new").touch()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["new"]
