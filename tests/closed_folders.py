"""A folder that cannot be read: tests may run as root, for whom none is closed."""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


@contextmanager
def closed_folder(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The system neither lists folders of a name nor says what is in them, while the block runs."""

    def refusing(call: Callable[..., Any], *, is_listed: bool) -> Callable[..., Any]:
        def refused(path: Any = ".", **named: Any) -> Any:
            place = Path(path)
            if name in (place.parts if is_listed else place.parent.parts):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return call(path, **named)

        return refused

    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", refusing(os.scandir, is_listed=True))
        patched.setattr(os, "lstat", refusing(os.lstat, is_listed=False))
        yield
