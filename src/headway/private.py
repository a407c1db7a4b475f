"""Files and directories of this user alone: prompts, answers, logs, and the locks that guard them.

Another user who can open the file of a lock can hold the lock, and one who can write to a directory can put
files there first.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from headway.errors import ConfigError

_BESIDE = ("", "-wal", "-shm", "-journal")  # a SQLite database's files


def directory(path: Path) -> Path:
    """Return a directory, made for this user alone with those above it; an existing one keeps its mode."""
    if not path.parent.exists():
        directory(path.parent)
    path.mkdir(0o700, exist_ok=True)
    return path


def state_dir() -> Path:
    """Return the user's state directory for Headway, made if missing."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    path = directory(Path(base) / "headway")
    if path.stat().st_mode & 0o077:
        with suppress(PermissionError):  # another user owns it
            path.chmod(0o700)
    return path


def shared_dir() -> Path:
    """Return the directory for what all processes of this user share; no other user can write to it.

    It is the state directory, or one among the temporary files where that cannot be used.
    """
    for find in (state_dir, _temporary_dir):
        with suppress(OSError, RuntimeError):  # without HOME
            path = find()
            if _is_safe(path):
                return path
    problem = "Neither the state directory nor one for temporary files is writable by this user alone."
    raise ConfigError(problem, "Set XDG_STATE_HOME to a directory that this user owns.")


def opened(path: str | Path, flags: int) -> int:
    """Open a file of this user alone, made if it is missing, and return its descriptor.

    Takes the rights of other users away. PermissionError if another user owns it; no link is followed.
    """
    handle = os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        if _exposed(os.fstat(handle), path):
            os.fchmod(handle, 0o600)
    except BaseException:
        os.close(handle)
        raise
    return handle


def database(path: str | Path, *, used: bool = False) -> None:
    """Make a SQLite database and its files private, before SQLite opens it: new files beside it get its mode.

    used: it had something. Raises OSError if another user owns one of the files, if the database is empty though
    it was used, and if it is empty or missing while its write-ahead log is not: SQLite would delete that log,
    and the work in it.
    """
    if used and not _size(path) and os.path.exists(path):
        raise OSError(errno.EIO, f"{path} is empty, but it was not; put it back, or delete it to begin anew")
    if _size(f"{path}-wal") and not _size(path):  # in this order: another gateway may be making both
        mend = "put the database back, or move its log away to begin anew"
        raise OSError(errno.EIO, f"{path} is empty or missing, but {path}-wal is not; {mend}")
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    for suffix in _BESIDE:
        # Not opened: closing it would drop the locks that SQLite holds on it in this process (POSIX).
        with suppress(FileNotFoundError):
            if _exposed(os.lstat(f"{path}{suffix}"), f"{path}{suffix}"):
                os.chmod(f"{path}{suffix}", 0o600)


def _exposed(status: os.stat_result, path: str | Path) -> bool:
    """Tell whether other users have rights on a file. PermissionError if another user owns it."""
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, f"{path} is not a file of this user")
    return bool(status.st_mode & 0o077)


def _temporary_dir() -> Path:
    return directory(Path(tempfile.gettempdir()) / f"headway-{os.geteuid()}")


def _is_safe(path: Path) -> bool:
    """Tell whether this user alone can write to a directory, or redirect it if it is a link."""
    status = path.stat()
    owners = {status.st_uid, path.lstat().st_uid}
    return owners == {os.geteuid()} and not status.st_mode & 0o022 and os.access(path, os.W_OK)


def _size(path: str | Path) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0
