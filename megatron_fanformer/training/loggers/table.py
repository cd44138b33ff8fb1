"""metrics.csv: a row a step, a column a metric; of a list by layer its largest."""

import csv
import io
from dataclasses import dataclass
from typing import Any

from megatron_fanformer.durable_files import regular_file, write_atomically
from megatron_fanformer.training.loggers.logger import Logger, Start
from megatron_fanformer.training.metrics import numbers

TABLE = "metrics.csv"


@dataclass(frozen=True, kw_only=True)
class TableFields:
    """The fields of the table."""

    csv: bool = False
    """Write `metrics.csv` too."""


class Table(Logger):
    """Appends a row per step; a metric that appears for the first time gets a column at the end.

    The file is written anew for that column.
    """

    Fields = TableFields
    setting = "csv"
    files = (TABLE,)

    def __init__(self, start: Start) -> None:
        self._path = start.run / TABLE
        self._columns = ["step"]
        if self._path.exists():
            text = regular_file(self._path).read_text(encoding="utf-8")
            rows = csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1]))  # the last may be torn
            if "step" not in (rows.fieldnames or self._columns):
                raise ValueError(f"{self._path} is not a table of a run's steps; move it away")
            self._columns = list(rows.fieldnames or self._columns)
            self._rewrite([row for row in rows if int(row["step"]) <= start.step])
        else:
            self._rewrite([])

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        """Record the metrics of one step."""
        texts = {name: value for name, value in metrics.items() if isinstance(value, str)}
        row = {"step": step, **numbers(metrics), **texts}
        if new := [name for name in row if name not in self._columns]:
            self._file.close()
            with self._path.open(encoding="utf-8", newline="") as file:
                rows = list(csv.DictReader(file))
            self._columns += new
            self._rewrite(rows)
        self._rows.writerow(row)
        self._file.flush()

    def _rewrite(self, rows: list[dict[str, Any]]) -> None:
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self._columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_atomically(self._path, text.getvalue())
        self._file = self._path.open("a", encoding="utf-8", newline="")
        self._rows = csv.DictWriter(self._file, self._columns, lineterminator="\n")

    def close(self, *, failed: bool = False) -> None:
        """Close the file."""
        self._file.close()
