"""The arguments that a launch script gives to Megatron-LM's `pretrain_….py`, read without running anything.

Of the shell there is what such scripts are written in: quotes, comments, continued lines, variables and arrays of plain
assignments (`A=1`, `A=(--x 1)`, `A+=…`), `${A:-default}`. Whatever only a shell resolves stays as it is written, and is
named: `$1`, `$(nproc)`, and a variable that is assigned under a condition, in a loop, by it, in a function, in a
subshell or pipeline, or by a command (`read A`, `((A++))`, `printf -v A`). Values stay known past `source FILE` and
`eval`, which mostly set up an environment: these are listed. Lines of here-documents are commands only where nothing
else starts the program, as in `sbatch <<EOF`.
"""

import os
import re
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from megatron_fanformer.durable_files import regular_file
from megatron_fanformer.errors import InputError
from megatron_fanformer.formats.shell_words import Made, Word, place_past

MOST_BYTES = 1 << 20  # of a script, and of all that its variables expand to: a few doublings make any length
MOST_DEPTH = 16  # of defaults within defaults
PROGRAM = re.compile(r"(?:^|.*/)pretrain\w{0,40}\.py$")
NAMES_PROGRAM = re.compile(r"pretrain\w{0,40}\.py\s")
IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\[[^]\s]*\])?(\+?)=")
COMPUTED = re.compile(  # in arithmetic: behind `++` or `--`, or before these, `=`, `+=` and the like
    r"(?:\+\+|--)\s*([A-Za-z_]\w*)|\b([A-Za-z_]\w*)\b(?:\[[^][]*\])?\s*(?:(?:<<|>>|[-+*/%&^|])?=(?!=)|\+\+|--)"
)
NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?!$-]")
BRACED = re.compile(r"([A-Za-z_]\w*|[0-9]+|[@*#?])(\[[@*]\])?(?:(:?)[-=](.*))?", re.DOTALL)
SEPARATOR = re.compile(r"\n|;;|&&|\|\||\|&|[;|()]|&(?![>])")
AFTER_APART = re.compile(r"\|(?!\|)|&(?![&>])")  # what comes after a command that a process of its own runs
MAY_NOT_HOLD = ("&&", "||", "|", "|&")  # before a command that may not run, or that a process of its own runs
REDIRECTION = re.compile(r"(?:\d*(?:>>|>&|>|<<<|<<-?|<)|&>>?)&?[ \t]*")
DECLARES = ("export", "declare", "local", "readonly", "typeset")
TYPES = re.compile(r"-\w*[inlu]\w*")  # by which a variable does not hold what is assigned to it
READS = ("read", "mapfile", "readarray", "getopts")
INCLUDES = ("source", ".", "eval")
HERE = re.compile(r"\d*<<(-?)[ \t]*")
OPENS, CLOSES = ("if", "for", "while", "until", "case", "select", "{"), ("fi", "done", "esac", "}")
CONTINUES = ("then", "else", "elif", "do", "!", "time")
NAMING = ("for", "select", "function")


class Arguments(NamedTuple):
    """The arguments that a script gives."""

    words: list[Word]
    included: tuple[str, ...] = ()
    """Commands that run what is not in the script: it does not say whether assignments before them still hold, or
    whether what has a default after them is set.
    """


def read_arguments(source: str) -> Arguments:
    """Return the arguments of `pretrain_….py`: of a script, if a file has that name, else of a command line.

    A command line may begin with the launcher, or with the first argument.

    Raises:
        InputError: the file cannot be read, or there are no arguments, or those of several commands.
    """
    is_name = len(source.split()) == 1 or os.path.isfile(source)  # of a Path, too long a name raises
    if source.lstrip().startswith("-") or not is_name:
        return _arguments(source, "the command line")
    try:
        text = regular_file(Path(source), most_bytes=MOST_BYTES).read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{source} cannot be read ({error.strerror}); name a script, or quote arguments") from None
    except UnicodeDecodeError:
        raise InputError(f"{source} is no text in UTF-8; name a script that starts pretrain_gpt.py") from None
    return _arguments(text, source)


def _arguments(text: str, where: str) -> Arguments:
    reader = _Reader(text, {}, where)
    commands = list(reader.commands())
    if commands and commands[0][0].text.startswith("--"):
        if len(commands) > 1:
            raise InputError(f"{where} goes on with {commands[1][0].text!r} after a separator; quote what holds | or ;")
        return Arguments(commands[0])
    found = _starts(commands)
    if not found:  # another shell's commands are in a here-document
        commands += reader.documents
        reader.included += reader.documents_included
        found = _starts(commands)
    if not found:  # the whole command is one word, as in srun bash -c "…"
        inner = [word.text for words in commands for word in words if NAMES_PROGRAM.search(word.text)]
        found = _starts(words for each in inner for words in reader.inner(each).commands())
    if not found:
        raise InputError(f"{where} starts no pretrain_….py with arguments; name the script that does, or quote them")
    if len(found) > 1 and found[0] != found[1]:
        raise InputError(f"{where} starts pretrain_….py more than once; quote the arguments of one")
    return Arguments(found[0], tuple(dict.fromkeys(reader.included)))


