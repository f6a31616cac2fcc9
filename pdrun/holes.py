"""
Files with holes: parts that were never written, which read as zero bytes and may be of any size.

A crash of the machine leaves them, a file that is cut while another process writes to it (as by
logrotate), and hostile writers.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator


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
