"""
Which descriptors can be read: `select.select` refuses those from 1024 on, and a user's process may
have many.
"""

from __future__ import annotations

import math
import select

LONG = 1e6
"""Seconds: more than this is what `poll` cannot count."""


def readable(*descriptors: int, wait: float | None = None) -> set[int]:
    """
    Return those of ``descriptors`` that can be read, or whose other end is gone, as soon as there
    is one.

    ``wait``: seconds after which the answer is the empty set; 0 or less: at once; None: as long as
    it takes.

    Raises:
        ValueError: one of them is not open.
    """
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    # rounded up: a caller that waits for a moment must not come back just before it, again and
    # again
    found = dict(poll.poll(None if wait is None else math.ceil(min(max(0.0, wait), LONG) * 1000)))
    if closed := [number for number, event in found.items() if event & select.POLLNVAL]:
        raise ValueError(f"not open: descriptor {closed[0]}")
    return set(found)
