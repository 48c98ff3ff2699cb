"""Seccomp: a filter (classic BPF) that refuses system calls of a sandboxed program.

It refuses kernel features that ordinary programs do not need (new namespaces, mounts, BPF,
io_uring, keys, modules, clocks), memory and files that belong to no process and so escape the
limits, asynchronous operations, of which the host has a fixed number, and sockets. Without
namespaces it also refuses the calls that Landlock does not cover: on file metadata, on the settings
of other processes of the same user, and on objects with guessable numbers or names (System V's
memory, semaphores and messages, and message queues). The format is that of linux/filter.h and
linux/seccomp.h. The numbers are those of asm/unistd_64.h and asm-generic/unistd.h. Called by
backends.py.
"""

import functools
import platform
import struct

_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column, AUDIT_ARCH_*
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST, _SECOND, _THIRD = 0, 4, 16, 24, 32  # in struct seccomp_data
_UPPER = 4  # offset in bytes of an argument's upper half
_KILL, _ERRNO, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
_EPERM, _ENOSYS, _EACCES, _EINVAL, _EOPNOTSUPP = 1, 38, 13, 22, 95
_X32 = 0x40000000  # the second, 32-bit set of numbers on x86_64
_NEW_NAMESPACES = 0x7E020080  # CLONE_NEWNS, -CGROUP, -UTS, -IPC, -USER, -PID, -NET, -TIME
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C  # they simulate input to a terminal

_Calls = dict[str, tuple[int | None, int | None]]  # name: number on x86_64, on aarch64
_ALWAYS: _Calls = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_setup": (206, 0),
    "io_submit": (209, 2),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "move_mount": (429, 429),
    "open_tree": (428, 428),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "syslog": (103, 116),
    "iopl": (172, None),
    "ioperm": (173, None),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    "fanotify_init": (300, 262),
    "vhangup": (153, 58),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "mq_open": (240, 180),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
}
_PINNING: _Calls = {  # they move pages to where one byte holds a page; programs copy instead
    "vmsplice": (278, 75),
    "splice": (275, 76),
    "tee": (276, 77),
    "sendfile": (40, 71),
}
#: They pass their flags in memory, which a filter cannot read. libc falls back to older calls.
_UNREADABLE: _Calls = {"clone3": (435, 435), "openat2": (437, 437)}
_RESERVING: _Calls = {"fallocate": (285, 47)}  # faster than any look at the disk; libc writes zeros
_OF_OTHERS: _Calls = {
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "move_pages": (279, 239),
    "migrate_pages": (256, 238),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "shmdt": (67, 197),
    "semop": (65, 193),
    "semctl": (66, 191),
    "semtimedop": (220, 192),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "mq_unlink": (241, 181),
}
_OF_OTHERS_BY_PID: _Calls = {  # allowed on the process itself, as pid 0
    "prlimit64": (302, 261),
    "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
}
_METADATA: _Calls = {
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
    "futimesat": (261, None),
    "file_setattr": (469, 469),
}
_XATTRS: _Calls = {
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "setxattrat": (463, 463),
    "removexattrat": (466, 466),
}
_CLONE, _SOCKET, _IOCTL = (56, 220), (41, 198), (16, 29)
_OPEN, _OPENAT, _UNNAMED = (2, None), (257, 56), 0o20000000  # O_TMPFILE
_UTIMENSAT, _FCNTL, _SETSOCKOPT = (280, 88), (72, 25), (54, 208)
_SET_LEASE = 1024  # F_SETLEASE: it makes other processes wait that open the file
_OF_SOCKETS, _BUFFERS = 1, (7, 8, 32, 33)  # SOL_SOCKET; SO_SNDBUF, SO_RCVBUF, and with force

_LOCAL = (1,)  # AF_UNIX
_INTERNET = (2, 10, 16)  # AF_INET, AF_INET6, AF_NETLINK


def machine_supported() -> bool:
    """Return True if this module has the numbers of this machine's system calls."""
    return platform.machine() in _MACHINES


