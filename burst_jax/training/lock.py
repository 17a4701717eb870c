"""One writer at a time: a lock on a file that ends with the process that holds it.

The lock is a POSIX record lock (``fcntl.lockf``). The kernel drops it when the process ends in any
way, so a crash or SIGKILL leaves a file but no lock, and the next process takes the file over. On
NFS version 4 and on parallel file systems that support ``fcntl`` the server arbitrates between
hosts, and drops the locks of a lost host when its lease ends. Unlike ``flock``, it is not inherited
by forked processes, which could outlive the run. Unlike a file with a host and a process id, it
needs no guess whether a process of another host still runs.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import sys
import threading
import time
import weakref
from pathlib import Path

# Device and inode of the files that this process has locked. It must not open them again: closing
# any descriptor of a file drops the process' locks on it.
_HELD: set[tuple[int, int]] = set()
# Reentrant, because garbage collection may release another lock inside.
_MUTEX = threading.RLock()
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class FileLock:
    """Locks a file for this process until :meth:`release`, or the end of the process.

    Args:
      path: the file, which is created, and removed by :meth:`release`. Its folder must exist.
      what: what it protects, for messages.

    Raises:
      ValueError: another process, or this one, has locked it, or it is no regular file. The message
        names the process, its host and when it started to write.
      OSError: the file cannot be created.
    """

    def __init__(self, path: Path, what: str) -> None:
        with _MUTEX:
            descriptor = _open_locked(path, what)
            found = os.fstat(descriptor)
            self._key = found.st_dev, found.st_ino
            _HELD.add(self._key)
        owner = f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%F %T')}"
        with contextlib.suppress(OSError):  # On a full disk only the message lacks the owner.
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, owner.encode(), 0)
        # A forked process has a copy of this object, but not the lock.
        self._release = weakref.finalize(self, _release, path, descriptor, self._key, os.getpid())

    def release(self) -> None:
        """Removes the file and ends the lock. It may be called twice."""
        self._release()


def _open_locked(path: Path, what: str) -> int:
    """The descriptor of the file at ``path``, locked."""
    while True:
        _check_not_held(path, what)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ValueError(f"{path} is no regular file: remove it, it is to be a lock")
            _lock(descriptor, path, what)
            # Its last owner may have removed it after it was opened here.
            if _is_at(path, descriptor):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _check_not_held(path: Path, what: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        found = os.lstat(path)
        if (found.st_dev, found.st_ino) in _HELD:
            raise ValueError(
                f"{what} is being written by this process already: close what writes there first, "
                "or use another folder"
            )


def _lock(descriptor: int, path: Path, what: str) -> None:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            print(
                f"{path} cannot be locked on this file system ({error.strerror}): two runs that "
                f"write {what} at the same time would not notice each other",
                file=sys.stderr,
                flush=True,
            )
            return
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            raise
        text = os.pread(descriptor, 300, 0).decode(errors="replace")
        owner = "".join(each for each in text if each.isprintable()) or "another process"
        raise ValueError(
            f"{what} is being written by another run: {owner}. Wait until it ends or stop it, or "
            "use another folder"
        ) from None


def _is_at(path: Path, descriptor: int) -> bool:
    found = os.fstat(descriptor)
    try:
        there = os.lstat(path)
    except FileNotFoundError:
        return False
    return (there.st_dev, there.st_ino) == (found.st_dev, found.st_ino)


def _release(path: Path, descriptor: int, key: tuple[int, int], owner: int) -> None:
    if os.getpid() != owner:
        return
    with _MUTEX:
        with contextlib.suppress(OSError):
            # Removed while it is locked: a process that has opened it then sees that it is gone.
            if _is_at(path, descriptor):
                path.unlink()
        _HELD.discard(key)
        os.close(descriptor)
