"""The log of a run: the standard `logging` module, set up once per process.

Modules log what they do with `logging.getLogger(__name__)`. INFO is for the user: rank 0 prints it, above the live
line. DEBUG is for whoever looks into a run afterwards. Both are in the log file, if there is one: one file per
rank, with Python's warnings and the traceback of the error that ended the rank. What other ranks log is nowhere else.
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
    """The log of this process, while `run_log` lasts."""

    def __init__(self, rank: int) -> None:
        self.console = _Output(markup=False)
        """The terminal. Whatever shows a live line on it must use this one."""
        self._rank = rank
        # Without a handler, logging would print warnings by its own of last resort.
        self._handlers: list[logging.Handler] = [logging.NullHandler()]
        if rank == 0:
            self._handlers.append(_Terminal(self.console))
        for handler in self._handlers:
            logging.getLogger().addHandler(handler)

    def write_to(self, folder: str | None) -> None:
        """Write the log to this rank's file in a folder from now on; None: to none.

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
        pattern = f"%(asctime)s %(levelname)s rank {self._rank} %(name)s: %(message)s"
        handler.setFormatter(logging.Formatter(pattern))
        self._handlers.append(handler)
        logging.getLogger().addHandler(handler)
        assert handler.stream is not None
        faulthandler.enable(handler.stream)  # stacks, where a library aborts the process, as NCCL's watchdog does

    def close(self) -> None:
        """Receive nothing any more."""
        faulthandler.disable()
        for handler in self._handlers:
            logging.getLogger().removeHandler(handler)
            handler.close()


@contextmanager
def run_log(rank: int) -> Iterator[RunLog]:
    """Set up the log of a rank around all that it does; the error that ends it is logged, and propagates."""
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


class _Output(Console):
    def on_broken_pipe(self) -> None:
        with suppress(SystemExit):  # nobody reads any more, and the run goes on
            super().on_broken_pipe()


class _Terminal(logging.Handler):
    """Prints records for the user; each of Python's warnings once."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.INFO)
        self._console = console
        self._warnings: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage().rstrip()
        if getattr(record, "file_only", False):
            return
        if record.name == PYTHON_WARNINGS:
            if text in self._warnings:
                return
            self._warnings.add(text)
        self._console.print(text, highlight=False, soft_wrap=True, markup=False, emoji=False)
