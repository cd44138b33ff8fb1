"""Reports on a path: one object, printed as JSON or as rows of text."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

from megatron_fanformer.errors import escaped
from megatron_fanformer.terminal import labelled, size, some

Report: TypeAlias = dict[str, Any]
"""What `inspect --json` prints: `path`, `kind` and facts; a run's newest checkpoint, or a blend's files, in `parts`."""
SHOWN_ROWS = 20  # of one group
NAMES = ("path", "prefix", "kind")  # keys that name one of several facts; the first stands for it in a list
SHOWN_CHARACTERS = 200  # of one value, such as a chat template


def lines(report: Report) -> Iterator[str]:
    """Yield a report as text: its facts, then its groups of facts."""
    facts = dict(report)
    yield escaped(f"{facts.pop('path')}: {facts.pop('kind')}")
    verified = facts.pop("verified", None)
    part = facts.pop("parts")[0] if len(facts.get("parts", ())) == 1 else None
    groups = {name: _rows(value) for name, value in facts.items() if _rows(value)}
    plain = {name: value for name, value in facts.items() if name not in groups}
    rows = [(name, size(value) if name == "bytes" else _brief(value)) for name, value in plain.items()]
    yield from _labelled(rows)
    for name, rows in groups.items():
        yield f"  {name.replace('_', ' ')}"
        more = [("", f"and {len(rows) - SHOWN_ROWS:,} more; --json has all")] if len(rows) > SHOWN_ROWS else []
        yield from (f"  {line}" for line in _labelled([*rows[:SHOWN_ROWS], *more]))
    if part is not None:
        yield ""
        yield from lines(part)
    if verified is not None:
        yield f"verified: {verified}"


def _rows(value: Any) -> list[tuple[str, str]]:
    """Return the rows of a group of facts, named by their keys or paths; none of what is no group."""
    if isinstance(value, Mapping):
        return [(name, _brief(item)) for name, item in value.items() if item is not None]
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        return [
            (item.get("path", ""), _brief({**item, **dict.fromkeys([*NAMES, "ledger", "manifest"])})) for item in value
        ]
    return []


def _labelled(rows: list[tuple[str, str]]) -> list[str]:
    return labelled([(name.replace("_", " "), escaped(text)) for name, text in rows])


def _brief(value: Any) -> str:
    """Return a value on one line."""
    if value is None:
        return "none"
    if isinstance(value, Mapping):
        items = [
            f"{key} ({_brief(item)})" if isinstance(item, Mapping | list) else f"{key} {_brief(item)}"
            for key, item in value.items()
            if item is not None
        ]
        return (some(items) if any(isinstance(key, int) for key in value) else ", ".join(items)) or "none"
    if isinstance(value, list):
        names = (
            next((item[name] for name in NAMES if name in item), item) if isinstance(item, Mapping) else item
            for item in value
        )
        return some(map(_brief, names)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"
    text = " ".join(str(value).split())
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]} …"


@contextmanager
def reading(total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar on a terminal while the block reads `total` bytes; yields a function to call with each count read."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True, markup=False)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)
        yield lambda count: bar.advance(task, count)
