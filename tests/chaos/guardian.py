"""
Takes a cluster down when the process that made it has died, however it died.

    python -m tests.chaos.guardian NAME          reads stdin to its end, which the owner's death is
"""

from __future__ import annotations

import signal
import sys

from tests.chaos.cluster import Cluster


def main() -> None:
    """Wait for the end of stdin, then clear away what is left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    Cluster(sys.argv[1]).down()


if __name__ == "__main__":
    main()
