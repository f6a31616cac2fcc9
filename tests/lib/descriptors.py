"""Which test modules leave descriptors behind: a long run would have none left at its end."""

from __future__ import annotations

import collections
import contextlib
import gc
import os
import re

ALLOWED = 256
"""More than the ranks of all sizes have (`tests.lib.rank_pool`), less than select can bear."""


def count_open() -> int:
    """Return how many descriptors this process has open."""
    return len(os.listdir("/proc/self/fd"))


class DescriptorWatch:
    """Says after which module ALLOWED more descriptors were open than before."""

    def __init__(self, allowed: int = ALLOWED) -> None:
        self.allowed = allowed
        self.before = count_kinds()
        """Open at the start, or when the last complaint was made."""

    def complaint(self) -> str:
        """Return what is wrong now, empty: nothing. What was complained of is not told again."""
        if count_open() - self.before.total() <= self.allowed:
            return ""
        gc.collect()  # what nobody holds any more would be closed sooner or later
        found = count_kinds()
        more = found.total() - self.before.total()
        if more <= self.allowed:
            return ""
        new = ", ".join(f"{count} x {kind}" for kind, count in (found - self.before).most_common(3))
        self.before = found
        return (
            f"{more} more descriptors are open than before ({new}): close what this "
            "module, or those before it in this process, have opened"
        )


def count_kinds() -> collections.Counter[str]:
    """Return how many descriptors of each kind this process has open."""
    kinds: collections.Counter[str] = collections.Counter()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            kinds[re.sub(r":?\[?\d+\]?", "", os.readlink(f"/proc/self/fd/{name}"))] += 1
    return kinds
