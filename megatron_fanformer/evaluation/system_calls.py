"""A filter of system calls, for good: no network, no access to other processes, no change to a file.

By a filter that the kernel holds against each call of this process (seccomp(2)); it needs no privilege and cannot be
taken back. Calls are known by number, some by an argument: a file may be opened for reading, a thread started,
a signal raised in this process. Numbers are those of Linux's tables for x86-64 and ARM64, the only machines served.
"""

import ctypes
import errno
import os
import platform
import sys

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2  # prctl(2)
# Classic BPF (bpf_common.h): load a word of seccomp_data, jump if equal, greater or equal, or a bit is set, return.
LOAD, IF_EQUAL, IF_AT_LEAST, IF_SET, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, REFUSE = 0x7FFF0000, 0x00050000  # seccomp(2); a refusal carries the errno
NUMBER, ARCHITECTURE = 0, 4  # offsets in seccomp_data
X32 = 0x40000000  # x86-64's calls with 32-bit pointers have numbers from here
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""By the kernel's machine name: the column of the tables below, and its AUDIT_ARCH."""

CLONE_THREAD = 0x10000  # clone(2)
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
# SOCK_DGRAM, and SOCK_RAW that is made one: it sends to any address, though it is one of a pair
SOCKET_OF_DATAGRAMS = 2
OWNER_OF_SIGNALS = 8  # in F_SETOWN, F_SETSIG and F_SETOWN_EX: which process a file's signals go to, and which ones
# In FIOSETOWN and SIOCSPGRP, which do what F_SETOWN does, and in what gives the kernel a value (_IOW), as for a file's
# attributes; not in the old ones that report terminals and pipes.
GIVING_OR_OF_SOCKETS = 0x40008000

_Numbers = tuple[int | None, int | None]
"""Numbers of a system call on x86-64 and on ARM64; None where there is no such call."""

REFUSED: dict[str, _Numbers] = {
    # the network, and what reaches it past the other calls
    "socket": (41, 198),
    "bind": (49, 200),
    "connect": (42, 203),
    "io_uring_setup": (425, 425),
    # processes, and signals to others
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
    "kill": (62, 129),
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    # the share that other processes have of the machine
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    # what the kernel keeps when a process ends, and other processes' too
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "semget": (64, 190),
    "semop": (65, 193),
    "semtimedop": (220, 192),
    "semctl": (66, 191),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # files
    "creat": (85, None),
    "unlink": (87, None),
    "unlinkat": (263, 35),
    "rmdir": (84, None),
    "rename": (82, None),
    "renameat": (264, 38),
    "renameat2": (316, 276),
    "mkdir": (83, None),
    "mkdirat": (258, 34),
    "link": (86, None),
    "linkat": (265, 37),
    "symlink": (88, None),
    "symlinkat": (266, 36),
    "mknod": (133, None),
    "mknodat": (259, 33),
    "truncate": (76, 45),
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "utimensat": (280, 88),
    "futimesat": (261, None),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "setxattrat": (463, 463),
    "removexattrat": (466, 466),
    "file_setattr": (469, 469),
    "open_by_handle_at": (304, 265),
    # memory that no limit of the process counts
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    # the machine, for a process that runs as root
    "setrlimit": (160, 164),
    "mount": (165, 40),
    "move_mount": (429, 429),
    "umount2": (166, 39),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "swapon": (167, 224),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "sethostname": (170, 161),
    "reboot": (169, 142),
}
"""Calls refused with EPERM, whatever their arguments."""
NOT_THERE: dict[str, _Numbers] = {"clone3": (435, 435), "openat2": (437, 437)}
"""Calls whose flags are in memory, where a filter cannot look: refused as calls of a newer kernel, so that libraries
fall back to the older ones."""

ALLOWED_WITH: dict[str, tuple[_Numbers, int, int]] = {"clone": ((56, 220), 0, CLONE_THREAD)}
"""Calls refused with EPERM unless the argument of this number has a bit of the mask in its low word."""
REFUSED_WITH: dict[str, tuple[_Numbers, int, int]] = {
    "open": ((2, None), 1, WRITING),
    "openat": ((257, 56), 2, WRITING),
    "socketpair": ((53, 199), 1, SOCKET_OF_DATAGRAMS),
    "fcntl": ((72, 25), 1, OWNER_OF_SIGNALS),
    "ioctl": ((16, 29), 1, GIVING_OR_OF_SOCKETS),
}
"""Calls refused with EPERM if that argument, of which the kernel reads the low word, has such a bit."""
REFUSED_UNLESS_NULL: dict[str, tuple[_Numbers, int]] = {"prlimit64": ((302, 261), 2)}
"""Calls refused with EPERM if that argument is an address, of 64 bits: the new limits', none when limits are read."""
TGKILL: _Numbers = (234, 131)
"""A signal to a thread, by which a process raises one in itself: refused with EPERM if the thread is another's."""

