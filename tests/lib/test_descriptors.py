"""A module that leaves descriptors behind is told, once, with their kind."""

from __future__ import annotations

import os

from tests.lib.descriptors import DescriptorWatch


def test_what_is_left_open_is_told_once_and_garbage_is_not() -> None:
    watch = DescriptorWatch(allowed=8)
    left = [os.eventfd(0) for _ in range(9)]
    try:
        found = watch.complaint()
        assert found.startswith("9 more descriptors are open") and "eventfd" in found
        assert watch.complaint() == ""
    finally:
        for fd in left:
            os.close(fd)
    watch = DescriptorWatch(allowed=8)
    garbage: list[object] = [open(os.devnull) for _ in range(9)]  # noqa: SIM115
    garbage.append(garbage)
    del garbage
    assert watch.complaint() == ""
