"""What can go wrong, as exit codes; every room may raise these, and `cli` alone turns them into an exit.

A message names the value, the rule that it breaks and the remedy, on one line.
"""


class FanformerError(Exception):
    """A failure that the user is told about in one line, without a traceback."""

    exit_code = 1
    is_told_elsewhere = False
    """Whether it is another rank's error, raised here too so that this one ends alike: not to be printed again."""


class InputError(FanformerError, ValueError):
    """The user's input is wrong: a configuration, a path, an option, a document."""

    exit_code = 2


class CorruptError(FanformerError):
    """Data or a checkpoint is damaged, or fails its verification."""

    exit_code = 3


class DivergenceError(FanformerError):
    """The numbers went bad: a loss or a gradient norm that is not finite."""

    exit_code = 4


class Interrupted(FanformerError):
    """Stopped on a signal after saving; the same command goes on from there."""

    exit_code = 5
