"""The log of a run and its last lines: the standard `logging` module, set up once per process.

Modules log what they do with `logging.getLogger(__name__)`. INFO is for the user: rank 0 prints it, above the live
line. DEBUG is for whoever looks into a run afterwards. Both are in the log file, if there is one: one file per
rank, with Python's warnings and the traceback of the error that ended the rank. What other ranks log is nowhere else.
"""

import faulthandler
import logging
import os
import shlex
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from logging.handlers import MemoryHandler
from pathlib import Path

from rich.console import Console

from megatron_fanformer.checkpoint import run_folder
from megatron_fanformer.errors import FanformerError, InputError, Interrupted
from megatron_fanformer.processes import seconds_since_start
from megatron_fanformer.terminal import FILE_ONLY
from megatron_fanformer.train.logger_kinds import clock
from megatron_fanformer.train.loggers import LOGGERS, LoggingConfig
from megatron_fanformer.train.metrics import VALIDATION_PREFIX, last_metrics
from megatron_fanformer.train.recovery import TOTALS

PACKAGE = "megatron_fanformer"
PYTHON_WARNINGS = "py.warnings"  # the logger that logging.captureWarnings writes to
SLOW_SECONDS = 1.0  # after which a part of a run's start is logged
NEW_TOKENS = 64  # that `generate` adds to a prompt by default, if the model's context has room for them
UNWRITTEN_RECORDS = 10_000  # kept for the file; there is none yet while a run is being checked

logger = logging.getLogger(__name__)


def log_file(config: LoggingConfig, stated: Path | None, *, rank: int, world_size: int) -> Path | None:
    """Return the log file of a rank; None if none is configured.

    Args:
        stated: the path on the command line; with several ranks each puts its number before the suffix. It takes
            precedence over `logging.folder`.
    """
    if stated is not None:
        return stated if world_size == 1 else stated.with_name(f"{stated.stem}.rank-{rank:05d}{stated.suffix}")
    return None if config.folder is None else Path(config.folder) / f"rank-{rank:05d}.log"


class RunLog:
    """The log of this process, while `run_log` lasts."""

    def __init__(self, rank: int) -> None:
        self.console = Console(markup=False)
        """The terminal. Whatever shows a live line on it must use this one."""
        self._rank = rank
        # The second keeps logging's handler of last resort from printing where there is no other.
        self._handlers: list[logging.Handler] = [
            MemoryHandler(UNWRITTEN_RECORDS, flushLevel=logging.CRITICAL + 1),
            logging.NullHandler(),
        ]
        if rank == 0:
            self._handlers.append(_Terminal(self.console))
        for handler in self._handlers:
            logging.getLogger().addHandler(handler)

    def write_to(self, file: Path | None) -> None:
        """Write the log to a file, with its records so far; None: to none.

        Raises:
            InputError: the file cannot be written.
        """
        unwritten = self._handlers.pop(0)
        logging.getLogger().removeHandler(unwritten)
        assert isinstance(unwritten, MemoryHandler), "a log has one file"
        if file is not None:
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                handler = logging.FileHandler(file, encoding="utf-8")  # appends: a resumed run keeps its earlier log
            except OSError as error:
                raise InputError(
                    f"log file {file} cannot be written ({error.strerror}); name another with --log-file or "
                    "logging.folder"
                ) from None
            pattern = f"%(asctime)s %(levelname)s rank {self._rank} %(name)s: %(message)s"
            handler.setFormatter(logging.Formatter(pattern))
            unwritten.setTarget(handler)
            self._handlers.insert(0, handler)
            logging.getLogger().addHandler(handler)
            assert handler.stream is not None
            faulthandler.enable(handler.stream)  # stacks, where a library aborts the process, as NCCL's watchdog does
        unwritten.close()  # which passes on its records

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
        logger.info("%s", stop, extra=FILE_ONLY)
        raise
    except BaseException as error:
        logger.error("ended by %s: %s", type(error).__name__, error, exc_info=True, extra=FILE_ONLY)
        raise
    finally:
        logging.captureWarnings(False)
        package.setLevel(level)
        log.close()


@contextmanager
def log_if_slow(doing: str) -> Iterator[None]:
    """Log the name of a part of a run's start, once it has taken a second."""
    timer = threading.Timer(SLOW_SECONDS, logger.info, [doing])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


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


# -- the last lines


def print_summary(run: Path) -> None:
    """Print the last lines of `train`. Nothing keeps a saved run from ending well: what cannot be read is left out."""
    with suppress(FanformerError, OSError):
        for line in last_lines(run, seconds_since_start(os.getpid())):
            print(line, flush=True)


def last_lines(run: Path, seconds: float) -> list[str]:
    """Return the results of a complete run, and commands to use next; nothing for an incomplete run.

    Read from the run's folder alone, so that it holds for ranks that a launcher started, too.

    Args:
        seconds: the time that this start of it took.

    Raises:
        InputError, CorruptError, OSError: the run's folder cannot be read.
    """
    checkpoint = run_folder.latest_checkpoint(run)
    if checkpoint is None:
        return []
    config = run_folder.saved_config(checkpoint)
    step, training = run_folder.step_of(checkpoint), config["training"]
    if step is None or step != training["train_iters"]:
        return []
    tokens = step * training["global_batch_size"] * config["model"]["seq_length"]
    metrics = last_metrics(run) or {}
    if metrics.get("step") != step:
        metrics = {}
    count = metrics.get(TOTALS["skipped"])
    skipped = f" ({count:,} of them skipped)" if count else ""
    losses = [
        f"{loss:.4f} ({name.removeprefix(VALIDATION_PREFIX)})"
        for name, loss in metrics.items()
        if name.startswith(VALIDATION_PREFIX)
    ]
    validation = f"validation loss {', '.join(losses)}; " if losses else ""
    commands = [["inspect", str(run)]]
    length = config["model"]["seq_length"]
    if run_folder.attached_tokenizer(checkpoint) is not None:
        fewer = ["--max-new-tokens", str(length // 2)] if length < 2 * NEW_TOKENS else []
        is_chat = config["data"].get("format") == "sft"
        commands.append(["chat", str(run)] if is_chat else ["generate", str(run), "--prompt", "The", *fewer])
    whole = run if run.name else run.absolute()  # `.` has no name
    export = whole.with_name(f"{whole.name}-hf")
    if not export.exists():
        commands.append(["convert", str(run), str(export), "--to", "hf"])
    made = [f"{run_folder.CHECKPOINTS}/{checkpoint.name}", *(file for kind in LOGGERS.values() for file in kind.files)]
    return [
        f"complete: {step:,} of {step:,} steps{skipped}, {tokens:,} tokens; {validation}this start took"
        f" {clock(seconds)}",
        f"in {run}: {', '.join(name for name in made if (run / name).exists())}",
        "next:",
        *(f"  megatron-fanformer {shlex.join(words)}" for words in commands),
    ]