_Instruction = tuple[int, int, int, int]  # code, steps to jump if true and if false, operand


def refuse_system_calls() -> None:
    """Refuse this process the calls above from now on, and every thread that it starts from here.

    Raises:
        OSError: the machine is of another kind, or its kernel or container lets no process set a filter.
    """
    if sys.platform != "linux" or platform.machine() not in MACHINES:
        raise OSError(errno.ENOSYS, f"system calls of {sys.platform} on {platform.machine()} are not known here")
    instructions = _filter(*MACHINES[platform.machine()])
    codes = (_SockFilter * len(instructions))(*(_SockFilter(*instruction) for instruction in instructions))
    program = _SockFprog(len(instructions), codes)
    library = ctypes.CDLL(None, use_errno=True)
    for arguments in (
        (PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0),
    ):
        if library.prctl(*arguments) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _filter(column: int, architecture: int) -> list[_Instruction]:
    refuse, not_there = REFUSE | errno.EPERM, REFUSE | errno.ENOSYS
    program = [(LOAD, 0, 0, ARCHITECTURE), (IF_EQUAL, 1, 0, architecture), (RETURN, 0, 0, refuse)]
    program += [(LOAD, 0, 0, NUMBER), (IF_AT_LEAST, 0, 1, X32), (RETURN, 0, 0, refuse)]
    for calls, answer in ((REFUSED, refuse), (NOT_THERE, not_there)):
        for numbers in calls.values():
            if (number := numbers[column]) is not None:
                program += [(IF_EQUAL, 0, 1, number), (RETURN, 0, 0, answer)]
    for table, if_set, if_not in ((ALLOWED_WITH, ALLOW, refuse), (REFUSED_WITH, refuse, ALLOW)):
        for numbers, argument, mask in table.values():
            if (number := numbers[column]) is not None:
                program += _by_argument(number, argument, (IF_SET, mask), if_set, if_not)
    for numbers, argument in REFUSED_UNLESS_NULL.values():
        if (number := numbers[column]) is not None:
            program += _by_address(number, argument, refuse, ALLOW)
    if (number := TGKILL[column]) is not None:
        program += _by_argument(number, 0, (IF_EQUAL, os.getpid()), ALLOW, refuse)
    return [*program, (RETURN, 0, 0, ALLOW)]


def _by_argument(number: int, argument: int, test: tuple[int, int], if_so: int, if_not: int) -> list[_Instruction]:
    """Decides by the low word of an argument if the call has this number; the next instruction follows if not."""
    code, operand = test
    return [
        (IF_EQUAL, 0, 4, number),
        (LOAD, 0, 0, 16 + 8 * argument),
        (code, 0, 1, operand),
        (RETURN, 0, 0, if_so),
        (RETURN, 0, 0, if_not),
    ]


def _by_address(number: int, argument: int, if_any: int, if_null: int) -> list[_Instruction]:
    """Decides by both words of an argument, either of which can be 0 in an address, as `_by_argument`."""
    low = 16 + 8 * argument
    return [
        (IF_EQUAL, 0, 6, number),
        (LOAD, 0, 0, low),
        (IF_SET, 2, 0, 0xFFFFFFFF),
        (LOAD, 0, 0, low + 4),
        (IF_SET, 0, 1, 0xFFFFFFFF),
        (RETURN, 0, 0, if_any),
        (RETURN, 0, 0, if_null),
    ]


class _SockFilter(ctypes.Structure):
    _fields_ = [
        ("code", ctypes.c_uint16),
        ("if_true", ctypes.c_uint8),
        ("if_false", ctypes.c_uint8),
        ("operand", ctypes.c_uint32),
    ]


class _SockFprog(ctypes.Structure):
    _fields_ = [("length", ctypes.c_uint16), ("filter", ctypes.POINTER(_SockFilter))]