def _starts(commands: Iterable[list[Word]]) -> list[list[Word]]:
    """Return the arguments of the first two starts of the program."""
    return list(islice((words[place + 1 :] for words in commands for place in _programs(words)), 2))


def _programs(words: list[Word]) -> list[int]:
    """Return the place of the program; none where it has no arguments, as in `[ -f pretrain_gpt.py ]`."""
    return [
        place
        for place, word in enumerate(words)
        if PROGRAM.match(word.text)
        and any(each.text.startswith("--") or each.unresolved for each in words[place + 1 :])
    ][:1]


def _names_program(words: list[str]) -> bool:
    return any(PROGRAM.match(word) or NAMES_PROGRAM.search(word) for word in words)


class _Reader:
    """A pass through a script, from its first character to its last."""

    def __init__(self, text: str, values: dict[str, list[Word] | None], where: str) -> None:
        self.text, self.where = text.replace("\r\n", "\n"), where
        self.values = values  # None: not of plain assignments alone
        self.at = self.made = self.depth = self.nested = self.subshell_end = 0
        self.is_quoted = False  # whether it is a default within double quotes, where ' is of the value
        self.typed: set[str] = set()  # variables that do not hold what is assigned to them
        self.subshells: list[int] = []  # of each `(` that is open: the depth outside
        self.included: list[str] = []  # commands that may have set what was known by then, or has a default since
        self.not_noted: list[str] = []  # the like, before which nothing was known, nor a default taken since
        self.documents: list[list[Word]] = []  # commands in here-documents that name the program
        self.documents_included: list[str] = []
        self._ends: list[tuple[str, str]] = []  # of here-documents from the next line on: what may precede it, the word

    def commands(self) -> Iterator[list[Word]]:
        """Yield the words of each command, with the variables that precede it resolved."""
        is_conditional = False
        while self.at < len(self.text):
            words = self._command(is_conditional)
            separator = SEPARATOR.match(self.text, self.at)
            if separator:
                self.at = separator.end()
                is_conditional = separator[0] in MAY_NOT_HOLD
                self._pass_bracket(separator[0])
                if separator[0] == "\n":
                    self._pass_documents()
                if is_conditional:
                    self._pass_line_ends()
            if words:
                yield words

    def inner(self, text: str) -> "_Reader":
        """Return a reader of a part, which knows and has counted what this one has."""
        if self.nested >= MOST_DEPTH:
            raise InputError(f"{self.where} nests defaults more than {MOST_DEPTH} deep; quote the arguments")
        inner = _Reader(text, self.values, self.where)
        inner.made, inner.nested = self.made, self.nested + 1
        inner.included, inner.not_noted = self.included, self.not_noted
        return inner

    def _pass_bracket(self, separator: str) -> None:
        """Go into a subshell, or out of it; a `)` within a `case` that began since is of a pattern."""
        if separator == "(":
            self.subshells.append(self.depth)
            self.depth += 1
        elif separator == ")" and self.subshells and self.depth <= self.subshells[-1] + 1:
            self.depth = self.subshells.pop()

    def _pass_line_ends(self) -> None:
        """Go past line ends and comments, after which a command goes on."""
        while self._at_end_of_command() and self.text.startswith("\n", self.at):
            self.at += 1
            self._pass_documents()

    def _command(self, is_conditional: bool) -> list[Word]:
        words: list[Word] = []
        assigned: list[tuple[str, bool, bool, list[Word]]] = []
        first = True
        while not self._at_end_of_command() or (not words and self._pass_arithmetic()):
            if found := ASSIGNED.match(self.text, self.at) if not words or words[0].text in DECLARES else None:
                self.at = found.end()
                assigned.append((found[1], bool(found[2]), bool(found[3]), self._assigned()))
                first = False
            elif found := REDIRECTION.match(self.text, self.at):
                self._redirected(found)
            else:
                new = self._word()
                if first and len(new) == 1 and new[0].text in (*OPENS, *CLOSES, *CONTINUES, *NAMING):
                    first = self._keyword(new[0].text)
                    continue
                words += new
                first = False
        is_sure = self.depth <= 0 and not is_conditional and not AFTER_APART.match(self.text, self.at)
        if not words or words[0].text in DECLARES:
            if any(TYPES.fullmatch(word.text) for word in words):
                self.typed.update([word.text for word in words], [name for name, *_ in assigned])
            for name, is_element, is_added, value in assigned:
                is_plain = is_sure and not is_element and name not in self.typed
                self._assign(name, value, is_added=is_added, is_plain=is_plain)
        if words:
            self._forget_set_by([word.text for word in words], is_sure=is_sure)
        return words

    def _forget_set_by(self, words: list[str], *, is_sure: bool) -> None:
        """Forget what a command sets."""
        command, *rest = words
        if command == "let":
            self._compute(" ".join(rest))
        elif command == "printf" and rest and rest[0].startswith("-v"):
            self._forget(IDENTIFIER.findall(" ".join(rest)[2:])[:1])
        elif command in READS:
            self._forget(name for name in rest if IDENTIFIER.fullmatch(name))
        elif command == "unset" and "-f" not in rest:
            names = [name.partition("[")[0] for name in rest]
            self._forget(names)
            if is_sure and names == rest:  # then defaults count again
                for name in names:
                    self.values.pop(name, None)
        elif command in INCLUDES and not _names_program(rest):
            (self.included if self.values else self.not_noted).append(" ".join(words))

    def _forget(self, names: Iterable[str]) -> None:
        self.values.update((name, None) for name in names)

    def _compute(self, arithmetic: str) -> None:
        """Forget what arithmetic sets."""
        self._forget(found[1] or found[2] for found in COMPUTED.finditer(arithmetic))

    def _pass_arithmetic(self) -> bool:
        """Go past `((…))`, where it is next; return whether it was."""
        begin = self.at
        if begin < self.subshell_end or not self.text.startswith("((", begin):
            return False
        self._skip(")")
        if not self.text.endswith("))", begin, self.at):
            self.subshell_end, self.at = self.at, begin
            return False
        self._compute(self.text[begin : self.at])
        return True

    def _keyword(self, text: str) -> bool:
        """Go past what a keyword names; return whether another may follow it."""
        self.depth = max(0, self.depth + (text in OPENS) - (text in CLOSES))
        name = self._word() if text in NAMING and not self._at_end_of_command() else []
        if text != "function":
            self._forget(word.text for word in name)  # the loop's variable
        return text not in ("for", "select", "case")

    def _redirected(self, found: re.Match[str]) -> None:
        """Go past a redirection and its file; of a here-document the text follows the line."""
        self.at = found.end()
        if self._at_end_of_command():
            return
        word = self._word()
        if here := HERE.fullmatch(found[0]):
            self._ends.append(("\t*" if here[1] else "", _text(word)))

    def _pass_documents(self) -> None:
        """Go past the here-documents of the line that ended."""
        for before, end in self._ends:
            found = re.compile(f"^{before}{re.escape(end)}$", re.MULTILINE).search(self.text, self.at)
            if not found:
                raise self._unclosed("<<")
            text, self.at = self.text[self.at : found.start()], found.end()
            if NAMES_PROGRAM.search(text):
                inner = self.inner(text)
                inner.values = dict(self.values)  # another shell's
                inner.included, inner.not_noted = self.documents_included, [*self.not_noted]
                self.documents += inner.commands()
                self.made = inner.made
        self._ends.clear()

    def _at_end_of_command(self) -> bool:
        """Skip blanks and a comment; return whether a command ends here."""
        while self.at < len(self.text):
            if self.text[self.at] in " \t":
                self.at += 1
            elif self.text.startswith("\\\n", self.at):
                self.at += 2
            elif self.text[self.at] == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            else:
                return SEPARATOR.match(self.text, self.at) is not None
        return True

    def _assigned(self) -> list[Word]:
        if not self.text.startswith("(", self.at):
            if self.at >= len(self.text) or self.text[self.at].isspace() or SEPARATOR.match(self.text, self.at):
                return [Word("")]
            parts = self._word(splits=False)
            unresolved = tuple(name for part in parts for name in part.unresolved)
            return [Word(" ".join(part.text for part in parts), unresolved)]
        self.at += 1
        words: list[Word] = []
        while self.at < len(self.text) and self.text[self.at] != ")":
            if not self._at_end_of_command():
                words += self._word()
            elif self.at < len(self.text) and self.text[self.at] != ")":
                self.at += 1
        self.at += 1
        return words

    def _assign(self, name: str, value: list[Word], *, is_added: bool, is_plain: bool) -> None:
        before = self.values.get(name, [])
        if not is_plain or (is_added and before is None):
            self.values[name] = None
        elif is_added and before and len(before) == len(value) == 1:
            joined = before[0].text + value[0].text
            self.values[name] = [Word(joined, before[0].unresolved + value[0].unresolved)]
        else:
            self.values[name] = [*(before or []), *value] if is_added else value

    # -- words

    def _word(self, *, splits: bool = True) -> list[Word]:
        """Return what the word here expands to: none, one or several."""
        made = Made()
        while self.at < len(self.text):
            char = self.text[self.at]
            if char.isspace() or SEPARATOR.match(self.text, self.at):
                break
            self.at += 1
            if char == "'" and not self.is_quoted:
                made.add(self._until("'"))
            elif char == '"':
                self._quoted(made)
            elif char == "\\":
                following = self.text[self.at : self.at + 1]
                self.at += 1
                made.add("" if following == "\n" else following)
            elif char == "`":
                made.add(written := f"`{self._until('`')}`", (written,))
            elif char == "$":
                self._expand(made, splits=splits, is_quoted=False)
            else:
                made.add(char)
        return made.words()

    def _quoted(self, made: Made) -> None:
        made.add("")
        while self.at < len(self.text):
            char = self.text[self.at]
            self.at += 1
            if char == '"':
                return
            if char == "$":
                self._expand(made, splits=False, is_quoted=True)
            elif char == "`":
                made.add(written := f"`{self._until('`')}`", (written,))
            elif char == "\\" and self.text[self.at : self.at + 1] in ("$", "`", '"', "\\", "\n"):
                made.add("" if self.text[self.at] == "\n" else self.text[self.at])
                self.at += 1
            else:
                made.add(char)
        raise self._unclosed('"')

    def _expand(self, made: Made, *, splits: bool, is_quoted: bool) -> None:
        begin = self.at - 1
        if self.text.startswith("(", self.at):
            self._skip(")")
            if self.text.startswith("((", begin + 1):
                self._compute(self.text[begin : self.at])
            value, is_array = None, False
        elif self.text.startswith("{", self.at):
            self._skip("}")
            value, is_array = self._braced(self.text[begin + 2 : self.at - 1], is_quoted=is_quoted)
        elif found := NAME.match(self.text, self.at):
            self.at = found.end()
            value, is_array = self.values.get(found[0]), False
            value = value[:1] if value else value  # of an array, the first
        else:
            made.add("$")
            return
        if value is None:
            written = self.text[begin : self.at]
            made.add(written, (written,))
            return
        self.made += sum(len(word.text) for word in value) + 1
        if self.made > MOST_BYTES:
            raise InputError(
                f"the variables of {self.where} expand to more than {MOST_BYTES} bytes; quote the arguments"
            )
        for number, word in enumerate(value):
            if number and (is_array or not is_quoted):
                made.cut()
            if splits and not is_quoted:
                made.add_split(word)
            else:
                made.add(*word)

    def _braced(self, body: str, *, is_quoted: bool) -> tuple[list[Word] | None, bool]:
        found = BRACED.fullmatch(body)
        if not found:
            return None, False
        name, index, colon, default = found.groups()
        value = self.values.get(name)
        if default is not None and (name not in self.values or (colon and value is not None and not _text(value))):
            if name not in self.values and IDENTIFIER.fullmatch(name):  # `source` leaves $1 as it is
                self.included += self.not_noted
                self.not_noted.clear()
            inner = self.inner(default)
            inner.is_quoted = is_quoted
            value = inner._all_as_one()
            self.made = inner.made
            return value, False
        return (value, True) if index or value is None else (value[:1], False)

    def _all_as_one(self) -> list[Word]:
        """Return the whole text as one word: quotes are removed, spaces kept."""
        made = Made()
        made.add("")
        while self.at < len(self.text):
            begin = self.at
            for word in self._word(splits=False):
                made.add(*word)
            if self.at == begin:
                made.add(self.text[self.at])
                self.at += 1
        return made.words()

    def _until(self, end: str) -> str:
        found = self.text.find(end, self.at)
        if found < 0:
            raise self._unclosed(end)
        text, self.at = self.text[self.at : found], found + 1
        return text

    def _skip(self, closing: str) -> None:
        """Go past the opening that is next, and past what closes it."""
        end = place_past(self.text, self.at + 1, closing)
        if end is None:
            raise self._unclosed(self.text[self.at])
        self.at = end

    def _unclosed(self, char: str) -> InputError:
        return InputError(f"{self.where} has a {char} that nothing closes; close it, or quote the arguments")


def _text(value: list[Word]) -> str:
    return "".join(word.text for word in value)
