"""Torch files read as data: tensors and plain values, nothing else.

A torch archive is a pickle, which may execute code when it is loaded as one. It is loaded here as torch loads weights,
which refuses everything but data. Objects in another program's checkpoint are read as `Record`s: no class is imported.
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
PICKLE = "data.pkl"  # in an archive, beside the bytes of its tensors


class UnreadableError(CorruptError):
    """Reading a checkpoint's file failed. If its sums are right, the reading code is of another version."""


def load_data(file: Any, *, mapped: bool = False) -> Any:
    """Load the tensors and plain values of a torch file; see `reporting_damage` for the errors of anything else."""
    _refuse_compressed(file)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected pickle protocol")  # the file is refused, or it is fine
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)


def _refuse_compressed(file: Any) -> None:
    """Raise ValueError for an archive with compressed parts: torch writes none, and a few kB could fill the memory."""
    if zipfile.is_zipfile(file):  # else it is a bare pickle
        with zipfile.ZipFile(file) as archive:
            if any(part.compress_type != zipfile.ZIP_STORED for part in archive.infolist()):
                raise ValueError("it is compressed, as torch's archives never are")
    if not isinstance(file, str | Path):
        file.seek(0)  # `is_zipfile` moved it


def check_archive(path: Path, name: str, file: Any) -> None:
    """Check the CRC-32 of each record of an archive, which is a zip file; CorruptError names `path` and `name`."""
    try:
        with zipfile.ZipFile(file) as archive:
            damaged = archive.testzip()
        reason = None if damaged is None else f"CRC-32 of {damaged}"
    except (zipfile.BadZipFile, EOFError, NotImplementedError, ValueError) as error:
        reason = str(error)
    if reason is not None:
        raise CorruptError(f"{path} is damaged in {name} ({reason}); copy it again, or use another")


def read_entry(path: Path, offset: int, length: int) -> Any:
    """Return the tensor or the plain values in a range of bytes of a file; CorruptError for anything else."""
    with reporting_damage(path):
        # A file of one entry, as `write_full_tensors` makes them, is mapped: copying takes longer than most uses.
        is_whole = regular_file(path).stat().st_size == length
        return load_data(path, mapped=True) if is_whole else load_data(read_part(path, offset, length))


def read_part(path: Path, offset: int, length: int) -> io.BytesIO:
    """Return a range of bytes of a file, as a file; CorruptError if the file ends before it."""
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
    """Turn the exceptions of damaged files, and of those with more than data, into a CorruptError.

    Args:
        trusted, whole: the remedies where `source` holds more than data, and where it is damaged.
        also: further exceptions that damage raises.
    """
    try:
        yield
    except (FanformerError, torch.OutOfMemoryError, dist.DistError):  # not the file's fault
        raise
    except pickle.UnpicklingError as error:
        refused = re.search(r"GLOBAL ([\w.]+)|(Unsupported [\w ]+)", str(error))  # in torch's page-long message
        name = (refused[1] or refused[2]) if refused else _first_line(error)
        raise CorruptError(f"{source} holds more than data ({name}), which loading might execute; {trusted}") from error
    except OSError as error:
        raise CorruptError(f"{source} cannot be read: {_first_line(error)}; {whole}") from error
    except (*_DAMAGE, *also) as error:
        readers = ", ".join(f"{name} {versions()[name]}" for name in ("torch", "megatron-core"))
        raise UnreadableError(f"{source} cannot be read: {_first_line(error)} ({readers}); {whole}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


# -- objects of other programs


class Record:
    """An object of a pickle. Calls in the pickle make further records, and execute nothing."""

    state: Any = None
    """The object's attributes, usually by name."""

    def __new__(cls, *_arguments: Any, **_options: Any) -> "Record":
        """Ignore the arguments that the class would be called with."""
        return super().__new__(cls)

    def __init__(self, *_arguments: Any, **_options: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def append(self, _item: Any) -> None:
        """Drop an item of a subclass of list."""

    def __setitem__(self, _key: Any, _value: Any) -> None:
        """Drop an item of a subclass of dict."""


class RestrictedUnpickler(pickle.Unpickler):
    """An unpickler that executes nothing: `find` looks up a pickle's names, and tensors are left out."""

    def __init__(self, stream: BinaryIO, find: Callable[[str, str], Any]) -> None:
        super().__init__(stream)
        self._find = find

    def find_class(self, module: str, name: str) -> Any:
        """Return the object that stands for a name of a module."""
        return self._find(module, name)

    def persistent_load(self, _identifier: Any) -> None:
        """Return None in the place of a tensor's bytes."""


def read_records(file: Any) -> Any:
    """Return the plain values of a torch archive, with `Record`s for objects; ValueError where it is none."""
    try:
        _refuse_compressed(file)
        with zipfile.ZipFile(file) as archive:
            (name,) = [name for name in archive.namelist() if name.rpartition("/")[2] == PICKLE]
            return RestrictedUnpickler(io.BytesIO(archive.read(name)), lambda _module, _name: Record).load()
    except Exception as error:  # a damaged archive, and a damaged pickle, raise anything
        raise ValueError(f"it is damaged, or no archive of torch's ({error})") from error
