"""
Disk access: private folders, files below them, holes of files, and calls that may never return.

Logs and journals may be in a folder that other users can write. `open_below` therefore follows no
link there and uses no folder or file of another user (root is trusted).

On a network file system without its server, a call blocks for any length of time.
`BackgroundCall` makes it in a thread.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")


def make_private_folder(folder: Path) -> None:
    """
    Create a folder and its missing parents, all with mode 0700. An existing folder is unchanged.

    `Path.mkdir` applies the mode to the last folder only.
    """
    if not folder.is_dir():
        if folder.parent != folder:
            make_private_folder(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def foreign_owner(status: os.stat_result) -> str:
    """Return a description of a file's owner, if it is neither this user nor root; else empty."""
    if status.st_uid in (0, os.geteuid()):
        return ""
    return f"belongs to another user (uid {status.st_uid})"


def open_folder(folder: Path) -> int:
    """
    Create a folder if it is missing, and return its descriptor.

    Links in its path are followed, but it is no link of another user: a planted one would lead to a
    folder of this user.

    Raises:
        PermissionError: it, or a link in its place, belongs to another user.
        OSError: it cannot be created or opened.
    """
    make_private_folder(folder)
    fd = _open_own_link(folder)
    if reason := foreign_owner(os.fstat(fd)):
        os.close(fd)
        raise PermissionError(errno.EPERM, f"{folder} {reason}")
    return fd


def _open_own_link(folder: Path) -> int:
    """Open a folder; the owner of a link in its place is checked before the link is followed."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    try:
        return os.open(folder, flags | os.O_NOFOLLOW)
    except OSError:
        if not folder.is_symlink():
            raise
    # What is checked is what is followed, also if the link is replaced in between.
    link = os.open(folder, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if reason := foreign_owner(os.fstat(link)):
            raise PermissionError(errno.EPERM, f"{folder} is a link that {reason}")
        return os.open(folder.parent / os.readlink("", dir_fd=link), flags)
    finally:
        os.close(link)


def open_below(root: Path, path: Path, flags: int) -> int:
    """
    Open a regular file below a folder, and return its descriptor.

    Missing folders are created with mode 0700, a missing file (with O_CREAT) with 0600. Links are
    followed in the path of ``root`` only.

    Raises:
        PermissionError: a folder or the file is a link, or belongs to another user.
        OSError: it cannot be created or opened, or is not a regular file.
    """
    *folders, name = path.relative_to(root).parts
    here = root
    fd = open_folder(root)
    try:
        for folder in folders:
            here = here / folder
            try:
                os.mkdir(folder, 0o700, dir_fd=fd)
            except FileExistsError:
                pass
            inner = _open_at(fd, folder, here, os.O_RDONLY | os.O_DIRECTORY)
            os.close(fd)
            fd = inner
        found = _open_at(fd, name, path, flags | os.O_NONBLOCK)
    finally:
        os.close(fd)
    if not stat.S_ISREG(os.fstat(found).st_mode):
        os.close(found)
        raise OSError(errno.EINVAL, f"{path} is not a regular file")
    os.set_blocking(found, True)
    return found


def _open_at(folder: int, name: str, path: Path, flags: int) -> int:
    more = os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC
    try:
        fd = os.open(name, flags | more, 0o600, dir_fd=folder)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR, errno.EMLINK) or not path.is_symlink():
            raise
        raise PermissionError(errno.EPERM, f"{path} is a symbolic link") from None
    if reason := foreign_owner(os.fstat(fd)):
        os.close(fd)
        raise PermissionError(errno.EPERM, f"{path} {reason}")
    return fd


class BackgroundCall(Generic[T]):
    """
    A call that runs in a daemon thread. The caller may wait for it or abandon it.

    The thread ends with the process, even if the call never returns. If no thread can be started
    (a limit on processes), the constructor makes the call itself.
    """

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._values: list[T] = []
        self._error: BaseException | None = None
        self._done = threading.Event()
        try:
            threading.Thread(target=self._run_call, name="pdrun-call", daemon=True).start()
        except RuntimeError:
            self._run_call()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for at most ``seconds`` (None: no limit); return whether the call has ended."""
        return self._done.wait(seconds)

    def result(self) -> T:
        """Wait for the call; return its value or raise its error."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._values[0]

    def _run_call(self) -> None:
        try:
            self._values.append(self._call())
        except BaseException as error:  # `result` raises it
            self._error = error
        self._done.set()


# Holes: parts of a file that were never written, which read as zero bytes and may be of any size. A
# crash of the machine leaves them, a file that is cut while another process writes to it (as by
# logrotate), and hostile writers.
# --------------------------------------------------------------------------------------------------


def find_data(fd: int, offset: int, end: int) -> int:
    """Return the first offset that is not in a hole, at most ``end``."""
    try:
        return min(end, os.lseek(fd, offset, os.SEEK_DATA))
    except OSError as error:
        return end if error.errno == errno.ENXIO else offset  # else the file system has no holes


def find_hole(fd: int, offset: int, end: int) -> int:
    """Return the first offset that is in a hole, at most ``end``."""
    try:
        return min(end, os.lseek(fd, offset, os.SEEK_HOLE))
    except OSError:
        return end


def list_parts(fd: int, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield first offset and end of each part between ``start`` and ``end`` that is not a hole."""
    while (start := find_data(fd, start, end)) < end:
        stop = find_hole(fd, start, end)
        if stop <= start:  # the file has changed meanwhile
            stop = end
        yield start, stop
        start = stop
