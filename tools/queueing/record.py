"""What a part of the queue is: what it decides, what it runs, and the rules that its figures are held to."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
"""Of the checkout."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a part's commands and figures depend on."""

    folder: Path
    """The part's own, in which it writes."""
    rehearses: bool = False

    def pick(self, on_gpu: Any, rehearsed: Any) -> Any:
        """What differs in a rehearsal."""
        return rehearsed if self.rehearses else on_gpu


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command of a part; its program is this Python."""

    arguments: Sequence[str]
    name: str
    """Of its log, `NAME.log`."""
    output: str | None = None
    """A file for its standard output; None: the log."""
    variables: dict[str, str] = field(default_factory=dict)
    """Of the environment."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """What came out, and the rule that it was held to."""

    name: str
    value: float | None
    """None: there is none, as of a part that failed early."""
    shown: str
    """With its unit."""
    rule: str = ""
    """Empty: it is held to none."""
    met: bool | None = None
    """None: not judged, as a CPU's speed."""

    @property
    def verdict(self) -> str:
        """Whether the rule is met, in a word."""
        return {True: "yes", False: "no", None: "not judged" if self.rule else ""}[self.met]


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A figure that is read from what a part wrote, and a rule with numbers."""

    name: str
    read: Callable[[Setting], float]
    """Raises OSError, LookupError, ValueError or TypeError where there is none (yet)."""
    at_least: float | None = None
    at_most: float | None = None
    unit: str = ""
    scale: float = 1.0
    """Of what is shown: 100 for shares in %."""
    everywhere: bool = False
    """Whether it is also judged in a rehearsal."""

    @property
    def rule(self) -> str:
        """The rule in words."""
        limits = (("at least", self.at_least), ("at most", self.at_most))
        return ", ".join(f"{words} {self._show(limit)}" for words, limit in limits if limit is not None)

    def figure(self, setting: Setting) -> Figure:
        """Read it, and judge it."""
        try:
            value = float(self.read(setting))
        except (OSError, LookupError, ValueError, TypeError, ArithmeticError):
            return Figure(name=self.name, value=None, shown="none", rule=self.rule)
        met = (self.at_least is None or value >= self.at_least) and (self.at_most is None or value <= self.at_most)
        judged = met if self.everywhere or not setting.rehearses else None
        return Figure(name=self.name, value=value, shown=self._show(value), rule=self.rule, met=judged)

    def _show(self, value: float) -> str:
        return f"{value * self.scale:,.4g}{self.unit}"


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of the queue."""

    name: str
    decides: str
    minutes: float
    """Its limit, all its commands together."""
    commands: Callable[[Setting], list[Command]]
    writes: tuple[str, ...]
    """What it leaves in its folder beside logs."""
    goals: tuple[Goal, ...] = ()
    figures: Callable[[Setting], list[Figure]] | None = None
    """What it reports besides: with rules of its own, or with none."""
    needs: tuple[str, ...] = ("machine",)
    """Parts that must be done before."""
    at_once: bool = False
    """Whether its commands run side by side, as many as there are cores."""
    least_minutes: float | None = None
    """Of a part that goes on where it stopped: what it can do something with. Its limit is then for all calls together,
    and to be ended at it is no failure."""
    closing: Callable[[Setting], list[Command]] | None = None
    """What is run after that, however it ended."""
    closing_seconds: float = 0.0
    """Of the limit, what is left to it."""
    clears: Callable[[Setting], list[Path]] | None = None
    """Folders elsewhere that are removed before it starts anew."""
    kept: Callable[[Setting], list[Path]] | None = None
    """Files elsewhere that are copied into its folder at the end."""
    grace_seconds: float = 5.0
    """Between the signal that asks a command to end and the one that ends it."""
    on_stand_in: bool = True
    """Whether a rehearsal runs it over the stand-in for Transformer Engine; else on the CPU alone."""
    requires: Callable[[Setting], list[Path]] | None = None
    """Files of the repository without which it is left out."""

    def outcome(self, setting: Setting) -> list[Figure]:
        """Read all figures."""
        found = [goal.figure(setting) for goal in self.goals]
        try:
            return [*found, *(self.figures(setting) if self.figures else [])]
        except (OSError, LookupError, ValueError, TypeError):
            return found
