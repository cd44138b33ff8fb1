"""The command `megatron-fanformer VERB`: the list of verbs; parses, then calls one function.

A verb is a record in its own room. Their modules import slow packages when they run: torch and megatron-core take
seconds, and errors in a configuration are reported before they are imported.

Exit codes: 0 done, 2 the user's input is wrong, 3 data or a checkpoint is corrupt, 4 the numbers went bad, 5 stopped
on a signal, 1 anything else. Errors are one line each, without a traceback unless --debug.
"""

import argparse
import errno
import os
import signal
import sys
import traceback
from collections.abc import Collection, Sequence
from pkgutil import resolve_name
from typing import Any

from megatron_fanformer import __version__
from megatron_fanformer.convert.verb import CONVERT, MERGE
from megatron_fanformer.demo.verb import DEMO
from megatron_fanformer.durable_files import NO_SPACE
from megatron_fanformer.errors import FanformerError, InputError, escaped, redacted
from megatron_fanformer.evaluate.verb import EVALUATE
from megatron_fanformer.experiments.verbs import EXPERIMENT, REPORT, SWEEP
from megatron_fanformer.generate.verb import CHAT, GENERATE
from megatron_fanformer.inspect.verb import INSPECT
from megatron_fanformer.options import PROGRAM, Verb, add_options
from megatron_fanformer.parity.verb import PARITY
from megatron_fanformer.plan.verb import PLAN
from megatron_fanformer.prepare.verb import PREPARE
from megatron_fanformer.runtime.device import launched_here
from megatron_fanformer.terminal import print_stderr
from megatron_fanformer.train.verbs import CONFIG, TRAIN

ALL: tuple[Verb[Any], ...] = (
    *(DEMO, PREPARE, TRAIN, CONFIG, PARITY, PLAN, EVALUATE),
    *(SWEEP, REPORT, GENERATE, CHAT, EXPERIMENT, INSPECT, CONVERT, MERGE),
)
VERBS = {verb.name: verb for verb in ALL}
"""The verbs, in the order of --help."""
REMOVED = {"check-node": "start examples/check_nodes.py by torchrun or srun, a process for each GPU"}
"""Verbs of earlier versions, and the remedy for each."""


class _Parser(argparse.ArgumentParser):
    """argparse with our errors: one line, exit code 2."""

    def error(self, message: str) -> Any:
        raise InputError(f"{message:.400}; {self.prog} --help lists the options")


class _Help(argparse.HelpFormatter):
    """argparse's help, in which the examples at the end keep their lines."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        prose, examples, lines = text.partition("\nexamples:")
        filled = super()._fill_text(prose, width, indent)
        return f"{filled}\n\n{examples}{lines}".strip() if examples else filled


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    try:
        verb, options = read_command(arguments)
        ready = verb.before(options)  # before what may import torch
        resolve_name(verb.run)(*ready)
        print(end="", flush=True)  # here a failure is still an error
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python would report at its end what it cannot write
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return _report("stopped by the keyboard", 1)
    except Exception as error:
        if debug:
            print(getattr(error, "rank_traceback", "") or traceback.format_exc(), file=sys.stderr)
        message, code = _describe(error)
        return code if getattr(error, "already_reported", False) else _report(message, code)
    return 0


def read_command(arguments: Sequence[str]) -> tuple[Verb[Any], Any]:
    """Return the verb of a command line, and the options that it takes.

    Raises:
        InputError: an argument is unknown, missing or wrong.
    """
    if arguments and arguments[0] in REMOVED:
        raise InputError(f"{arguments[0]} is no verb any more; {REMOVED[arguments[0]]}")
    named = [argument for argument in arguments if argument in VERBS][:1]  # no option before it takes such a word
    try:
        given, rest = _parser(named).parse_known_args([argument for argument in arguments if argument != "--debug"])
    except InputError as error:
        remedies = [line for name in named for line in VERBS[name].remedies(arguments)]
        raise InputError("\n".join([str(error), *remedies])) from None
    verb = VERBS[given.verb]
    return verb, verb.read(vars(given), rest, arguments)


def _report(message: str, exit_code: int) -> int:
    """Print an error, unless this rank's launcher will: then it is printed there, once."""
    if not launched_here():
        for line in escaped(redacted(message)).split("\n"):
            print_stderr(f"{PROGRAM}: {line}")
    return exit_code


# Errors of the machine, not of a path that the user named.
_OF_THE_MACHINE = (*NO_SPACE, errno.EIO, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ESTALE)


def _describe(error: Exception) -> tuple[str, int]:
    """Return the message and the exit code of an error; of an OSError, that the system refused its path."""
    if isinstance(error, FanformerError):
        return str(error), error.exit_code
    if isinstance(error, ModuleNotFoundError):
        message = f"package {error.name} is not installed for {sys.executable}; activate .venv, or make install"
        return message, InputError.exit_code
    if not isinstance(error, OSError):
        return f"{type(error).__name__}: {error} (--debug shows where)", 1
    reason = error.strerror or str(error)
    if error.filename is None:
        return f"{reason}; --debug shows where", 1
    name = f"{error.filename!s:.200}"
    if error.errno not in _OF_THE_MACHINE:
        return f"{name} cannot be used ({reason}); name another path, or change what is there", InputError.exit_code
    return f"{name} cannot be used ({reason}); free what ran out, or repair the disk, and start again", 1


def _parser(described: Collection[str] = VERBS) -> argparse.ArgumentParser:
    """Return the parser of all verbs; only the named ones have their options, which take time to read."""
    parser = _Parser(prog=PROGRAM, description="Pretrain FANformer language models, on CPUs and GPUs.")
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    parser.add_argument("--debug", action="store_true", help="show tracebacks (anywhere on the line)")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB", parser_class=_Parser)
    for verb in VERBS.values():
        subparser = verbs.add_parser(verb.name, help=verb.help, description=verb.help, formatter_class=_Help)
        if verb.name not in described:
            continue
        add_options(subparser, verb.options)
        examples = [f"  {PROGRAM} {example}".replace("\n", " \\\n      ") for example in verb.examples]
        subparser.epilog = "\n".join([verb.notes, "examples:", *examples])
    return parser
