"""Confines a command with Linux namespaces; a fresh interpreter runs this file.

Three processes take part: this one outside, which the gateway can kill; process 1 of the sandbox, which also
runs this file and which code inside can neither end nor read; and the command. When either of the first two
ends, everything inside ends. Each execution waits for the imports, so only fast ones are here.
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import sys

_NOBODY = 65534
_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000
_CLONE_NEW_REST = 0x02000000 | 0x04000000 | 0x08000000 | 0x20000000 | 0x40000000  # cgroup uts ipc pid net
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 1, 2, 4, 8
_MS_BIND, _MS_REC, _MS_PRIVATE, _MNT_DETACH = 0x1000, 0x4000, 0x40000, 2
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE = 442, -100, 0x8000
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_KEEPCAPS, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 8, 22, 38
_CAPABILITIES_3, _CAP_SYS_ADMIN = 0x20080522, 21
_DEVICES = ("null", "zero", "full", "random", "urandom")

# Calls to deny, as namespaces and limits do not cover them: memory that belongs to no process, the gateway's
# keyrings, the kernel's log, interfaces with a history of faults. By architecture: its audit number, the number
# of `socket`, the denied calls.
_MACHINES = {
    "x86_64": (
        0xC000003E,
        41,
        {
            "add_key": 248,
            "request_key": 249,
            "keyctl": 250,
            "memfd_create": 319,
            "memfd_secret": 447,
            "shmget": 29,
            "semget": 64,
            "msgget": 68,
            "syslog": 103,
            "bpf": 321,
            "perf_event_open": 298,
            "userfaultfd": 323,
            "io_uring_setup": 425,
            "ptrace": 101,
            "unshare": 272,
        },
    ),
    "aarch64": (
        0xC00000B7,
        198,
        {
            "add_key": 217,
            "request_key": 218,
            "keyctl": 219,
            "memfd_create": 279,
            "memfd_secret": 447,
            "shmget": 194,
            "semget": 190,
            "msgget": 186,
            "syslog": 116,
            "bpf": 280,
            "perf_event_open": 241,
            "userfaultfd": 282,
            "io_uring_setup": 425,
            "ptrace": 117,
            "unshare": 97,
        },
    ),
}
_FAMILIES = (1, 2, 10)  # UNIX, INET, INET6; others, such as VSOCK, have no network namespaces
_X32 = 0x40000000  # first number of x86_64's second set of calls (x32)
_KILL, _ERRNO, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
_EPERM, _EAFNOSUPPORT = 1, 97
_CHECK_S = 0.1  # between two checks of the memory in use
_PAGE = os.sysconf("SC_PAGE_SIZE")
_LIBC = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: object) -> None:
    """Call a function of the C library; OSError if it fails."""
    values = (value.encode() if isinstance(value, str) else value for value in arguments)
    if getattr(_LIBC, name)(*(ctypes.c_long(v) if isinstance(v, int) else v for v in values)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def own_user(uid: int, gid: int) -> None:
    """Enter a user namespace in which this user is `nobody`, and the only one."""
    call("unshare", _CLONE_NEWUSER)
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{_NOBODY} {uid} 1")
    _write("/proc/self/gid_map", f"{_NOBODY} {gid} 1")


def leave_root() -> None:
    """Drop root: become `nobody` outside the sandbox, too."""
    call("prctl", _PR_SET_KEEPCAPS, 1, 0, 0, 0)  # for hosts where only root may create a user namespace
    call("setgroups", 0, None)
    call("setresgid", _NOBODY, _NOBODY, _NOBODY)
    call("setresuid", _NOBODY, _NOBODY, _NOBODY)
    mask = 1 << _CAP_SYS_ADMIN
    call("capset", (ctypes.c_uint32 * 2)(_CAPABILITIES_3), (ctypes.c_uint32 * 6)(mask, mask))
    call("prctl", _PR_SET_DUMPABLE, 1, 0, 0, 0)  # else /proc/self belongs to root
    own_user(_NOBODY, _NOBODY)


def private_root(visible: dict[str, str], disk_mib: int) -> None:
    """Replace the root with a private /tmp and the `visible` paths, read-only: {inside: outside}."""
    call("mount", "none", "/", None, _MS_REC | _MS_PRIVATE, None)
    call("mount", "tmpfs", "/tmp", "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=755,size=1m")
    os.mkdir("/tmp/old")
    call("pivot_root", "/tmp", "/tmp/old")
    os.chdir("/")
    for folder in ("/proc", "/dev", "/etc", "/tmp"):
        os.mkdir(folder)
    call("mount", "proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, None)
    room = f"mode=1777,size={disk_mib}m,nr_inodes={disk_mib * 256}"
    call("mount", "tmpfs", "/tmp", "tmpfs", _MS_NOSUID | _MS_NODEV, room)
    for name in _DEVICES:
        _bind(f"/old/dev/{name}", f"/dev/{name}")
    os.symlink("/proc/self/fd", "/dev/fd")
    os.symlink("/tmp", "/dev/shm")
    _write("/etc/passwd", f"nobody:x:{_NOBODY}:{_NOBODY}::/tmp:\n")
    for path, source in visible.items():
        _bind(f"/old{source}", path)
        _read_only(path, _AT_RECURSIVE)
    call("umount2", "/old", _MNT_DETACH)
    os.rmdir("/old")
    _read_only("/", 0)
    os.chdir("/tmp")


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _bind(source: str, path: str) -> None:
    if os.path.isdir(source):
        os.makedirs(path, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        _write(path, "")
    call("mount", source, path, None, _MS_BIND | _MS_REC, None)


def _read_only(path: str, recursive: int) -> None:
    wanted = (ctypes.c_uint64 * 4)(_MS_RDONLY | _MS_NOSUID | _MS_NODEV)
    call("syscall", _MOUNT_SETATTR, _AT_FDCWD, path, recursive, wanted, ctypes.sizeof(wanted))


def forbid_calls() -> None:
    """Deny the calls in `_MACHINES` to this process and its children."""
    audit, socket, denied = _MACHINES[os.uname().machine]
    load, equal, at_least, done = 0x20, 0x15, 0x35, 0x06
    refuse, no_family = (done, 0, 0, _ERRNO | _EPERM), (done, 0, 0, _ERRNO | _EAFNOSUPPORT)
    steps = [(load, 0, 0, 4), (equal, 1, 0, audit), (done, 0, 0, _KILL)]
    steps += [(load, 0, 0, 0), (at_least, 0, 1, _X32), refuse]
    for number in denied.values():
        steps += [(equal, 0, 1, number), refuse]
    families = [(equal, len(_FAMILIES) - place, 0, family) for place, family in enumerate(_FAMILIES)]
    steps += [(equal, 0, len(families) + 2, socket), (load, 0, 0, 16), *families, no_family]
    steps += [(done, 0, 0, _ALLOW)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    length_and_address = struct.pack("HP", len(steps), ctypes.addressof(program))
    call("prctl", _PR_SET_SECCOMP, 2, ctypes.c_char_p(length_and_address), 0, 0)


def confine(visible: dict[str, str], disk_mib: int, memory_mib: int, command: list[str]) -> int:
    """Confine and run a command; return its exit status, 128 + N for signal N."""
    os.umask(0o022)
    _write("/proc/self/oom_score_adj", "1000")  # without memory, the kernel kills it before a gateway or engine
    call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    root = os.geteuid() == 0
    if not root:
        own_user(os.geteuid(), os.getegid())
    call("unshare", _CLONE_NEWNS | _CLONE_NEW_REST)
    confined, done = os.pipe()
    if first := os.fork():
        os.close(done)
        if os.read(confined, 1):  # from now on /proc shows only the sandbox's processes
            return _status(_wait_bounded(first, memory_mib << 20))
        return _status(os.waitpid(first, 0)[1])  # the sandbox could not be set up
    private_root(visible, disk_mib)
    os.write(done, b"1")
    os.close(done)
    if root:  # only now: the mounts may need paths that only root can read
        leave_root()
    _write("/proc/sys/user/max_user_namespaces", "0")
    call("prctl", _PR_SET_DUMPABLE, 0, 0, 0, 0)
    call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    code = os.fork()
    if code == 0:
        os.setsid()
        call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        forbid_calls()
        os.execv(command[0], command)
    while True:  # the command's orphans become children of this process, too
        ended, status = os.wait()
        if ended == code:
            return _status(status)


def _wait_bounded(first: int, limit: int) -> int:
    """Wait for process 1 and return its status; kill it once all processes hold over `limit` bytes of memory."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    while True:
        ended, status = os.waitpid(first, os.WNOHANG)
        if ended:
            return status
        if sum(map(_memory_of, filter(str.isdecimal, os.listdir("/proc")))) > limit:
            os.write(2, f"killed: its processes hold more than {limit >> 20} MiB (memory_mib)\n".encode())
            os.kill(first, signal.SIGKILL)
            return os.waitpid(first, 0)[1]
        signal.sigtimedwait({signal.SIGCHLD}, _CHECK_S)


