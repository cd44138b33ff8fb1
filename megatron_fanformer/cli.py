"""The command `megatron-fanformer VERB`: parses the command line, and calls the verb's function.

The package of a verb declares the verb in a `Verb`. The module of the verb's function is imported only when the verb
runs: torch and megatron-core take seconds to import, and wrong options are reported before that.

Exit codes: 0 done, 2 the user's input is wrong, 3 data or a checkpoint is corrupt, 4 a loss or a gradient norm is not
finite, 5 stopped on a signal, 1 anything else. An error is one line, without a traceback unless --debug is given.
"""

import argparse
import errno
import os
import shutil
import signal
import sys
import textwrap
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
"""The verbs, in the order of --help."""
VERBS = {verb.name: verb for verb in ALL}
REMOVED = {"check-node": "start examples/check_nodes.py by torchrun or srun, a process for each GPU"}
"""The remedies for verbs of earlier versions."""
# Error numbers of a failing or full machine; any other OSError means that the user named a wrong path.
_MACHINE_ERRORS = (*NO_SPACE, errno.EIO, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ESTALE)


class _Parser(argparse.ArgumentParser):
    """argparse with errors of one line, and exit code 2."""

    def error(self, message: str) -> Any:
        raise InputError(f"{message:.400}; {self.prog} --help lists the options")  # argparse's method would exit


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, by default this process's, and return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # numpy's threads would spin for 0.1 s, and have little to do
    try:
        verb, options = read_command(arguments)
        run_arguments = verb.before(options)  # before the next line imports torch
        resolve_name(verb.run)(*run_arguments)
        print(end="", flush=True)  # a failure to write raises here; when Python ends, it would be too late to report it
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # otherwise Python would report the broken pipe again at its end
        return 128 + signal.SIGPIPE
    except (Exception, KeyboardInterrupt) as error:
        if "--debug" in arguments:
            print(getattr(error, "rank_traceback", "") or traceback.format_exc(), file=sys.stderr)
        message, code = _describe(error)
        if not getattr(error, "already_reported", False) and not launched_here():  # a launcher prints its ranks' errors
            for line in escaped(redacted(message)).split("\n"):
                print_stderr(f"{PROGRAM}: {line}")
        return code
    return 0


def read_command(arguments: Sequence[str]) -> tuple[Verb[Any], Any]:
    """Return the verb of a command line, and the verb's options; `--debug`, which `main` reads, may stand anywhere.

    Raises InputError if an argument is unknown, missing or wrong.
    """
    if arguments and arguments[0] in REMOVED:
        raise InputError(f"{arguments[0]} is no verb any more; {REMOVED[arguments[0]]}")
    named = [argument for argument in arguments if argument in VERBS][:1]  # at most the verb: no value precedes it
    try:
        parsed, rest = _parser(named).parse_known_args([argument for argument in arguments if argument != "--debug"])
    except InputError as error:
        remedies = [remedy for name in named for remedy in VERBS[name].remedies(arguments)]
        raise InputError("\n".join([str(error), *remedies])) from None
    verb = VERBS[parsed.verb]
    return verb, verb.read(vars(parsed), rest, arguments)


def _describe(error: BaseException) -> tuple[str, int]:
    """Return an error's message and exit code: of an OSError 2 if the path is wrong, 1 if the machine fails."""
    if isinstance(error, FanformerError):
        return str(error), error.exit_code
    if isinstance(error, ModuleNotFoundError):
        message = f"package {error.name} is not installed for {sys.executable}; activate .venv, or make install"
        return message, InputError.exit_code
    if isinstance(error, KeyboardInterrupt):
        return "stopped by the keyboard", 1
    if not isinstance(error, OSError):
        return f"{type(error).__name__}: {error} (--debug shows where)", 1
    reason = error.strerror or str(error)
    if error.filename is None:
        return f"{reason}; --debug shows where", 1
    name = f"{error.filename!s:.200}"
    if error.errno not in _MACHINE_ERRORS:
        return f"{name} cannot be used ({reason}); name another path, or change what is there", InputError.exit_code
    return f"{name} cannot be used ({reason}); free space, memory or files, or repair the disk, and start again", 1


def _parser(described: Collection[str] = VERBS) -> argparse.ArgumentParser:
    """Return the parser of all verbs; to save time, only the verbs in `described` get their options."""
    parser = _Parser(prog=PROGRAM, description="Pretrain FANformer language models, on CPUs and GPUs.")
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    parser.add_argument("--debug", action="store_true", help="show tracebacks (anywhere on the line)")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB", parser_class=_Parser)
    for verb in VERBS.values():
        subparser = verbs.add_parser(verb.name, help=verb.help, formatter_class=argparse.RawDescriptionHelpFormatter)
        if verb.name in described:
            width = max(11, shutil.get_terminal_size().columns - 2)  # 11 is argparse's own least width
            subparser.description = textwrap.fill(verb.help, width)
            add_options(subparser, verb.options)
            examples = [f"  {PROGRAM} {example}".replace("\n", " \\\n      ") for example in verb.examples]
            notes = [textwrap.fill(verb.notes, width), ""] if verb.notes else []
            subparser.epilog = "\n".join([*notes, "examples:", *examples])
    return parser
