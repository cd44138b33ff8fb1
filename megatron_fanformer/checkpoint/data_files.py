"""The files of a checkpoint, and of other folders of weights, read as data: tensors and plain values, nothing else.

A torch archive is a pickle, which executes what it names when it is loaded as one. It is loaded here the way torch
loads weights, which refuses all that is not data. (The table of a checkpoint's tensors is read in tensor_table.py.)
The plain values of another program's checkpoint, which keeps them as objects of its own, come as records: no class is
imported, and nothing is made.
"""

import io
import pickle
import re
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import torch
import torch.distributed as dist

from megatron_fanformer.checkpoint.versions import UnreadableError, reader
from megatron_fanformer.durable_files import regular_file
from megatron_fanformer.errors import CorruptError, FanformerError

_UNREADABLE: tuple[type[BaseException], ...] = (
    RuntimeError,
    ValueError,
    LookupError,
    EOFError,
    AttributeError,
    TypeError,
    zipfile.BadZipFile,
)
_NOT_ITS_FAULT = (FanformerError, torch.OutOfMemoryError, dist.DistError)
TRUSTED = "use a checkpoint from a trusted source"
EARLIER = "use an earlier checkpoint"
PICKLE = "data.pkl"  # in an archive, beside the bytes of its tensors


def load_data(file: Any, *, mapped: bool = False) -> Any:
    """Load a torch file as tensors and plain values; refuse anything else.

    Raises:
        pickle.UnpicklingError: it holds something else.
        ValueError: it is compressed.
    """
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
        file.seek(0)  # looking for an archive moves it, found or not


def check_archive(path: Path, name: str, stream: Any) -> None:
    """Check the CRC-32 that each record of an archive carries, which is a zip file.

    Args:
        path, name: of the file, and of its content, for errors.

    Raises:
        CorruptError: it is not a complete archive, or a record has changed since it was written.
    """
    try:
        with zipfile.ZipFile(stream) as archive:
            damaged = archive.testzip()
    except (zipfile.BadZipFile, EOFError, NotImplementedError, ValueError) as error:
        raise CorruptError(f"{path} is damaged in {name} ({error}); copy it again, or use another") from error
    if damaged is not None:
        raise CorruptError(f"{path} is damaged in {name} (CRC-32 of {damaged}); copy it again, or use another")


def read_entry(path: Path, offset: int, length: int) -> Any:
    """Return the tensor, or the plain values, in a range of bytes of a file.

    Raises:
        CorruptError: it is damaged, or holds more than data.
    """
    with reporting_damage(path):
        # A file of one entry, as `write_full_tensors` makes them, is mapped: copying takes longer than most uses.
        is_whole = regular_file(path).stat().st_size == length
        return load_data(path, mapped=True) if is_whole else load_data(read_part(path, offset, length))


def read_part(path: Path, offset: int, length: int) -> io.BytesIO:
    """Return a range of bytes of a file, as a file.

    Raises:
        CorruptError: the file ends before it.
    """
    with regular_file(path).open("rb") as stream:
        stream.seek(offset)
        content = stream.read(length)
    if len(content) < length:
        raise CorruptError(f"{path} ends too early; {EARLIER}")
    return io.BytesIO(content)


@contextmanager
def reporting_damage(
    what: Path | str,
    *,
    trusted: str = TRUSTED,
    whole: str = EARLIER,
    also: tuple[type[BaseException], ...] = (),
) -> Iterator[None]:
    """Turn the exceptions of damaged files, and of those with more than data, into a CorruptError.

    Args:
        what: the file, or whatever else is read.
        trusted: the remedy where it holds more than data.
        whole: the remedy where it is damaged.
        also: further exceptions that damage raises.
    """
    try:
        yield
    except _NOT_ITS_FAULT:
        raise
    except pickle.UnpicklingError as error:
        raise CorruptError(
            f"{what} holds more than data ({what_was_refused(error)}), which loading might execute; {trusted}"
        ) from error
    except OSError as error:
        raise CorruptError(f"{what} cannot be read: {first_line(error)}; {whole}") from error
    except (*_UNREADABLE, *also) as error:
        raise UnreadableError(f"{what} cannot be read: {first_line(error)} ({reader()}); {whole}") from error


def what_was_refused(error: pickle.UnpicklingError) -> str:
    """Return the name that torch refused in a pickle; its message is a page long."""
    match = re.search(r"GLOBAL ([\w.]+)|(Unsupported [\w ]+)", str(error))
    return (match[1] or match[2]) if match else first_line(error)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; the error's name if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


# -- objects of other programs


class Record:
    """An object of a pickle. Calls in the pickle make further records, and execute nothing."""

    class_name: ClassVar[str]
    """The class's name with its module."""
    arguments: tuple[Any, ...]
    """Arguments that the class, or the function, would be called with."""
    state: Any = None
    """Its attributes, usually by name; None where it has none of its own."""

    def __new__(cls, *arguments: Any, **_options: Any) -> "Record":
        """Whatever the class of the object would be called with."""
        record = super().__new__(cls)
        record.arguments = arguments
        return record

    def __init__(self, *_arguments: Any, **_options: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __repr__(self) -> str:
        return f"<{self.class_name}>"

    def append(self, _item: Any) -> None:
        """Nothing: items of other kinds of lists are not kept."""

    def __setitem__(self, _key: Any, _value: Any) -> None:
        """Nothing: nor are those of other kinds of mappings."""


class RestrictedUnpickler(pickle.Unpickler):
    """An unpickler that executes nothing: names in a pickle are looked up by `find`, and tensors are left out."""

    def __init__(self, stream: BinaryIO, find: Callable[[str, str], Any]) -> None:
        super().__init__(stream)
        self._find = find

    def find_class(self, module: str, name: str) -> Any:
        """Look a name of a module up."""
        return self._find(module, name)

    def persistent_load(self, _identifier: Any) -> None:
        """Return nothing in the place of a tensor's bytes."""


def _find_record(module: str, name: str) -> type[Record]:
    return type("Record", (Record,), {"class_name": f"{module}.{name}"})


def read_records(file: Any) -> Any:
    """Return the plain values of a torch archive, with a `Record` in the place of everything else.

    Raises:
        ValueError: it is not a torch archive, or is damaged.
    """
    try:
        _refuse_compressed(file)
        with zipfile.ZipFile(file) as archive:
            (name,) = [name for name in archive.namelist() if name.rpartition("/")[2] == PICKLE]
            return RestrictedUnpickler(io.BytesIO(archive.read(name)), _find_record).load()
    except Exception as error:  # a damaged archive, and a damaged pickle, raise anything
        raise ValueError(f"it is damaged, or no archive of torch's ({error})") from error
