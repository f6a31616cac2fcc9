"""
A scheduler process that is killed at a chosen commit of its journal: ``dying_server.py MOMENT
NUMBER MARKER``.

torn: half of the entry is written. written: all of it is, and nothing was acted upon. Only the
process that makes the file MARKER dies, so that its successor lives; it puts into it all that it
had committed. lost: nobody dies; the disk fails, and does not let the file be removed. The product
has no such place; here it is put in from outside.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from pathlib import Path

from pdrun.rendezvous.journal.file import Journal
from pdrun.rendezvous.scheduler import child_main as server

moment, number, marker = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
commit, count = Journal.commit, 0
committed = bytearray()


def dying(journal: Journal) -> None:
    global count
    pending = bytes(journal._pending)
    count += bool(pending)
    committed.extend(pending)
    last = bool(pending) and count == number and not marker.exists()
    if last and moment == "lost":
        raise OSError(errno.EIO, "broken")
    if last:
        marker.write_bytes(committed)
    if last and moment == "torn":
        os.write(journal._fd, pending[: len(pending) // 2])
    else:
        commit(journal)
    if last:
        os.kill(os.getpid(), signal.SIGKILL)


Journal.commit = dying  # type: ignore[method-assign]
if moment == "lost":
    Journal.discard = Journal.close  # type: ignore[method-assign]
if __name__ == "__main__":
    sys.exit(server.main())
