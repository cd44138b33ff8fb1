"""Input and output of `chat`: messages from a terminal or a pipe, a line each, and answers as they come."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from megatron_fanformer import terminal
from megatron_fanformer.errors import InputError
from megatron_fanformer.generation.chat import Chat, open_chat
from megatron_fanformer.generation.config import ChatConfig

RESET, QUIT = "/reset", "/quit"
HINT = f"{RESET} begins anew; {QUIT} or Ctrl-D ends; Ctrl-C ends an answer, twice the program"


def talk(config: ChatConfig) -> None:
    """Answer the lines of standard input, until it ends: those of a terminal, or of a pipe, as scripts use it.

    To a pipe nothing but answers is written on standard output, each followed by a line end. Lines of white space alone
    are passed over.

    Raises:
        As `open_chat` and `Chat.answer`; from a terminal, why a message cannot be answered is printed, and it
        may be rephrased.
        KeyboardInterrupt: Ctrl-C twice without a line in between, or once for a pipe.
    """
    with open_chat(config) as chat:
        if sys.stdin.isatty():
            _with_terminal(chat)
        else:
            _with_pipe(chat)


def _with_pipe(chat: Chat) -> None:
    for number, line in enumerate(sys.stdin.buffer, start=1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")  # without a byte order mark
        except UnicodeDecodeError:
            raise InputError(f"line {number} of the messages is not valid UTF-8; write them in that") from None
        try:
            if not _answered(chat, text.removesuffix("\n").removesuffix("\r")):
                return
        except InputError as error:
            raise InputError(f"line {number} of the messages: {error}") from None


def _with_terminal(chat: Chat) -> None:
    with suppress(ImportError):
        import readline  # noqa: F401  (input() edits lines by it)
    _print_notice(HINT)
    with _interrupts() as interrupts:
        while True:
            try:
                line = interrupts.read_line()
                if not _answered(chat, line, lambda: interrupts.count > 0):
                    return
            except EOFError:
                return print()
            except KeyboardInterrupt:
                if interrupts.count > 1:
                    raise
                print()
                _print_notice(HINT)
            except InputError as error:
                _print_notice(str(error))


def _answered(chat: Chat, text: str, is_stopped: Callable[[], bool] = lambda: False) -> bool:
    """Carry out a line; return False where the conversation is to end."""
    command = text.strip()
    if command == QUIT:
        return False
    if command == RESET:
        chat.reset()
    elif command:
        _write_answer(chat, text, is_stopped)
    return True


def _write_answer(chat: Chat, text: str, is_stopped: Callable[[], bool]) -> None:
    forgotten = chat.forgotten
    for piece in chat.answer(text):
        if chat.forgotten and not forgotten:
            _print_notice(
                "the conversation is longer than the model's context; from here on its oldest turns are left out"
            )
            forgotten = chat.forgotten
        sys.stdout.write(piece)
        if piece:
            sys.stdout.flush()
        if is_stopped():
            break
    print(flush=True)


def _print_notice(line: str) -> None:
    terminal.print_stderr(f"megatron-fanformer: {line}")


class _Interrupts:
    """Handles Ctrl-C at a terminal: ends the wait for a line; during an answer it is noted, and a second one ends that
    too.
    """

    def __init__(self) -> None:
        self.count = 0
        """Number of signals since the last line was read."""
        self._awaits_line = False

    def read_line(self) -> str:
        """Return the next line that is typed.

        Raises:
            EOFError, KeyboardInterrupt: there is none.
            InputError: it is not valid UTF-8.
        """
        self._awaits_line = True
        try:
            line = input("> " if sys.stdout.isatty() else "")
        finally:
            self._awaits_line = False
        self.count = 0
        try:
            line.encode()
        except UnicodeEncodeError:
            raise InputError("the message is not valid UTF-8; write it in that") from None
        return line

    def handle(self, _number: int, _frame: FrameType | None) -> None:
        """Python's handler of the signal."""
        self.count += 1
        if self._awaits_line or self.count > 1:
            raise KeyboardInterrupt


@contextmanager
def _interrupts() -> Iterator[_Interrupts]:
    interrupts = _Interrupts()
    before = signal.signal(signal.SIGINT, interrupts.handle)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)
