"""What a torch archive says of objects whose classes are not imported: each is recorded, and none is made.

For the plain values of another program's checkpoint, which keeps them as objects of its own: torch's reading of weights
(data_files.py) refuses these, or makes them where their classes were declared safe.
"""

import io
import pickle
import zipfile
from typing import Any, BinaryIO, ClassVar

from megatron_fanformer.checkpoint.data_files import refuse_compressed

PICKLE = "data.pkl"  # in an archive, beside the bytes of its tensors


class Record:
    """An object of a pickle. What a pickle would call to make it is not called, but makes another record."""

    class_name: ClassVar[str]
    """With its module."""
    arguments: tuple[Any, ...]
    """What the class, or the function, would be called with."""
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


class _Recorder(pickle.Unpickler):
    """Finds no class, no function and no tensor; so a pickle has nothing to call but records."""

    def find_class(self, module: str, name: str) -> Any:
        return type("Record", (Record,), {"class_name": f"{module}.{name}"})

    def persistent_load(self, _identifier: Any) -> None:
        """A tensor's bytes."""


def read_records(stream: BinaryIO) -> Any:
    """The plain values of a torch archive, with a `Record` in the place of everything else.

    Raises:
        ValueError: it is no torch archive, or damaged.
    """
    refuse_compressed(stream)
    try:
        with zipfile.ZipFile(stream) as archive:
            (name,) = [name for name in archive.namelist() if name.rpartition("/")[2] == PICKLE]
            return _Recorder(io.BytesIO(archive.read(name))).load()
    except Exception as error:  # a damaged archive, and a damaged pickle, raise anything
        raise ValueError(f"it is damaged, or no archive of torch's ({error})") from error
