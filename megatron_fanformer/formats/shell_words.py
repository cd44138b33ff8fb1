"""Words of a shell's commands: how they come about, and where what is in brackets within them ends."""

import re
from typing import NamedTuple

MARKS = {  # by what closes what is open: what matters up to there
    '"': re.compile(r"""\\.|\$[({]|["]""", re.DOTALL),
    "}": re.compile(r"""\\.|\$[({]|["}]|'[^']*'""", re.DOTALL),
    ")": re.compile(
        r"""\\.|\$[({]|["()]|'[^']*'|(?<![^\s;&|()])#[^\n]*|(?<!<)<<(-?)[ \t]*(["'\\]?)(\w+)\2?|\n""", re.DOTALL
    ),
}


class Word(NamedTuple):
    """A word of a command."""

    text: str
    """It, with what could not be resolved as the script writes it."""
    unresolved: tuple[str, ...] = ()
    """What could not be resolved."""


def place_past(text: str, at: int, closing: str) -> int | None:
    """Return the place behind what closes a bracket that is open before a place; None where nothing does.

    It is not within quotes, comments or here-documents, nor behind a backslash.

    Args:
        closing: a key of MARKS.
    """
    left = [closing]
    documents, tabs = [], r"\t*"  # of here-documents from the next line on: a pattern of what ends them
    while left:
        found = MARKS[left[-1]].search(text, at)
        if not found:
            return None
        mark, at = found[0], found.end()
        if mark == left[-1]:
            left.pop()
        elif mark == '"':
            left.append(mark)
        elif mark in ("(", "$("):
            left.append(")")
        elif mark == "${":
            left.append("}")
        elif mark.startswith("<<"):
            documents.append(f"^{tabs if found[1] else ''}{found[3]}$")
        elif mark == "\n":
            for end in documents:
                ending = re.compile(end, re.MULTILINE).search(text, at)
                if not ending:
                    return None
                at = ending.end()
            documents.clear()
    return at


class Made:
    """Words that come about piece by piece."""

    def __init__(self) -> None:
        self.done: list[Word] = []
        self.pieces: list[str] | None = None  # None: no word has begun
        self.unresolved: list[str] = []

    def add(self, text: str, unresolved: tuple[str, ...] = ()) -> None:
        """Go on with the last word, or begin one."""
        if self.pieces is None:
            self.pieces = []
        self.pieces.append(text)
        self.unresolved += unresolved

    def add_split(self, word: Word) -> None:
        """Go on with a value whose blanks separate words."""
        whole = "|".join([*map(re.escape, word.unresolved), r"\S"])  # what is not resolved may hold blanks
        if word.text[:1].isspace():
            self.cut()
        for number, part in enumerate(re.findall(f"(?:{whole})+", word.text)):
            if number:
                self.cut()
            self.add(part, tuple(name for name in word.unresolved if name in part))
        if word.text[-1:].isspace():
            self.cut()

    def cut(self) -> None:
        """End the word."""
        if self.pieces is not None:
            self.done.append(Word("".join(self.pieces), tuple(self.unresolved)))
        self.pieces, self.unresolved = None, []

    def words(self) -> list[Word]:
        """Return all, each ended."""
        self.cut()
        return self.done
