"""Small helpers for messages."""

from __future__ import annotations


def plural(count: int, noun: str) -> str:
    """Return a count with its noun: ``1 node``, ``2 nodes``, ``0 nodes``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
