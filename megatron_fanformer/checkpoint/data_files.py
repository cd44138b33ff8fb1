"""Reading of torch files as data: tensors and plain values, nothing else.

A torch archive contains a pickle, which may execute code when it is loaded. These functions load it with torch's option
`weights_only`, which refuses everything but data. Objects of other programs become `Record`s: no class is imported.
"""

import io
import pickle
import re
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist

from megatron_fanformer.checkpoint.manifest import versions
from megatron_fanformer.durable_files import regular_file
from megatron_fanformer.errors import CorruptError, FanformerError

_DAMAGE: tuple[type[BaseException], ...] = (
    RuntimeError,
    ValueError,
    LookupError,
    EOFError,
    AttributeError,
    TypeError,
    zipfile.BadZipFile,
)
TRUSTED = "use a checkpoint from a trusted source"
EARLIER = "use an earlier checkpoint"
PICKLE = "data.pkl"  # the pickle in a torch archive; the tensors' bytes are in other records


class UnreadableError(CorruptError):
    """Reading a checkpoint's file failed; if its SHA-256 is right, torch's or megatron-core's version is the cause."""


def load_data(file: Any, *, mapped: bool = False) -> Any:
    """Load the tensors and plain values of a torch file (path or stream); call this within `reporting_damage`."""
    _refuse_compressed(file)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected pickle protocol")  # an unusual protocol alone does no harm
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)


def _refuse_compressed(file: Any) -> None:
    """Raise ValueError if an archive is compressed: torch never does that, and a few kB could expand to fill memory."""
    if zipfile.is_zipfile(file):  # otherwise it is a pickle without an archive, the older format
        with zipfile.ZipFile(file) as archive:
            if any(part.compress_type != zipfile.ZIP_STORED for part in archive.infolist()):
                raise ValueError("it is compressed, as torch's archives never are")
    if not isinstance(file, str | Path):
        file.seek(0)  # `is_zipfile` has moved the position in the stream


def check_archive(path: Path, name: str, file: Any) -> None:
    """Raise CorruptError, which names `path` and `name`, if a record of the archive `file` has a wrong CRC-32."""
    try:
        with zipfile.ZipFile(file) as archive:
            damaged = archive.testzip()
        reason = None if damaged is None else f"CRC-32 of {damaged}"
    except (zipfile.BadZipFile, EOFError, NotImplementedError, ValueError) as error:
        reason = str(error)
    if reason is not None:
        raise CorruptError(f"{path} is damaged in {name} ({reason}); copy it again, or use another")


def read_entry(path: Path, offset: int, length: int) -> Any:
    """Load the torch archive in a range of a file's bytes; raise CorruptError if the archive is damaged."""
    with reporting_damage(path):
        is_whole_file = regular_file(path).stat().st_size == length
        # A file of `write_full_tensors` holds one tensor. It is mapped: reading it takes longer than most uses of it.
        return load_data(path, mapped=True) if is_whole_file else load_data(read_part(path, offset, length))


def read_part(path: Path, offset: int, length: int) -> io.BytesIO:
    """Return a range of bytes of a file as a stream; raise CorruptError if the file ends within the range."""
    with regular_file(path).open("rb") as stream:
        stream.seek(offset)
        content = stream.read(length)
    if len(content) < length:
        raise CorruptError(f"{path} ends too early; {EARLIER}")
    return io.BytesIO(content)


@contextmanager
def reporting_damage(
    source: Path | str, *, trusted: str = TRUSTED, whole: str = EARLIER, also: tuple[type[BaseException], ...] = ()
) -> Iterator[None]:
    """Raise CorruptError in place of the exceptions that reading `source` in the block raises.

    Args:
        trusted: the remedy in the message if `source` holds more than data.
        whole: the remedy in the message if `source` is damaged.
        also: further exceptions that a damaged file causes.
    """
    try:
        yield
    except (FanformerError, torch.OutOfMemoryError, dist.DistError):  # the file does not cause these
        raise
    except pickle.UnpicklingError as error:
        refused = re.search(r"(?<=GLOBAL )[\w.]+|Unsupported [\w ]+", str(error))  # torch's message is a page long
        name = refused[0] if refused else _first_line(error)
        raise CorruptError(
            f"{source} is damaged, or holds more than data ({name}), which loading might execute; {trusted}"
        ) from error
    except OSError as error:
        raise CorruptError(f"{source} cannot be read: {_first_line(error)}; {whole}") from error
    except (*_DAMAGE, *also) as error:
        readers = ", ".join(f"{name} {versions()[name]}" for name in ("torch", "megatron-core"))
        raise UnreadableError(f"{source} cannot be read: {_first_line(error)} ({readers}); {whole}") from error


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


# -- objects of other programs


class Record:
    """A stand-in for an object or a function in a pickle; calling it executes nothing."""

    state: Any = None
    """The attributes of the object, usually by name."""

    def __init__(self, *_arguments: Any, **_options: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def append(self, _item: Any) -> None:
        """Ignore an item of an object that is a list."""

    def __setitem__(self, _key: Any, _value: Any) -> None:
        """Ignore an item of an object that is a dict."""


class RestrictedUnpickler(pickle.Unpickler):
    """An unpickler that imports nothing: for each module and name, `find` returns the object or raises an error."""

    def __init__(self, stream: BinaryIO, find: Callable[[str, str], Any]) -> None:
        super().__init__(stream)
        self._find = find

    def find_class(self, module: str, name: str) -> Any:
        """Return the object that `find` allows for a name in a module."""
        return self._find(module, name)

    def persistent_load(self, _identifier: Any) -> None:
        """Return None instead of a tensor's bytes."""


def read_records(file: Any) -> Any:
    """Return the plain values of a torch archive, with `Record`s for objects; raise ValueError if it is damaged."""
    try:
        _refuse_compressed(file)
        with zipfile.ZipFile(file) as archive:
            (name,) = [name for name in archive.namelist() if name.rpartition("/")[2] == PICKLE]
            return RestrictedUnpickler(io.BytesIO(archive.read(name)), lambda _module, _name: Record).load()
    except Exception as error:  # damaged archives and pickles raise exceptions of every kind
        raise ValueError(f"it is damaged, or not an archive of torch's ({error})") from error
