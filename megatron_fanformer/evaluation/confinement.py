"""What a confined process does: it takes its rights from itself, then runs one program. (`code_execution` starts it.)

It reads nothing from the package but this file's neighbours, so that it starts in a fraction of a second.
"""

import os
import resource
import signal
import sys
import types

from megatron_fanformer.evaluation.system_calls import refuse_system_calls
from megatron_fanformer.processes import end_with_owner

UNCONFINED = "unconfined: "
"""Begins what is told where the rights could not be taken; the program was not run."""
MOST_TOLD = 300  # characters of an error
MOST_OPEN_FILES = 64


def main() -> None:
    """Run the program of the standard input.

    Arguments: the owner's process id, the file to tell how it ended, bytes of memory, seconds of CPU time. What comes
    first in the standard input, a line, is told if the program reaches its end, and an error's name and text if not.
    """
    owner, report, memory_bytes, cpu_seconds = map(int, sys.argv[1:])
    end_with_owner(owner)
    password, _, source = sys.stdin.buffer.read().partition(b"\n")
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        os.dup2(os.open(os.devnull, os.O_RDWR), stream.fileno())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner's affair
    # A module of its own, so that the program finds nothing of this one by its name.
    module = types.ModuleType("__main__")
    sys.argv, sys.modules["__main__"] = ["program"], module
    try:
        _limit(memory_bytes, cpu_seconds)
        refuse_system_calls()
    except (OSError, ValueError) as error:
        told = f"{UNCONFINED}{error}".encode()
    else:
        told = _run(source, module) or password
    os.write(report, told)
    os._exit(0)  # whatever threads and exit handlers the program has left


def _run(source: bytes, module: types.ModuleType) -> bytes:
    """What went wrong; nothing where the program reached its end."""
    try:
        exec(compile(source, "<program>", "exec"), module.__dict__)
    except BaseException as error:  # SystemExit too: a program that leaves has not reached its end
        text = " ".join(str(error).split())
        return f"{type(error).__name__}: {text}"[:MOST_TOLD].encode(errors="replace")
    return b""


def _limit(memory_bytes: int, cpu_seconds: int) -> None:
    for what, limit in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, MOST_OPEN_FILES),
    ):
        resource.setrlimit(what, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 1))  # SIGXCPU, then SIGKILL


if __name__ == "__main__":
    main()
