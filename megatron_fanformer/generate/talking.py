"""Input and output of `chat`: messages from a terminal or a pipe, a line each, and answers as they come."""

import sys
from contextlib import suppress

from megatron_fanformer import terminal
from megatron_fanformer.errors import InputError
from megatron_fanformer.generate.chat import Chat, open_chat
from megatron_fanformer.generate.config import ChatConfig

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
    is_interrupted = False
    while True:
        try:
            line = input("> " if sys.stdout.isatty() else "")
            is_interrupted = False
            if not _answered(chat, line):
                return
        except EOFError:
            return print()
        except KeyboardInterrupt:
            if is_interrupted:
                raise
            is_interrupted = True
            print()
            _print_notice(HINT)
        except InputError as error:
            _print_notice(str(error))


def _answered(chat: Chat, text: str) -> bool:
    """Carry out a line; return False where the conversation is to end."""
    command = text.strip()
    if command == QUIT:
        return False
    if command == RESET:
        chat.reset()
    elif command:
        _write_answer(chat, text)
    return True


def _write_answer(chat: Chat, text: str) -> None:
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
    print(flush=True)


def _print_notice(line: str) -> None:
    terminal.print_stderr(f"megatron-fanformer: {line}")
