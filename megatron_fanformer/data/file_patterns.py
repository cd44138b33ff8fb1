"""Glob patterns of files on this machine. Python's `glob` passes over a folder that it cannot read; here it is refused,
as its files would be missing from what is read.
"""

import errno
import glob
import os

from megatron_fanformer.errors import InputError

NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
"""The errors of a name that has no files behind it, of which none can be missing."""


def matching(pattern: str) -> list[str]:
    """Return what matches a pattern, in no order; `**` stands for folders at any depth.

    Raises InputError for a folder that would have to be searched, and cannot be.
    """
    _look_along(pattern)
    return glob.glob(pattern, recursive=True)


def look_into(folder: str, name: str | None = None) -> None:
    """Raise InputError for a folder that cannot be read: to list it, or to look for a name in it."""
    try:
        if name is None:
            os.scandir(folder or ".").close()
        else:
            os.lstat(os.path.join(folder, name))
    except OSError as error:
        if error.errno not in NOT_THERE:
            raise unread(folder, error) from error


def unread(folder: str, error: OSError) -> InputError:
    """Return the error of a folder that cannot be read."""
    name = folder.rstrip("/") or folder
    return InputError(
        f"{name} cannot be searched ({error.strerror}), its files would be missing; make it readable, or name the other"
        " folders"
    )


def _look_along(pattern: str) -> None:
    """Look into every folder that is searched for a pattern: the folders of its beginning first."""
    folder, name = os.path.split(pattern)
    folders = [folder]
    if glob.has_magic(folder):
        _look_along(folder)
        folders = _folders_of(folder)
    if name == "**":
        folders += _folders_of(pattern)
    for each in folders:
        look_into(each, None if glob.has_magic(name) else name)


def _folders_of(pattern: str) -> list[str]:
    return glob.glob(os.path.join(pattern, ""), recursive=True)
