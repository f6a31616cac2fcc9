"""
Bytes on the lifeline: the socket between an agent and the process that started it.

The end of the lifeline also has a meaning: for an agent, its starter has exited.
"""

from __future__ import annotations


class Lifeline:
    """One byte per message."""

    UP = b"u"
    """From the agent: signals reach it."""
    RUNNING = b"r"
    """From the agent: it starts workers, and the scheduler will notice its end."""
    FOR_ALL = b"a"
    """To the agent: the signals that follow mean the whole job, not only this node."""