@functools.cache
def filter_program(*, namespaces: bool, network: bool, owner: bool) -> bytes:
    """Return the filter: struct sock_filter[], native byte order.

    Args:
        namespaces: the program has its own pid, network and mount namespaces.
        network: the program may use the host's network. Unix sockets are then refused, as those
            with abstract names would be reachable too.
        owner: the program has the rights of an owner over files of this process's user.
    """
    column, architecture = _MACHINES[platform.machine()]
    families: tuple[int, ...] = ()
    if namespaces:
        families = _INTERNET if network else _LOCAL + _INTERNET
    elif network:
        families = _INTERNET
    refused = dict(_ALWAYS)
    if not namespaces:
        refused |= _OF_OTHERS | _XATTRS | (_METADATA if owner else {})
    lines = [
        _line(_LOAD, _ARCHITECTURE),
        _line(_EQUAL, architecture, then=1),
        _line(_RETURN, _KILL),
        _line(_LOAD, _NUMBER),
    ]
    if column == 0:
        lines += [_line(_AT_LEAST, _X32, otherwise=1), _line(_RETURN, _KILL)]
    for calls, errno in (
        (refused, _EPERM),
        (_PINNING, _EINVAL),
        (_UNREADABLE, _ENOSYS),
        (_RESERVING, _EOPNOTSUPP),
    ):
        for numbers in calls.values():
            if (number := numbers[column]) is not None:
                lines += [_line(_EQUAL, number, otherwise=1), _line(_RETURN, _ERRNO | errno)]
    for pair, flags in ((_OPEN, _SECOND), (_OPENAT, _THIRD)):
        if (number := pair[column]) is not None:
            lines += _when(number, flags, [(_ANY_BIT, _UNNAMED)], _EOPNOTSUPP)
    lines += _when(_CLONE[column], _FIRST, [(_ANY_BIT, _NEW_NAMESPACES)], _EPERM)
    lines += _when(_IOCTL[column], _SECOND, [(_EQUAL, _TIOCSTI), (_EQUAL, _TIOCLINUX)], _EPERM)
    lines += _when(_FCNTL[column], _SECOND, [(_EQUAL, _SET_LEASE)], _EPERM)
    # requests for another size of buffer succeed without effect, as the kernel may ignore them too
    wishes = [
        line
        for option in _BUFFERS
        for line in (_line(_EQUAL, option, otherwise=1), _line(_RETURN, _ERRNO))
    ]
    body = [_line(_LOAD, _SECOND), _line(_EQUAL, _OF_SOCKETS, then=1), _line(_RETURN, _ALLOW)]
    body += [_line(_LOAD, _THIRD), *wishes, _line(_RETURN, _ALLOW)]
    lines += [_line(_EQUAL, _SETSOCKOPT[column], otherwise=len(body)), *body]
    lines += _unless(_SOCKET[column], _FIRST, families, _EACCES)
    if not namespaces:
        for numbers in _OF_OTHERS_BY_PID.values():
            if (number := numbers[column]) is not None:
                lines += _unless(number, _FIRST, (0,), _EPERM)
        if owner:  # allowed on an open file without a path, as `touch` does for a new file
            body = [_line(_LOAD, _SECOND + _UPPER), _line(_EQUAL, 0, then=1)]
            body += [_line(_RETURN, _ERRNO | _EPERM)]
            body += _unless(None, _SECOND, (0,), _EPERM)
            lines += [_line(_EQUAL, _UTIMENSAT[column], otherwise=len(body)), *body]
    return b"".join([*lines, _line(_RETURN, _ALLOW)])


def _when(number: int, argument: int, tests: list[tuple[int, int]], errno: int) -> list[bytes]:
    """Refuse the call if one of the tests of its argument (lower 32 bits) holds."""
    checks = [
        line
        for code, value in tests
        for line in (_line(code, value, otherwise=1), _line(_RETURN, _ERRNO | errno))
    ]
    body = [_line(_LOAD, argument), *checks, _line(_RETURN, _ALLOW)]
    return [_line(_EQUAL, number, otherwise=len(body)), *body]


def _unless(number: int | None, argument: int, values: tuple[int, ...], errno: int) -> list[bytes]:
    """Refuse the call (None: any) unless its argument (lower 32 bits) is one of these."""
    checks = [
        line
        for value in values
        for line in (_line(_EQUAL, value, otherwise=1), _line(_RETURN, _ALLOW))
    ]
    body = [_line(_LOAD, argument), *checks, _line(_RETURN, _ERRNO | errno)]
    if number is None:
        return body
    return [_line(_EQUAL, number, otherwise=len(body)), *body]


def _line(code: int, value: int, *, then: int = 0, otherwise: int = 0) -> bytes:
    return struct.pack("=HBBI", code, then, otherwise, value)