def _memory_of(process: str) -> int:
    """Return the bytes of memory of a process; shared pages are divided among their processes (PSS)."""
    try:
        try:
            with open(f"/proc/{process}/smaps_rollup") as file:
                return sum(int(line.split()[1]) << 10 for line in file if line.startswith(("Pss:", "SwapPss:")))
        except PermissionError:  # count shared pages in full, then
            with open(f"/proc/{process}/statm") as file:
                return int(file.read().split()[1]) * _PAGE
    except OSError:  # it has ended
        return 0


def _status(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def main() -> None:
    """Confine a command. Arguments: MiB of files and of memory, pairs of paths (inside, outside), "--", the command."""
    if sys.platform != "linux" or os.uname().machine not in _MACHINES:
        sys.exit(f"not supported for {sys.platform} on {os.uname().machine}")
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a handler would let the command interrupt process 1
    ends = sys.argv.index("--")
    disk_mib, memory_mib, pairs = int(sys.argv[1]), int(sys.argv[2]), iter(sys.argv[3:ends])
    try:
        os._exit(confine(dict(zip(pairs, pairs, strict=True)), disk_mib, memory_mib, sys.argv[ends + 1 :]))
    except OSError as error:
        sys.exit(error.strerror if error.filename is None else f"{error.filename}: {error.strerror}")


if __name__ == "__main__":
    main()
