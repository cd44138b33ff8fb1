"""Base of the loggers: their needs, a run's files that they own, and what they record."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where a run begins to log: at its start, where it resumes, or where it goes back to."""

    run: Path
    """The run's folder."""
    step: int
    """The last step that is kept of what was logged before."""
    tokens: int
    """Tokens of all steps up to that one."""
    steps: int
    """Number of steps of the whole run."""
    values: dict[str, Any]
    """The resolved configuration."""
    logging: Any
    """The section `logging`."""
    console: "Console"


class Logger(ABC):
    """Something that records metrics; it is opened as it is made, and made anew after the run went back.

    A new one is a module with a class like this, its entry in `LOGGERS`, and a field that turns it on.
    """

    setting: ClassVar[str | None] = None
    """The field of the section `logging` that turns it on, unless that is null or false; None: it is always on."""
    package: ClassVar[str | None] = None
    """The package that it needs, which is also the name of the extra that brings it."""
    is_needed: ClassVar[bool] = False
    """Whether the run ends where it fails; else it is left out from then on."""
    files: ClassVar[tuple[str, ...]] = ()
    """Its files in the run's folder."""

    @abstractmethod
    def __init__(self, start: Start) -> None:
        """Open it, and take away, or else leave out, what it has of steps after `start.step`."""

    @abstractmethod
    def write(self, step: int, metrics: dict[str, Any]) -> None:
        """Record the metrics of one step: numbers, texts, and lists of a number a layer."""

    @abstractmethod
    def close(self, *, failed: bool = False) -> None:
        """Flush and close; `failed`: the run ends with an error."""

    @classmethod
    def is_on(cls, config: Any) -> bool:
        """Return whether the section `logging` asks for it."""
        return cls.setting is None or getattr(config, cls.setting) not in (None, False)
