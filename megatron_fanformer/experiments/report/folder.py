"""An experiment's folder: its files, README.md, and last the result, so that a folder that has one is whole."""

from collections.abc import Mapping
from pathlib import Path

from megatron_fanformer.durable_files import write_atomically
from megatron_fanformer.experiments.report.page import as_markdown
from megatron_fanformer.experiments.result import Result, write_result

README = "README.md"


def write_folder(folder: Path, result: Result, files: Mapping[str, str | bytes]) -> None:
    """Write a folder, which is made if missing.

    Args:
        files: contents by name; the pictures of the result among them.

    Raises:
        OSError: a file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        write_atomically(folder / name, content)
    write_atomically(folder / README, as_markdown([(folder, result)], at=folder))
    write_result(folder, result)
