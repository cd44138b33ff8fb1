"""The log of a run: the standard `logging` module, set up once per process.

Modules log with `logging.getLogger(__name__)`. INFO is for the user: rank 0 prints it above the progress line. DEBUG is
for debugging a run afterwards. If `logging.folder` is set, each rank writes both levels to a file there, with Python's
warnings and the traceback of the error that ended the rank. Ranks other than 0 print nothing.
"""

import faulthandler
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.console import Console

from megatron_fanformer.errors import InputError, Interrupted

PACKAGE = "megatron_fanformer"
PYTHON_WARNINGS = "py.warnings"  # the logger that logging.captureWarnings writes to

logger = logging.getLogger(__name__)


class RunLog:
    """The log of this process within `run_log`."""

    def __init__(self, rank: int) -> None:
        self.console = _TolerantConsole(markup=False)
        """The terminal. A progress line must be shown through this object, so that log lines appear above the line."""
        self._rank = rank
        # Without any handler, Python's `logging.lastResort` would print warnings.
        self._handlers: list[logging.Handler] = [logging.NullHandler()]
        if rank == 0:
            self._handlers.append(_TerminalHandler(self.console))
        for handler in self._handlers:
            logging.getLogger().addHandler(handler)

    def write_to(self, folder: str | None) -> None:
        """Write the log to this rank's file in `folder` from now on, or to no file if `folder` is None.

        Raises:
            InputError: the file cannot be written.
        """
        if folder is None:
            return
        file = Path(folder) / f"rank-{self._rank:05d}.log"
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            handler = logging.FileHandler(file, encoding="utf-8")  # appends: a resumed run keeps its earlier log
        except OSError as error:
            raise InputError(
                f"log file {file} cannot be written ({error.strerror}); name another logging.folder"
            ) from None
        handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s rank {self._rank} %(name)s: %(message)s"))
        self._handlers.append(handler)
        logging.getLogger().addHandler(handler)
        assert handler.stream is not None
        faulthandler.enable(handler.stream)  # writes the stacks if a library aborts the process, as NCCL's watchdog may

    def close(self) -> None:
        """Detach all handlers and close the file."""
        faulthandler.disable()
        for handler in self._handlers:
            logging.getLogger().removeHandler(handler)
            handler.close()


@contextmanager
def run_log(rank: int) -> Iterator[RunLog]:
    """Set up the log of a rank for the block; an error that ends the block is logged and raised again."""
    package = logging.getLogger(PACKAGE)
    level = package.level
    log = RunLog(rank)
    package.setLevel(logging.DEBUG)
    logging.captureWarnings(True)
    try:
        yield log
    except Interrupted as stop:
        logger.info("%s", stop, extra={"file_only": True})
        raise
    except BaseException as error:
        logger.error("ended by %s: %s", type(error).__name__, error, exc_info=True, extra={"file_only": True})
        raise
    finally:
        logging.captureWarnings(False)
        package.setLevel(level)
        log.close()


class _TolerantConsole(Console):
    """A console that outlives the reader of its output: rich would end the process, but the run must go on."""

    def on_broken_pipe(self) -> None:
        with suppress(SystemExit):
            super().on_broken_pipe()


class _TerminalHandler(logging.Handler):
    """Prints records of level INFO and above; repeated Python warnings only once."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.INFO)
        self._console = console
        self._printed_warnings: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage().rstrip()
        if getattr(record, "file_only", False) or text in self._printed_warnings:
            return
        if record.name == PYTHON_WARNINGS:
            self._printed_warnings.add(text)
        self._console.print(text, highlight=False, soft_wrap=True, markup=False, emoji=False)
